"""The context of a run: its folder, console, signals and processes."""

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
    """What a run needs besides its config."""

    folder: Path
    console: Console
    interrupts: Interrupts
    ranks: Ranks
    lock: LockId = (0, 0)  # the lock file that reserves the folder for this launch
    facts: dict[str, Any] = field(default_factory=dict)  # stored in each checkpoint
