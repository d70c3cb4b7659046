"""Event files for TensorBoard, with the rows of metrics.jsonl."""

from __future__ import annotations

import itertools
import math
import os
import socket
import time
from pathlib import Path
from typing import Any

from vitrail.errors import UserError, os_errors_as

FILE_SUFFIX = ".vitrail"  # tells our event files from those of other programs in the folder
_file_numbers = itertools.count()  # TensorBoard reads files of the same second in the order of their names
SCALARS = {
    "loss": "train/loss",
    "accuracy": "train/accuracy",
    "lr": "train/learning_rate",
    "grad_norm": "train/gradient_norm",
    "images_per_second": "speed/images_per_second",
    "tflops": "speed/tflops",
    "peak_share": "speed/share_of_peak",
    "data_wait": "speed/data_wait",
    "val_loss": "val/loss",
    "val_top1": "val/top1",
    "val_map": "val/mean_average_precision",
    "val_accuracy": "val/accuracy",
}


def require_tensorboard() -> None:
    """Raise an error if the package tensorboard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: F401
    except ImportError:
        raise UserError("TensorBoard files need the package tensorboard: pip install 'vitrail[tensorboard]'") from None


class TensorBoardWriter:
    """Writes event files into a folder. TensorBoard hides what earlier launches wrote for steps after `start`.

    Unlike torch's SummaryWriter it has no thread, whose errors (such as a full disk) come late or are only printed.
    """

    def __init__(self, folder: Path, start: int = 0):
        self.folder = folder
        require_tensorboard()
        self._open(start)

    def write(self, row: dict[str, Any]) -> None:
        from torch.utils.tensorboard.summary import scalar, text

        with os_errors_as(f"cannot write to {self.folder}"):
            if "event" in row:
                self._add(row["step"], summary=text("events", row["event"]))
            for key, name in SCALARS.items():
                value = row.get(key)
                if isinstance(value, int | float) and math.isfinite(value):
                    self._add(row["step"], summary=scalar(name, value))
            self.writer.flush()

    def rewind(self, step: int) -> None:
        """Roll back: hide what was written for steps after `step`."""
        self.close()
        self._open(step)

    def close(self) -> None:
        with os_errors_as(f"cannot write to {self.folder}"):
            self.writer.close()

    def _open(self, start: int) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        stamp = f"{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_file_numbers)}"
        name = f"events.out.tfevents.{stamp}{FILE_SUFFIX}"
        with os_errors_as(f"cannot write to {self.folder}"):
            self.folder.mkdir(parents=True, exist_ok=True)
            self.writer = RecordWriter((self.folder / name).open("wb"))
            # A session start hides what other files have from this step on, as in torch's SummaryWriter.
            self._add(start + 1, file_version="brain.Event:2")
            self._add(start + 1, session_log=SessionLog(status=SessionLog.START))
            self.writer.flush()

    def _add(self, step: int, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self.writer.write(Event(wall_time=time.time(), step=step, **content).SerializeToString())
