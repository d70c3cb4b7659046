"""TensorBoard's event files, for those who watch their runs there: the rows of metrics.jsonl under its names."""

from __future__ import annotations

import itertools
import math
import os
import socket
import time
from pathlib import Path
from typing import Any

from vitrail.errors import UserError, os_errors_as

MARK = ".vitrail"  # ends the names of our files; others may write theirs beside them
_files = itertools.count()  # of this process: those of one second are read in the order of their names
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


def require_tensorboard() -> None:
    """One sentence on how to get what writes event files, where it is missing."""
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: F401
    except ImportError:
        raise UserError("TensorBoard files need the package tensorboard: pip install 'vitrail[tensorboard]'") from None


class TensorBoardWriter:
    """The event files in a folder. What earlier launches wrote there for steps after `start` is shown no more.

    Torch's writer has a thread of its own, whose errors come late or as a traceback beside the run. The few rows of a
    run are written here, in the same format, so that a full disk is met where it can be told.
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
        """The run goes back: the steps after `step` come a second time."""
        self.close()
        self._open(step)

    def close(self) -> None:
        with os_errors_as(f"cannot write to {self.folder}"):
            self.writer.close()

    def _open(self, start: int) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_files)}{MARK}"
        with os_errors_as(f"cannot write to {self.folder}"):
            self.folder.mkdir(parents=True, exist_ok=True)
            self.writer = RecordWriter((self.folder / name).open("wb"))
            # As torch's writer has it: what other files hold from this step on is shown no more.
            self._add(start + 1, file_version="brain.Event:2")
            self._add(start + 1, session_log=SessionLog(status=SessionLog.START))
            self.writer.flush()

    def _add(self, step: int, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self.writer.write(Event(wall_time=time.time(), step=step, **content).SerializeToString())
