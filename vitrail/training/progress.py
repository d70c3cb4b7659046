"""What a run shows and writes down while it works: a progress line, plain lines, and metrics.jsonl."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from vitrail import strict_json
from vitrail.atomic import atomic_write
from vitrail.config import TrainConfig
from vitrail.errors import UserError, os_errors_as
from vitrail.models.estimate import peak_flops
from vitrail.terminal import escape
from vitrail.training.run_context import RunContext
from vitrail.training.tensorboard import TensorBoardWriter

PLAIN_EVERY = 30.0  # seconds between lines when the output is not a terminal
WAIT_SHOWN, WAIT_BAD = 0.1, 0.3  # shares of the time that training waits for data: worth a word, worth an advice
SETTLED = 50  # steps before waiting is judged: the first ones wait for everything to start
BAR = 8  # columns: the numbers say more
SHOWN = ("loss", "train", "held-out", "lr", "speed", "flops", "wait")  # from left to right
DROPPED = ("lr", "train", "flops", "wait", "speed", "held-out")  # the first ones first, where a line is too narrow
POINTS = 60
LARGEST = 1e100  # of what is measured; more than that is a file that is not ours, or no number
CURVES = (("loss", "accuracy", "lr"), ("val_loss", "val_top1", "val_map", "val_accuracy"))  # that come in one row
HELD_OUT = {"val_top1": "held-out", "val_map": "held-out mAP", "val_accuracy": "held-out patches"}


class MetricsLog:
    """metrics.jsonl: one JSON object a line, complete lines only, readable while the run goes on."""

    def __init__(self, path: Path, start: int):
        self.path = path
        self._keep([row for row in read_metrics(path) if row["step"] <= start] if start else [])

    def write(self, row: dict[str, Any]) -> None:
        if not self.path.parent.is_dir():  # the open file would take the row, and nobody would ever see it
            raise UserError(f"{self.path.parent} was removed while its run was at work: what was not saved is lost")
        with os_errors_as(f"cannot write to {self.path}"):
            self.file.write(strict_json.dumps(row) + "\n")
            self.file.flush()

    def rewind(self, step: int) -> None:
        """The run goes back and makes other steps: what it measured after `step` goes, what happened there stays."""
        self.close()
        self._keep([row for row in read_metrics(self.path) if row["step"] <= step or "event" in row])

    def close(self) -> None:
        with os_errors_as(f"cannot write to {self.path}"), self.file:
            os.fsync(self.file.fileno())

    def _keep(self, rows: list[dict[str, Any]]) -> None:
        with os_errors_as(f"cannot write to {self.path}"):
            with atomic_write(self.path) as temporary:
                temporary.write_text("".join(strict_json.dumps(row) + "\n" for row in rows))
            self.file = self.path.open("a")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows written so far. A line that is no row of a run, as one that a crash cut, is left out; a number that no
    measurement gives is null."""
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n") if path.is_file() else []:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and _is_step(row.get("step")) and isinstance(row.get("event", ""), str):
            rows.append({key: _json_number(value) for key, value in row.items()})
    return rows


def _is_step(value: Any) -> bool:
    return type(value) is int and 0 <= value < 10**12


def downsample_curves(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    """The curves of a run for the card of its weights: of each at most POINTS points, means over equal stretches."""
    found: list[dict[str, float]] = []
    for keys in CURVES:
        own = [row for row in rows if any(isinstance(row.get(key), float) for key in keys)]
        for part in np.array_split(np.arange(len(own)), min(POINTS, len(own)) or 1):
            stretch = [own[index] for index in part]
            means = {key: [row[key] for row in stretch if isinstance(row.get(key), float)] for key in keys}
            if stretch:
                point = {key: float(f"{statistics.fmean(values):.5g}") for key, values in means.items() if values}
                found.append({"step": stretch[-1]["step"], **point})
    return found


def _json_number(value: Any) -> Any:
    """JSON knows no infinities: a gradient norm without a value is null."""
    return None if isinstance(value, int | float) and not abs(value) < LARGEST else value


class TrainingProgress:
    """Shows steps, loss, accuracy, speed and time left: a live line on a terminal, a line now and then elsewhere.

    `flops_per_image` is what training on an image takes (0: not known) and `peak` what all devices together can do in a
    second (none: not known); from them every row of training gets its TFLOP/s and their share of the peak.
    """

    def __init__(
        self,
        console: Console,
        metrics: MetricsLog | None,
        total: int,
        start: int,
        *,
        flops_per_image: float = 0.0,
        peak: float | None = None,
        events: TensorBoardWriter | None = None,
    ):
        self.console, self.total, self.start = console, total, start
        self.flops_per_image, self.peak = flops_per_image, peak
        self.files = [file for file in (metrics, events) if file is not None]
        self.live = console.is_terminal and not console.quiet
        columns = (BarColumn(BAR), MofNCompleteColumn(), TextColumn("{task.fields[facts]}", markup=False))
        self.bar = Progress(*columns, TextColumn("{task.fields[left]}"), console=console, disable=not self.live)
        self.task = self.bar.add_task("training", total=total, completed=start, facts="", left="")
        self.facts: dict[str, str] = {}
        # When the first step was done, and which; the first itself waits for everything to start
        self.since: tuple[float, int] | None = None
        self.left = ""
        self.last_plain = time.monotonic()
        self.advice, self.settled = "", 0
        self.waits = 0  # logs in a row that were bad

    def __enter__(self) -> TrainingProgress:
        self.bar.start()
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        self.bar.stop()
        for file in self.files:
            # What stopped the run is what to tell, not that there is no room for its last row either.
            with contextlib.suppress(*([UserError] if failure else [])):
                file.close()

    def step(self, step: int) -> None:
        now = time.monotonic()
        if self.since is None:
            self.since = (now, step)
        before, first = self.since
        if step > first:
            seconds = (now - before) / (step - first) * (self.total - step)
            self.left = f"{_duration(seconds)} left" if step < self.total else ""
        self.bar.update(self.task, completed=step, left=self.left)

    def log(self, row: dict[str, Any]) -> None:
        """Write a row and show it."""
        row = {**row, **self._work(row)}
        for file in self.files:
            file.write(row)
        if "event" in row:
            self.message(f"step {row['step']}: {row['event']}")
            return
        self._note(row)
        if "data_wait" in row:
            self._waited(row["step"], row["data_wait"])
        if self.live:
            self.bar.update(self.task, facts=self._fitting())
        elif self._plain_due(row):
            facts = [self.facts[key] for key in SHOWN if self.facts.get(key)]
            line = [f"step {row['step']}/{self.total}", *facts, *filter(None, [self.left])]
            self.console.print("  ".join(line), markup=False)

    def rewind(self, step: int) -> None:
        """The run went back to `step`: what it wrote and showed of later ones counts no more."""
        for file in self.files:
            file.rewind(step)
        self.since, self.facts, self.left = None, {}, ""
        self.bar.update(self.task, completed=step, facts="", left="")

    def advise(self, advice: str, settled: int) -> None:
        """What to tell, once, when training waits for data much of its time after step `settled`."""
        self.advice, self.settled = advice, max(settled, self.start + SETTLED)

    def message(self, text: str) -> None:
        self.console.print(escape(text))

    def _work(self, row: dict[str, Any]) -> dict[str, float]:
        """TFLOP/s and their share of the peak, where they can be told."""
        if "images_per_second" not in row or not self.flops_per_image:
            return {}
        rate = row["images_per_second"] * self.flops_per_image
        found = {"tflops": float(f"{rate / 1e12:.4g}")}
        return found if self.peak is None else {**found, "peak_share": round(rate / self.peak, 4)}

    def _note(self, row: dict[str, Any]) -> None:
        """Keep what a row says in words, until the next one says it anew."""
        if row.get("loss") is not None:
            self.facts["loss"] = f"loss {row['loss']:.3f}"
        if row.get("accuracy") is not None:
            self.facts["train"] = f"train {row['accuracy']:.1%}"
        if "lr" in row:
            self.facts["lr"] = f"lr {row['lr']:.2g}"
        if "images_per_second" in row:
            self.facts["speed"] = f"{row['images_per_second']:.0f} images/s"
        if "tflops" in row:
            share = f" ({100 * row['peak_share']:.0f} % of peak)" if "peak_share" in row else ""
            self.facts["flops"] = f"{_rate(row['tflops'])} TFLOP/s{share}"
        if row.get("val_loss") is not None:
            self.facts["held-out"] = f"held-out loss {row['val_loss']:.3f}"
        for key, name in HELD_OUT.items():
            if row.get(key) is not None:
                self.facts["held-out"] = f"{name} {row[key]:.1%}"

    def _fitting(self) -> str:
        """What is known, less the least important where the line has no room for it."""
        # The bar, "9/10", and a space between columns; the time left changes its width between two rows.
        room = self.console.width - BAR - (2 * len(str(self.total)) + 1) - len("99 min left") - 3
        shown = {key: self.facts[key] for key in SHOWN if self.facts.get(key)}
        if len("  ".join(shown.values())) > room and "flops" in shown:
            shown["flops"] = shown["flops"].replace(" of peak", "")
        for key in DROPPED:
            if len("  ".join(shown.values())) > room:
                shown.pop(key, None)
        return "  ".join(shown.values())

    def _waited(self, step: int, share: float) -> None:
        self.facts["wait"] = f"data wait {100 * share:.0f} %" if share > WAIT_SHOWN else ""
        self.waits = self.waits + 1 if share > WAIT_BAD and step > self.settled else 0
        if self.waits >= 2 and self.advice:
            self.message(f"Training waits for images {100 * share:.0f} % of its time; {self.advice}")
            self.advice = ""

    def _plain_due(self, row: dict[str, Any]) -> bool:
        now = time.monotonic()
        due = "images_per_second" not in row or now - self.last_plain > PLAIN_EVERY
        if due:
            self.last_plain = now
        return due


def open_progress(
    train: TrainConfig, run: RunContext, device: torch.device, start: int, flops_per_image: float
) -> TrainingProgress:
    """The progress of a run from step `start` on, with the files that the first process writes."""
    metrics = MetricsLog(run.folder / "metrics.jsonl", start) if run.ranks.is_first else None
    events = TensorBoardWriter(run.folder / "tensorboard", start) if run.ranks.is_first and train.tensorboard else None
    peak = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return TrainingProgress(
        run.console,
        metrics,
        train.steps or 0,
        start,
        flops_per_image=flops_per_image,
        peak=peak and peak * run.ranks.world_size,
        events=events,
    )


def _rate(tflops: float) -> str:
    """Whole numbers, and two digits below ten."""
    return f"{tflops:.0f}" if tflops >= 9.95 else f"{tflops:.2g}"


def _duration(seconds: float) -> str:
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    if seconds < 99.5 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 99.5 * 3600 else f"{seconds / 86400:.1f} days"
