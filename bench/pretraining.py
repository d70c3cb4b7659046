"""The gain of pre-training for three families of networks: Tables 2 and 5 of the paper at small scale.

    python -m bench.pretraining tiny.zip --to flowers=flowers.zip caltech=caltech.zip cifar=cifar.zip --parallel 8

Each family is pre-trained on the first dataset with the same compute, then fine-tuned on each target. The baseline is
the same network trained on the target from random weights for the same number of epochs. The optimizer of a family is
chosen on a validation split of 10 % of the pre-training images. Each run is `vitrail train` in its own process. The
result file is rewritten after each run, and finished runs are not repeated.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from bench.record import RESULTS, machine_facts, write_results
from bench.study import Job, half_width, measure, summary
from vitrail.config import NetworkConfig, Preprocess
from vitrail.models.build import build_model
from vitrail.models.flops import count_macs, count_parameters
from vitrail.models.variants import config_from_name
from vitrail.weights.bundle import Card, created_with, write_bundle

CLAIM = "Tables 2 and 5: pre-training on more images pays, and a ViT gains more by it than a ResNet"
NAME = "study-pretraining"  # of the result file
PARTS = ("tries", "pretraining", "transfer")
RECIPES = Path(__file__).parent / "recipes"
SIDE = 64
SCRATCH, PRETRAINED = "scratch", "pre-trained"
ADAMW: dict[str, tuple[str, ...]] = {
    f"AdamW, {rate}": ("optimizer.name=adamw", f"optimizer.lr={rate}") for rate in ("1e-3", "3e-3")
}
MUON: dict[str, tuple[str, ...]] = {
    "Muon, 3e-3": ("optimizer.name=muon", "optimizer.lr=3e-3")
}  # for the matrices of Transformer blocks


@dataclass(frozen=True)
class Family:
    name: str
    shape: dict[str, Any]  # changes of the network config
    optimizers: dict[str, tuple[str, ...]]  # candidates: name -> settings


# All have a similar cost. The stem and the ResNet have fewer stages, as the paper's hybrids have, so that the feature
# maps at 64 px are 8x8 and 4x4 instead of 4x4 and 2x2.
FAMILIES = {
    "ViT": Family("Ti/8", {}, ADAMW | MUON),
    "hybrid": Family("R26+Ti/16", {"stem": {"blocks": (2, 2)}, "patch": (1, 1)}, ADAMW | MUON),
    "ResNet": Family("R50x1", {"blocks": (3, 4, 9)}, ADAMW),
}
# Epochs, batch size and learning rate of fine-tuning, as for the bundled weights in docs/results.md (there with 12
# epochs for CIFAR-10).
LENGTHS = {
    "cifar": ("train.epochs=10", "train.batch_size=256"),
    "flowers": ("train.epochs=60", "train.batch_size=128"),
    "caltech": ("train.epochs=40", "train.batch_size=128"),
}
RATES = {"cifar": "1e-3", "flowers": "3e-4", "caltech": "3e-4"}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.pretraining", description=CLAIM)
    parser.add_argument("data", help="dataset for pre-training; its validation split is the test set")
    parser.add_argument(
        "--to", nargs="+", required=True, metavar="NAME=DATA", help="datasets for fine-tuning, with test splits"
    )
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument(
        "--epochs", type=float, default=15, help="pre-training epochs of the first family; the others get equal compute"
    )
    parser.add_argument("--try-epochs", type=float, default=4, help="the same for the runs that choose the optimizer")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings for all runs")
    parser.add_argument("--parallel", type=int, default=1, help="number of runs in parallel")
    parser.add_argument("--runs", default="runs/pretraining", metavar="FOLDER", help="folder for the runs")
    parser.add_argument("--out", default=str(RESULTS), metavar="FOLDER", help="folder for the JSON file")
    options = parser.parse_args(arguments)
    targets = {name: data for name, _, data in (text.partition("=") for text in options.to)}
    if unknown := targets.keys() - LENGTHS.keys():
        parser.error(f"--to: unknown name {', '.join(sorted(unknown))}; available: {', '.join(LENGTHS)}")
    _Study(options, targets).run()


def network(family: Family, num_classes: int = 200) -> NetworkConfig:
    return config_from_name(family.name, num_classes, SIDE, **family.shape)


def random_weights(family: Family, seed: int, folder: Path) -> Path:
    """Write random initial weights to a file, since these networks have no model name. Return its path."""
    path = folder / f"random-{family.name.replace('/', '-')}-{seed}.safetensors"
    if not path.exists():
        torch.manual_seed(seed)
        config = network(family)
        card = Card(model=config, preprocess=Preprocess(size=config.image_size), created_with=created_with())
        folder.mkdir(parents=True, exist_ok=True)
        write_bundle(path, build_model(config).state_dict(), card)
    return path


@dataclass
class _Study:
    options: argparse.Namespace
    targets: Mapping[str, str]  # name: data
    results_lock: Lock = field(default_factory=Lock)
    console: Console = field(default_factory=lambda: Console(width=110))

    def __post_init__(self) -> None:
        families = {name: FAMILIES[name] for name in self.options.families}
        self.families, self.runs = families, Path(self.options.runs)
        costs = {name: count_macs(network(family)) for name, family in families.items()}
        first = costs[next(iter(costs))]
        self.epoch_ratio = {name: first / cost for name, cost in costs.items()}  # epochs relative to the first family
        self.finished = _finished_runs(Path(self.options.out), self.runs)
        self.planned: list[tuple[str, str]] = []  # part and folder of each run
        self.results: dict[str, Any] = {
            "study": "pretraining",
            "claim": CLAIM,
            "command": self._command(),
            "data": Path(self.options.data).name,
            "recipes": {path.name: path.read_text() for path in sorted(RECIPES.glob("*.toml"))},
            "fine_tuning": {name: [*LENGTHS[name], f"optimizer.lr={RATES[name]}"] for name in self.targets},
            "settings": self.options.set,
            "runs_at_a_time": self.options.parallel,
            "machine": machine_facts("cuda" if torch.cuda.is_available() else "cpu"),
            "families": {
                name: {
                    "network": network(family).model_dump(mode="json"),
                    "parameters": count_parameters(network(family)),
                    "macs": costs[name],
                    "epochs": round(self.options.epochs * self.epoch_ratio[name], 3),
                }
                for name, family in families.items()
            },
            "tries": [],
            "pretraining": [],
            "transfer": [],
        }

    def run(self) -> None:
        with ThreadPoolExecutor(self.options.parallel) as self.pool:
            self._submit()
        self.console.print(table(self.results["summary"]))
        self.console.print(f"written: {self._write()}")
        if failed := [row for part in PARTS for row in self.results[part] if "error" in row]:
            raise SystemExit(f"{len(failed)} runs failed")

    def _submit(self) -> None:
        """Submit all runs, in an order in which a run waits only for earlier ones."""
        options, short, long = self.options, RECIPES / "pretraining.toml", RECIPES / "fine-tuning.toml"
        tries: dict[str, dict[str, Future[dict[str, Any]]]] = {name: {} for name in self.families}
        for name, family in self.families.items():
            for optimizer, changes in family.optimizers.items():
                epochs = f"train.epochs={options.try_epochs * self.epoch_ratio[name]:g}"
                settings = [*changes, epochs, "data.use_test=false", "data.val_fraction=0.1"]
                about = {"family": name, "optimizer": optimizer, "seed": 0}
                start = self._random(family, 0)
                tries[name][optimizer] = self._submit_run(
                    "tries", about, options.data, short, start, partial(list, settings)
                )

        def chosen(name: str) -> tuple[str, ...]:
            """Settings of the optimizer with the best validation accuracy; ties are broken by the likelihood."""
            rows = {optimizer: future.result() for optimizer, future in tries[name].items()}
            valid = {optimizer: row for optimizer, row in rows.items() if "error" not in row}
            best = max(valid, key=lambda optimizer: (valid[optimizer]["top1"], -valid[optimizer]["nll"]))
            self.results["families"][name]["optimizer"] = best
            return self.families[name].optimizers[best]

        def from_random(name: str, *settings: str) -> list[str]:
            return [*chosen(name), *settings]

        pretrained: dict[tuple[str, int], Future[dict[str, Any]]] = {}
        for seed in options.seeds:
            for name, family in self.families.items():
                epochs = f"train.epochs={options.epochs * self.epoch_ratio[name]:g}"
                about = {"family": name, "seed": seed}
                start, make_settings = self._random(family, seed), partial(from_random, name, epochs)
                pretrained[name, seed] = self._submit_run(
                    "pretraining", about, options.data, short, start, make_settings
                )
        # Both starts of a pair follow each other, so that an interrupted study has complete pairs.
        for seed, target in itertools.product(options.seeds, self.targets):
            for name, family in self.families.items():
                for begin in (SCRATCH, PRETRAINED):
                    about = {"family": name, "data": target, "start": begin, "seed": seed}
                    if begin == SCRATCH:
                        start = self._random(family, seed)
                        make_settings = partial(from_random, name, *LENGTHS[target])
                    else:
                        start = self._trained(pretrained[name, seed])
                        make_settings = partial(list, (f"optimizer.lr={RATES[target]}", *LENGTHS[target]))
                    self._submit_run("transfer", about, self.targets[target], long, start, make_settings)

    def _random(self, family: Family, seed: int) -> Callable[[], Path]:
        return lambda: random_weights(family, seed, self.runs)

    def _trained(self, future: Future[dict[str, Any]]) -> Callable[[], Path]:
        def folder() -> Path:
            row = future.result()
            if "error" in row:
                raise RuntimeError("the pre-training failed")
            return self.runs / row["folder"]

        return folder

    def _submit_run(
        self,
        part: str,
        about: dict[str, Any],
        data: str,
        recipe: Path,
        start: Callable[[], Path],
        make_settings: Callable[[], list[str]],
    ) -> Future[dict[str, Any]]:
        """Submit one run. `start` and `make_settings` wait for the runs that it depends on."""

        suffix = "-".join(str(value) for value in about.values()).replace(",", "").replace(" ", "-")
        folder = self.runs / f"{part}-{suffix}"
        self.planned.append((part, folder.name))

        def do() -> dict[str, Any]:
            row: dict[str, Any] = {**about, "folder": folder.name}
            try:
                run_settings = make_settings()
                keys = {change.partition("=")[0] for change in self.options.set}
                if keys & {"train.steps", "train.epochs"}:
                    keys |= {"train.steps", "train.epochs"}
                run_settings = [change for change in run_settings if change.partition("=")[0] not in keys]
                row["settings"] = [*run_settings, f"train.seed={about['seed']}"]
                settings = [f"--set={change}" for change in (*self.options.set, *row["settings"])]
                if (finished := self.finished.get(_key(part, row))) is not None:
                    return self._record(part, finished)
                command = [sys.executable, "-m", "vitrail", "train", data, "--recipe", str(recipe), "--resume"]
                command += ["--from", str(start()), *settings, "--out", str(folder)]
                row |= measure(Job(part, about["seed"], folder, command, []))
            except Exception as error:  # an error in one run does not stop the others
                row["error"] = repr(error)
            outcome = row.get("error") or f"{100 * row['top1']:.2f} % ({row['seconds']:.0f} s)"
            self.console.print(f"{part}: {', '.join(map(str, about.values()))}: {outcome}")
            return self._record(part, row)

        return self.pool.submit(do)

    def _record(self, part: str, row: dict[str, Any]) -> dict[str, Any]:
        with self.results_lock:
            self.results[part].append(row)
            self._write()
        return row

    def _write(self) -> Path:
        self.results["summary"] = summarise(self.results)
        done = {(part, row["folder"]) for part in PARTS for row in self.results[part] if "error" not in row}
        self.results["not_finished"] = [folder for part, folder in self.planned if (part, folder) not in done]
        return write_results(Path(self.options.out), NAME, self.results)

    def _command(self) -> str:
        """The command of this study, with file names instead of full paths."""
        options = self.options
        command = ["python", "-m", "bench.pretraining", Path(options.data).name, "--to"]
        command += [f"{name}={Path(data).name}" for name, data in self.targets.items()]
        command += ["--families", *options.families, "--epochs", f"{options.epochs:g}"]
        command += ["--try-epochs", f"{options.try_epochs:g}", "--seeds", *map(str, options.seeds)]
        command += ["--set", *options.set] if options.set else []
        return shlex.join([*command, "--parallel", str(options.parallel)])


def _finished_runs(folder: Path, runs: Path) -> dict[str, dict[str, Any]]:
    """Finished runs in an earlier result file; of pre-training, those whose weights still exist."""
    path = folder / f"{NAME}.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    rows = [(part, row) for part in PARTS for row in results.get(part, []) if "error" not in row]
    return {
        _key(part, row): row
        for part, row in rows
        if part != "pretraining" or (runs / row["folder"] / "model.safetensors").exists()
    }


def _key(part: str, row: dict[str, Any]) -> str:
    return json.dumps([part, row["folder"], row["settings"]])


def summarise(results: dict[str, Any]) -> dict[str, Any]:
    """For each dataset: mean and standard deviation of each cell over its seeds, and the gain of pre-training in each
    family, with 95 % intervals (Student's t; the deviation is pooled over the cells of the dataset)."""
    families = list(results["families"])
    summaries: dict[str, Any] = {}
    cells = {name: {"runs": [row for row in results["pretraining"] if row["family"] == name]} for name in families}
    if any("error" not in row for row in results["pretraining"]):
        summaries["pretraining"] = summary(cells, families[0])["top1"]
    for data in dict.fromkeys(row["data"] for row in results["transfer"]):
        rows = [row for row in results["transfer"] if row["data"] == data and "error" not in row]
        if not rows:
            continue
        cells = {
            f"{name}, {start}": {"runs": [row for row in rows if (row["family"], row["start"]) == (name, start)]}
            for name in families
            for start in (SCRATCH, PRETRAINED)
        }
        measured = summary(cells, f"{families[0]}, {PRETRAINED}")["top1"]
        measured["gains"] = {name: _gain(measured, name) for name in families}
        summaries[data] = measured
    return summaries


def _gain(measured: dict[str, Any], family: str) -> dict[str, float]:
    before, after = (measured["cells"][f"{family}, {start}"] for start in (SCRATCH, PRETRAINED))
    if not before["seeds"] or not after["seeds"]:
        return {}
    gain = {"difference": after["mean"] - before["mean"]}
    if measured["deviation"] is not None:
        freedom, counts = measured["degrees_of_freedom"], (before["seeds"], after["seeds"])
        gain["half_width"] = half_width(measured["deviation"], freedom, *counts)
    return gain


def table(summaries: dict[str, Any]) -> Table:
    result = Table(title=CLAIM, box=box.SIMPLE, padding=(0, 1, 0, 0))
    for heading in ("data", "family", SCRATCH, PRETRAINED, "gain"):
        result.add_column(heading)
    for data, measured in summaries.items():
        for name, gain in measured.get("gains", {}).items():
            texts = [_cell(measured["cells"][f"{name}, {start}"]) for start in (SCRATCH, PRETRAINED)]
            half = f" ± {100 * gain['half_width']:.2f}" if "half_width" in gain else ""
            result.add_row(data, name, *texts, f"{100 * gain['difference']:+.2f}{half}" if gain else "-")
    for name, row in summaries.get("pretraining", {"cells": {}})["cells"].items():
        result.add_row("pre-training dataset", name, "", _cell(row), "")
    return result


def _cell(row: dict[str, Any]) -> str:
    if "mean" not in row:
        return "-"
    spread = "" if row["deviation"] is None else f" ± {100 * row['deviation']:.2f}"
    return f"{100 * row['mean']:.2f} %{spread}"


if __name__ == "__main__":
    main()
