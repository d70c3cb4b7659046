"""The paper's experiments at small scale: every variant with several seeds, and the differences with intervals.

    python -m bench.study positions tiny-imagenet.zip --fewshot caltech101.zip --parallel 4     # one H200, 20 minutes
    python -m bench.study positions photos/ --set train.steps=4 --seeds 0 1                     # anywhere, to try it

Each run is `vitrail train` in its own process, several in parallel on one GPU. The result file is rewritten after each
run, so an interrupted study keeps its results. Finished runs are not repeated.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from scipy import stats

from bench.record import RESULTS, machine_facts, write_results
from vitrail.weights.bundle import read_card

SHOTS = 5


@dataclass(frozen=True)
class Study:
    claim: str  # of the paper
    recipe: str
    settings: tuple[str, ...]  # common to all runs
    cells: dict[str, tuple[str, ...]]  # variant -> its settings
    baseline: str  # the variant that the others are compared with


# 20 epochs, with the settings that were best for this length on a split of the training images (docs/log.md).
SHORT = (
    "train.epochs=20",
    "augment.scale=[0.35,1.0]",
    "augment.randaugment_layers=1",
    "train.ema=0.999",
    "data.val_as_test=true",
    "data.group_similar=false",
    "data.cache=disk",
    "train.checkpoint_every=1000000",
    "model.init=paper",
)


def _positions(kind: str, at: str = "stem") -> tuple[str, ...]:
    return (f"model.positions={kind}", f"model.positions_at={at}")


STUDIES = {
    "positions": Study(
        claim="Table 8: none loses 2.8 points of 5-shot accuracy; all kinds of positions are within 0.3 points",
        recipe="tiny-imagenet",
        settings=(*SHORT, "model.pool=token"),
        cells={
            "none": _positions("none"),
            "1-D, stem": _positions("1d"),
            "1-D, every layer": _positions("1d", "layers"),
            "1-D, every layer, shared": _positions("1d", "shared"),
            "2-D, stem": _positions("2d"),
            "2-D, every layer": _positions("2d", "layers"),
            "2-D, every layer, shared": _positions("2d", "shared"),
            "relative": _positions("relative"),
        },
        baseline="1-D, stem",
    ),
    "pooling": Study(
        claim="Figure 9: class token and mean pooling are equally good, at different learning rates",
        recipe="tiny-imagenet",
        settings=(*SHORT, "model.positions=1d"),
        cells={
            f"{name}, rate {rate}": (f"model.pool={pool}", f"optimizer.lr={rate}")
            for name, pool in (("class token", "token"), ("mean", "gap"))
            for rate in ("1e-3", "3e-3", "9e-3")
        },
        baseline="class token, rate 3e-3",
    ),
}


@dataclass(frozen=True)
class Job:
    cell: str
    seed: int
    folder: Path
    train: list[str]  # the command
    fewshot: list[str]  # the command; empty: none


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.study", description="The paper's experiments at small scale."
    )
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("data", help="dataset, as for `vitrail train`")
    parser.add_argument(
        "--fewshot", nargs="+", default=[], metavar="DATA", help=f"datasets to measure {SHOTS}-shot accuracy on"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--cells", nargs="+", metavar="NAME", help="cells to run (default: all)")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings for all runs")
    parser.add_argument("--parallel", type=int, default=1, help="number of runs in parallel")
    parser.add_argument("--runs", default="runs/study", metavar="FOLDER", help="folder for the runs")
    parser.add_argument("--out", default=str(RESULTS), metavar="FOLDER", help="folder for the JSON file")
    options = parser.parse_args(arguments)
    study = STUDIES[options.study]
    if unknown := set(options.cells or ()) - set(study.cells):
        parser.error(f"--cells: unknown cell {', '.join(sorted(unknown))}; available: {', '.join(study.cells)}")
    if options.cells:
        study = replace(study, cells={name: study.cells[name] for name in options.cells})
    keys = {change.partition("=")[0] for change in options.set}
    if keys & {"train.steps", "train.epochs"}:
        keys |= {"train.steps", "train.epochs"}
    settings = [change for change in study.settings if change.partition("=")[0] not in keys]
    study = replace(study, settings=(*settings, *options.set))
    run(study, options)


def run(study: Study, options: argparse.Namespace) -> None:
    console, name = Console(width=110), f"study-{options.study}"
    jobs = [_job(study, options, cell, seed) for seed in options.seeds for cell in study.cells]
    results: dict[str, Any] = {
        "study": options.study,
        "claim": study.claim,
        "command": _command(options),
        "data": Path(options.data).name,
        "recipe": study.recipe,
        "settings": list(study.settings),
        "runs_at_a_time": options.parallel,
        "machine": machine_facts("cuda" if torch.cuda.is_available() else "cpu"),
        "cells": {cell: {"settings": list(changes), "runs": []} for cell, changes in study.cells.items()},
    }
    lock = Lock()

    def do(job: Job) -> None:
        row = measure(job)
        with lock:
            results["cells"][job.cell]["runs"].append(row)
            results["summary"] = summary(results["cells"], study.baseline)
            write_results(Path(options.out), name, results)
        console.print(f"{job.cell}, seed {job.seed}: {row.get('error') or _cell(row['top1'])}")

    with ThreadPoolExecutor(options.parallel) as pool:
        list(pool.map(do, jobs))
    console.print(table(results["summary"], study))
    console.print(f"written: {Path(options.out) / f'{name}.json'}")
    if failed := [run for cell in results["cells"].values() for run in cell["runs"] if "error" in run]:
        raise SystemExit(f"{len(failed)} runs failed")


def _command(options: argparse.Namespace) -> str:
    """The command of this study, with file names instead of full paths."""
    command = ["python", "-m", "bench.study", options.study, Path(options.data).name]
    lists = {"fewshot": [Path(data).name for data in options.fewshot], "seeds": options.seeds, "cells": options.cells}
    for name, values in {**lists, "set": options.set, "parallel": [options.parallel]}.items():
        command += [f"--{name}", *map(str, values)] if values else []
    return shlex.join(command)


def _job(study: Study, options: argparse.Namespace, cell: str, seed: int) -> Job:
    suffix = cell.replace(",", "").replace(" ", "-")
    folder = Path(options.runs) / f"{options.study}-{suffix}-{seed}"
    settings = [f"--set={change}" for change in (*study.settings, *study.cells[cell], f"train.seed={seed}")]
    vitrail = [sys.executable, "-m", "vitrail"]
    train = [*vitrail, "train", options.data, "--recipe", study.recipe, *settings, "--out", str(folder), "--resume"]
    few = [*vitrail, "fewshot", str(folder), *options.fewshot, "--shots", str(SHOTS), "--form", "big_vision"]
    return Job(cell, seed, folder, train, [*few, "--json"] if options.fewshot else [])


def measure(job: Job) -> dict[str, Any]:
    """Train and return the metrics, or the end of the output if the run failed."""
    started = time.monotonic()
    job.folder.parent.mkdir(parents=True, exist_ok=True)
    with job.folder.with_suffix(".log").open("a") as log:
        trained = subprocess.run(job.train, stdout=log, stderr=subprocess.STDOUT)
    facts: dict[str, Any] = {"seed": job.seed, "seconds": round(time.monotonic() - started, 1)}
    if trained.returncode:
        return facts | {"error": job.folder.with_suffix(".log").read_text()[-400:]}
    metrics = read_card(job.folder / "model.safetensors").metrics
    facts |= {key: metrics[key] for key in ("n", "top1", "top1_interval", "nll")}
    if job.fewshot:
        measured = subprocess.run(job.fewshot, capture_output=True, text=True)
        if measured.returncode:
            return facts | {"error": measured.stderr[-400:]}
        facts["fewshot"] = json.loads(measured.stdout)
    return facts


def summary(cells: dict[str, Any], baseline: str) -> dict[str, Any]:
    """Mean and deviation of each cell over its seeds, and its difference from the baseline with a 95 % interval.

    The interval is Student's t, with the deviation pooled over all cells. It covers only the variation between seeds:
    all runs are measured on the same images.
    """
    result: dict[str, Any] = {}
    for measure in ("top1", "fewshot"):
        values = {cell: _values(content["runs"], measure) for cell, content in cells.items()}
        if not any(values.values()):
            continue
        freedom = sum(max(len(runs) - 1, 0) for runs in values.values())
        squares = sum((len(runs) - 1) * statistics.variance(runs) for runs in values.values() if len(runs) > 1)
        pooled = math.sqrt(squares / freedom) if freedom else None
        rows: dict[str, Any] = {}
        for cell, runs in values.items():
            row: dict[str, Any] = {"seeds": len(runs)}
            if runs:
                row["mean"] = statistics.fmean(runs)
                row["deviation"] = statistics.stdev(runs) if len(runs) > 1 else None
            if runs and values[baseline]:
                row["difference"] = row["mean"] - statistics.fmean(values[baseline])
                if pooled is not None and cell != baseline:
                    row["half_width"] = half_width(pooled, freedom, len(runs), len(values[baseline]))
            rows[cell] = row
        result[measure] = {"deviation": pooled, "degrees_of_freedom": freedom, "cells": rows}
    return result


def half_width(deviation: float, freedom: int, count: int, others: int) -> float:
    """Half the width of the 95 % interval of the difference between two means of `count` and `others` runs."""
    return float(stats.t.ppf(0.975, freedom)) * deviation * math.sqrt(1 / count + 1 / others)


def _values(runs: list[dict[str, Any]], measure: str) -> list[float]:
    """One value per finished run; few-shot accuracy is averaged over the datasets."""
    ended = [run for run in runs if "error" not in run and measure in run]
    if measure == "top1":
        return [run["top1"] for run in ended]
    return [statistics.fmean(row["accuracy"] for row in run["fewshot"]) for run in ended]


def _cell(value: float) -> str:
    return f"{100 * value:.2f} %"


def table(summaries: dict[str, Any], study: Study) -> Table:
    result = Table(title=study.claim, box=box.SIMPLE, padding=(0, 1, 0, 0))
    result.add_column("")
    for measure in summaries:
        result.add_column("top-1" if measure == "top1" else f"{SHOTS}-shot", justify="right")
        result.add_column(f"minus {study.baseline}", justify="right")
    for cell in study.cells:
        texts = []
        for measured in summaries.values():
            row = measured["cells"][cell]
            spread = f" ± {100 * row['deviation']:.2f}" if row.get("deviation") is not None else ""
            texts.append(f"{_cell(row['mean'])}{spread}" if "mean" in row else "-")
            half = f" ± {100 * row['half_width']:.2f}" if "half_width" in row else ""
            texts.append(
                f"{100 * row['difference']:+.2f}{half}" if "difference" in row and cell != study.baseline else ""
            )
        result.add_row(cell, *texts)
    return result


if __name__ == "__main__":
    main()
