"""TensorBoard's event files, for those who watch their runs there: the rows of metrics.jsonl under its names."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vitrail.errors import UserError

MARK = ".vitrail"  # ends the names of our files; others may write theirs beside them
SCALARS = {
    "loss": "train/loss",
    "accuracy": "train/accuracy",
    "lr": "train/learning_rate",
    "grad_norm": "train/gradient_norm",
    "images_per_second": "speed/images_per_second",
    "tflops": "speed/tflops",
    "peak_share": "speed/share_of_peak",
    "data_wait": "speed/data_wait",
    "val_loss": "held-out/loss",
    "val_top1": "held-out/top1",
    "val_map": "held-out/mean_average_precision",
    "val_accuracy": "held-out/accuracy",
}


@contextmanager
def told_if_it_fails(path: Path) -> Iterator[None]:
    """A full disk, or whatever else stops writing there, as one sentence."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write to {path}: {error.strerror or error}") from error


def require_tensorboard() -> Any:
    """The class that writes event files, or one sentence on how to get it."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UserError("TensorBoard files need the package tensorboard: pip install 'vitrail[tensorboard]'") from None
    return SummaryWriter


class Events:
    """The event files in a folder. What earlier launches wrote there for steps after `start` is shown no more."""

    def __init__(self, folder: Path, start: int = 0):
        self.folder = folder
        self._open(start)

    def write(self, row: dict[str, Any]) -> None:
        with told_if_it_fails(self.folder):
            if "event" in row:
                self.writer.add_text("events", row["event"], row["step"])
            for key, name in SCALARS.items():
                value = row.get(key)
                if isinstance(value, int | float) and math.isfinite(value):
                    self.writer.add_scalar(name, value, row["step"])
            self.writer.flush()  # here, where it can be told; else its thread would do it some time

    def rewind(self, step: int) -> None:
        """The run goes back: the steps after `step` come a second time."""
        self.close()
        self._open(step)

    def close(self) -> None:
        try:
            with told_if_it_fails(self.folder):
                self.writer.close()
        finally:
            threading.excepthook = self.hook

    def _open(self, start: int) -> None:
        writer = require_tensorboard()
        self.hook = hook = threading.excepthook

        def unless_told(failure: threading.ExceptHookArgs) -> None:
            # The thread of the writer passes on what stopped it to whoever writes next.
            if not (isinstance(failure.exc_value, OSError) and "AsyncWriter" in type(failure.thread).__name__):
                hook(failure)

        threading.excepthook = unless_told
        with told_if_it_fails(self.folder):
            self.writer = writer(str(self.folder), purge_step=start + 1, filename_suffix=MARK)
