"""TensorBoard's event files, for those who watch their runs there: the rows of metrics.jsonl under its names."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from vitrail.errors import UserError

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
        if "event" in row:
            self.writer.add_text("events", row["event"], row["step"])
        for key, name in SCALARS.items():
            value = row.get(key)
            if isinstance(value, int | float) and math.isfinite(value):
                self.writer.add_scalar(name, value, row["step"])

    def rewind(self, step: int) -> None:
        """The run goes back: the steps after `step` come a second time."""
        self.writer.close()
        self._open(step)

    def close(self) -> None:
        self.writer.close()

    def _open(self, start: int) -> None:
        writer = require_tensorboard()
        try:
            self.writer = writer(str(self.folder), purge_step=start + 1)
        except OSError as error:
            raise UserError(f"cannot write to {self.folder}: {error.strerror or error}") from error
