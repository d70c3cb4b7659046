"""What a run shows and writes down while it works: a progress line, plain lines, and metrics.jsonl."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from vitrail.atomic import whole_file

PLAIN_EVERY = 30.0  # seconds between lines when the output is not a terminal
WAIT_SHOWN, WAIT_BAD = 0.1, 0.3  # shares of the time that training waits for data: worth a word, worth an advice
SETTLED = 50  # steps before waiting is judged: the first ones wait for everything to start


class MetricsLog:
    """metrics.jsonl: one JSON object a line, complete lines only, readable while the run goes on."""

    def __init__(self, path: Path, start: int):
        self.path = path
        kept = [row for row in read_metrics(path) if row["step"] <= start] if start else []
        with whole_file(path) as temporary:
            temporary.write_text("".join(json.dumps(row) + "\n" for row in kept))
        self.file = path.open("a")

    def write(self, row: dict[str, Any]) -> None:
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()

    def close(self) -> None:
        os.fsync(self.file.fileno())
        self.file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows written so far; a last line cut by a crash is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(row, dict) and "step" in row:
            rows.append(row)
    return rows


class TrainingProgress:
    """Shows steps, loss, images a second and time left: a live bar on a terminal, a line now and then elsewhere."""

    def __init__(self, console: Console, metrics: MetricsLog, total: int, start: int):
        self.console, self.metrics, self.total, self.start = console, metrics, total, start
        self.bar = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=console,
            disable=not console.is_terminal,
        )
        self.task = self.bar.add_task("training", total=total, completed=start, facts="")
        self.facts: dict[str, str] = {}
        self.last_plain = time.monotonic()
        self.advice, self.settled = "", 0
        self.waits = 0  # logs in a row that were bad

    def __enter__(self) -> TrainingProgress:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()
        self.metrics.close()

    def step(self, step: int) -> None:
        self.bar.update(self.task, completed=step)

    def log(self, row: dict[str, Any]) -> None:
        """Write a row of metrics and show it."""
        self.metrics.write(row)
        if "loss" in row:
            self.facts["loss"] = f"loss {row['loss']:.3f}"
            self.facts["speed"] = f"{row['images_per_second']:.0f} images/s"
        if "data_wait" in row:
            self._waited(row["step"], row["data_wait"])
        for key, name in (("val_top1", "held-out"), ("val_map", "held-out mAP")):
            if key in row:
                self.facts["accuracy"] = f"{name} {row[key]:.1%}"
        text = "  ".join(self.facts[key] for key in ("loss", "accuracy", "speed", "wait") if self.facts.get(key))
        self.bar.update(self.task, facts=text)
        if not self.console.is_terminal and self._plain_due(row):
            self.console.print(f"step {row['step']}/{self.total}  {text}")

    def advise(self, advice: str, settled: int) -> None:
        """What to tell, once, when training waits for data much of its time after step `settled`."""
        self.advice, self.settled = advice, max(settled, self.start + SETTLED)

    def _waited(self, step: int, share: float) -> None:
        self.facts["wait"] = f"data wait {100 * share:.0f} %" if share > WAIT_SHOWN else ""
        self.waits = self.waits + 1 if share > WAIT_BAD and step > self.settled else 0
        if self.waits >= 2 and self.advice:
            self.message(f"Training waits for images {100 * share:.0f} % of its time; {self.advice}")
            self.advice = ""

    def message(self, text: str) -> None:
        self.console.print(text, markup=False)

    def _plain_due(self, row: dict[str, Any]) -> bool:
        now = time.monotonic()
        due = "val_loss" in row or now - self.last_plain > PLAIN_EVERY
        if due:
            self.last_plain = now
        return due
