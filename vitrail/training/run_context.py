"""Where a run writes and prints, which processes share it, and what may stop it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from vitrail.distributed import Ranks
from vitrail.interrupt import Interrupts

LockId = tuple[int, int]  # device and inode of a lock file


@dataclass(frozen=True)
class RunContext:
    folder: Path
    console: Console
    interrupts: Interrupts
    ranks: Ranks
    lock: LockId = (0, 0)  # of the lock file by which the folder belongs to this launch
    facts: dict[str, Any] = field(default_factory=dict)  # about the run, stored in each of its checkpoints
