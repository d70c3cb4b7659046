"""Files that are there whole or not at all, even when the process or the machine dies while they are written."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """A temporary file beside `path` to write into; when the block ends well it takes the place of `path`.

    Whatever fails, `path` stays as it was and the temporary file is removed (a killed process leaves it behind).
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        temporary.touch(exist_ok=False)
        there = path if path.is_file() and not path.is_symlink() else temporary
        mode = there.stat().st_mode  # as it was, else what the umask allows; some writers let only the owner read
        yield temporary
        temporary.chmod(mode)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
        fsync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def fsync_folder(folder: Path) -> None:
    """Make the new name itself survive a power cut; only POSIX systems can open a folder."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
