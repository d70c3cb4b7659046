"""Progress of a run: a live line on a terminal, plain lines elsewhere, and the rows of metrics.jsonl."""

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

PLAIN_INTERVAL = 30.0  # seconds between lines if the output is not a terminal
SHOW_DATA_WAIT, ADVISE_DATA_WAIT = 0.1, 0.3  # fractions of the time spent waiting for data
WARMUP_STEPS = 50  # without advice: the first steps wait until everything has started
BAR_WIDTH = 8
FIELDS = ("loss", "train", "val", "lr", "speed", "flops", "wait")  # of a line, from left to right
DROP_ORDER = ("lr", "train", "flops", "wait", "speed", "val")  # which fields to drop first if a line is too long
MAX_POINTS = 60  # of a curve in the card
MAX_VALUE = 1e100  # larger values in metrics.jsonl are not metrics of a run
CURVES = (("loss", "accuracy", "lr"), ("val_loss", "val_top1", "val_map", "val_accuracy"))  # logged in the same row
VAL_NAMES = {"val_top1": "val", "val_map": "val mAP", "val_accuracy": "val patches"}


class MetricsLog:
    """metrics.jsonl: one JSON object per line. Only complete lines are written, so it can be read during the run."""

    def __init__(self, path: Path, start: int):
        self.path = path
        self._keep([row for row in read_metrics(path) if row["step"] <= start] if start else [])

    def write(self, row: dict[str, Any]) -> None:
        if not self.path.parent.is_dir():  # writing to the open file would still succeed
            raise UserError(f"the run folder {self.path.parent} was deleted during the run; unsaved progress is lost")
        with os_errors_as(f"cannot write to {self.path}"):
            self.file.write(strict_json.dumps(row) + "\n")
            self.file.flush()

    def rewind(self, step: int) -> None:
        """Roll back: delete the metrics after `step`, but keep events."""
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
    """The rows of metrics.jsonl. Invalid lines, such as one cut short by a crash, are skipped. Values that are not
    finite or larger than MAX_VALUE are None."""
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
    """The curves of a run for the model card: at most MAX_POINTS points each, which are means over equal intervals."""
    points: list[dict[str, float]] = []
    for keys in CURVES:
        curve = [row for row in rows if any(isinstance(row.get(key), float) for key in keys)]
        for indices in np.array_split(np.arange(len(curve)), min(MAX_POINTS, len(curve)) or 1):
            interval = [curve[index] for index in indices]
            values = {key: [row[key] for row in interval if isinstance(row.get(key), float)] for key in keys}
            if interval:
                means = {key: float(f"{statistics.fmean(of_key):.5g}") for key, of_key in values.items() if of_key}
                points.append({"step": interval[-1]["step"], **means})
    return points


def _json_number(value: Any) -> Any:
    """The value, or None for a number that is not finite or too large."""
    return None if isinstance(value, int | float) and not abs(value) < MAX_VALUE else value


class TrainingProgress:
    """Shows steps, loss, accuracy, speed and time left: a live line on a terminal, a line every 30 seconds elsewhere.

    Parameters
    ----------
    metrics, tensorboard
        Where to write each row.
    total, start
        The number of steps of the run, and the step it starts or resumes from.
    flops_per_image
        FLOPs of a training step per image, to log TFLOP/s. 0 if unknown.
    peak
        Peak FLOP/s of all devices together, to log the fraction of it. None if unknown.
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
        tensorboard: TensorBoardWriter | None = None,
    ):
        self.console, self.total, self.start = console, total, start
        self.flops_per_image, self.peak = flops_per_image, peak
        self.writers = [writer for writer in (metrics, tensorboard) if writer is not None]
        self.live = console.is_terminal and not console.quiet
        columns = (BarColumn(BAR_WIDTH), MofNCompleteColumn(), TextColumn("{task.fields[metrics]}", markup=False))
        self.bar = Progress(*columns, TextColumn("{task.fields[time_left]}"), console=console, disable=not self.live)
        self.task = self.bar.add_task("training", total=total, completed=start, metrics="", time_left="")
        self.fields: dict[str, str] = {}
        # Time and number of the first step done; its own duration is not typical.
        self.first_step: tuple[float, int] | None = None
        self.time_left = ""
        self.last_plain = time.monotonic()
        self.advice, self.advise_after = "", 0
        self.slow_logs = 0  # in a row, with much time spent waiting for data

    def __enter__(self) -> TrainingProgress:
        self.bar.start()
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        self.bar.stop()
        for writer in self.writers:
            # After a failure, report that one, and not that the last row cannot be written either.
            with contextlib.suppress(*([UserError] if failure else [])):
                writer.close()

    def step(self, step: int) -> None:
        """Update the step and the time left."""
        now = time.monotonic()
        if self.first_step is None:
            self.first_step = (now, step)
        started, first = self.first_step
        if step > first:
            seconds = (now - started) / (step - first) * (self.total - step)
            self.time_left = f"{_duration(seconds)} left" if step < self.total else ""
        self.bar.update(self.task, completed=step, time_left=self.time_left)

    def log(self, row: dict[str, Any]) -> None:
        """Write a row of metrics, or an event, and show it."""
        row = {**row, **self._flops(row)}
        for writer in self.writers:
            writer.write(row)
        if "event" in row:
            self.message(f"step {row['step']}: {row['event']}")
            return
        self._update_fields(row)
        if "data_wait" in row:
            self._check_data_wait(row["step"], row["data_wait"])
        if self.live:
            self.bar.update(self.task, metrics=self._live_line())
        elif self._plain_due(row):
            fields = [self.fields[key] for key in FIELDS if self.fields.get(key)]
            line = [f"step {row['step']}/{self.total}", *fields, *filter(None, [self.time_left])]
            self.console.print("  ".join(line), markup=False)

    def rewind(self, step: int) -> None:
        """Roll back to `step`: discard the metrics after it."""
        for writer in self.writers:
            writer.rewind(step)
        self.first_step, self.fields, self.time_left = None, {}, ""
        self.bar.update(self.task, completed=step, metrics="", time_left="")

    def advise(self, advice: str, after: int) -> None:
        """Set the advice to print, once, if training spends much of its time waiting for data after step `after`."""
        self.advice, self.advise_after = advice, max(after, self.start + WARMUP_STEPS)

    def message(self, text: str) -> None:
        self.console.print(escape(text))

    def _flops(self, row: dict[str, Any]) -> dict[str, float]:
        """TFLOP/s and the fraction of the peak, if known."""
        if "images_per_second" not in row or not self.flops_per_image:
            return {}
        rate = row["images_per_second"] * self.flops_per_image
        columns = {"tflops": float(f"{rate / 1e12:.4g}")}
        return columns if self.peak is None else {**columns, "peak_share": round(rate / self.peak, 4)}

    def _update_fields(self, row: dict[str, Any]) -> None:
        """Format the metrics of a row. Fields that are not in it keep their last value."""
        if row.get("loss") is not None:
            self.fields["loss"] = f"loss {row['loss']:.3f}"
        if row.get("accuracy") is not None:
            self.fields["train"] = f"train {row['accuracy']:.1%}"
        if "lr" in row:
            self.fields["lr"] = f"lr {row['lr']:.2g}"
        if "images_per_second" in row:
            self.fields["speed"] = f"{row['images_per_second']:.0f} images/s"
        if "tflops" in row:
            of_peak = f" ({100 * row['peak_share']:.0f} % of peak)" if "peak_share" in row else ""
            self.fields["flops"] = f"{_format_tflops(row['tflops'])} TFLOP/s{of_peak}"
        if row.get("val_loss") is not None:
            self.fields["val"] = f"val loss {row['val_loss']:.3f}"
        for key, name in VAL_NAMES.items():
            if row.get(key) is not None:
                self.fields["val"] = f"{name} {row[key]:.1%}"

    def _live_line(self) -> str:
        """All fields, without the least important ones if the terminal is too narrow."""
        # The width without the bar, "9/10", the longest time left, and a space between columns.
        width = self.console.width - BAR_WIDTH - (2 * len(str(self.total)) + 1) - len("99 min left") - 3
        shown = {key: self.fields[key] for key in FIELDS if self.fields.get(key)}
        if len("  ".join(shown.values())) > width and "flops" in shown:
            shown["flops"] = shown["flops"].replace(" of peak", "")
        for key in DROP_ORDER:
            if len("  ".join(shown.values())) > width:
                shown.pop(key, None)
        return "  ".join(shown.values())

    def _check_data_wait(self, step: int, fraction: float) -> None:
        self.fields["wait"] = f"data wait {100 * fraction:.0f} %" if fraction > SHOW_DATA_WAIT else ""
        self.slow_logs = self.slow_logs + 1 if fraction > ADVISE_DATA_WAIT and step > self.advise_after else 0
        if self.slow_logs >= 2 and self.advice:
            self.message(f"Training spends {100 * fraction:.0f} % of its time waiting for images; {self.advice}")
            self.advice = ""

    def _plain_due(self, row: dict[str, Any]) -> bool:
        now = time.monotonic()
        due = "images_per_second" not in row or now - self.last_plain > PLAIN_INTERVAL
        if due:
            self.last_plain = now
        return due


def open_progress(
    train: TrainConfig, run: RunContext, device: torch.device, start: int, flops_per_image: float
) -> TrainingProgress:
    """The progress of a run from step `start` on. Only the first process writes files."""
    writes_events = run.ranks.is_first and train.tensorboard
    metrics = MetricsLog(run.folder / "metrics.jsonl", start) if run.ranks.is_first else None
    tensorboard = TensorBoardWriter(run.folder / "tensorboard", start) if writes_events else None
    peak = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return TrainingProgress(
        run.console,
        metrics,
        train.steps or 0,
        start,
        flops_per_image=flops_per_image,
        peak=peak and peak * run.ranks.world_size,
        tensorboard=tensorboard,
    )


def _format_tflops(tflops: float) -> str:
    """Two digits below ten, else an integer."""
    return f"{tflops:.0f}" if tflops >= 9.95 else f"{tflops:.2g}"


def _duration(seconds: float) -> str:
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    if seconds < 99.5 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 99.5 * 3600 else f"{seconds / 86400:.1f} days"
