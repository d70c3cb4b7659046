"""Images inside larger files, each read by its place there: in any order, with nothing else in memory."""

from __future__ import annotations

import contextlib
import os
import zlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from vitrail.data.files import MAX_FILE_BYTES


@dataclass(frozen=True, eq=False)
class Shard:
    """Where the images of one file lie in it: 16 bytes an image, 20 with the sums."""

    path: str  # of the file that holds the bytes
    offsets: np.ndarray  # int64 (n,); -1: there is no image in this row
    lengths: np.ndarray  # int64 (n,)
    sums: np.ndarray | None = None  # uint32 (n,): CRC-32 of each image, where it was written down


_OPEN = 128  # files that stay open; a process may often have no more than 256 or 1,024
MARK = ".parquet#"  # in the name of an image, after the shard's


def row_name(shard: str, row: int, origin: str) -> str:
    """What an image in a shard is called: `train-00000-of-00002.parquet#17 cats/tom.jpg`."""
    return f"{shard}#{row} {origin}" if origin else f"{shard}#{row}"


def original_name(name: str) -> str:
    """What an image was called before it lay in a shard; its own name when it lies in none."""
    _, mark, rest = name.partition(MARK)
    return rest.partition(" ")[2] if mark else name


class _File:
    """A file open for reading, closed when nobody holds it any more."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # bound early: at exit `os` may be gone
        close(self.descriptor)


class ShardFiles:
    """Images by the name that `row_name` gives. Safe to fork: reads do not move a place in the file."""

    def __init__(self, root: str, shards: dict[str, Shard]):
        self.root, self.shards = root, shards
        self._open: OrderedDict[str, _File] = OrderedDict()  # the one used last at the end

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict()}

    @property
    def identity(self) -> tuple[str, str]:
        return self.root, "shards"

    def read(self, name: str) -> bytes:
        stem, _, rest = name.partition(MARK)
        try:
            shard, row = self.shards[f"{stem}.parquet"], int(rest.partition(" ")[0])
            offset, length = int(shard.offsets[row]), int(shard.lengths[row])
        except (KeyError, ValueError, IndexError):
            raise OSError("there is no such row") from None
        if offset < 0:
            raise OSError("the row holds no image")
        if length > MAX_FILE_BYTES:
            raise OSError(f"it is larger than {MAX_FILE_BYTES:,} bytes")
        data = self._bytes(shard.path, offset, length)
        if len(data) < length:
            raise OSError("the shard ends too early")
        if shard.sums is not None and zlib.crc32(data) != shard.sums[row]:
            raise OSError("its bytes are not those that were packed")
        return data

    def _bytes(self, path: str, offset: int, length: int) -> bytes:
        if not hasattr(os, "pread"):
            with open(path, "rb") as fresh:
                fresh.seek(offset)
                return fresh.read(length)
        file = self._file(path)  # held until it is read, so that it stays open when another thread drops it
        return os.pread(file.descriptor, length, offset)

    def _file(self, path: str) -> _File:
        """Threads need no lock, as each step on the table is one for all; a lock could be forked while it is held."""
        file = self._open.pop(path, None) or _File(os.open(path, os.O_RDONLY))
        # Of two threads that come here at once, one's file is kept; replacing it would close a file within that step.
        file = self._open.setdefault(path, file)
        while len(self._open) > _OPEN:
            with contextlib.suppress(KeyError):  # another thread emptied it
                self._open.popitem(last=False)
        return file
