"""Atomic file writes: a file is complete or absent, even after a crash or a power cut."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary file to write to, and rename it to `path` when the block succeeds.

    After an error `path` is unchanged and the temporary file is removed. Only a killed process leaves it behind.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        temporary.touch(exist_ok=False)
        original = path if path.is_file() and not path.is_symlink() else temporary
        mode = original.stat().st_mode  # without an original, the umask's; some writers restrict it to the owner
        yield temporary
        temporary.chmod(mode)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
        fsync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def fsync_folder(folder: Path) -> None:
    """Write a folder's entries to disk, so that a rename survives a power cut."""
    if os.name != "posix":  # Windows cannot open a folder
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
