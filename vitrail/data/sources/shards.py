"""Images inside larger files, read by offset and length: in any order, with nothing else in memory."""

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
    """The offsets of the images in one file: 16 bytes per image, 20 with checksums."""

    path: str  # of the file with the bytes
    offsets: np.ndarray  # int64 (n,); -1: the row has no image
    lengths: np.ndarray  # int64 (n,)
    sums: np.ndarray | None = None  # uint32 (n,): CRC-32 of each image, if known


_MAX_OPEN = 128  # files that stay open; the limit of a process is often 256 or 1,024
MARK = ".parquet#"  # between the shard and the row in the name of an image


def row_name(shard: str, row: int, origin: str) -> str:
    """Return the name of an image in a shard: `train-00000-of-00002.parquet#17 cats/tom.jpg`."""
    return f"{shard}#{row} {origin}" if origin else f"{shard}#{row}"


def original_name(name: str) -> str:
    """Return the name of an image before it was put into a shard; the name itself if it is not in a shard."""
    _, mark, rest = name.partition(MARK)
    return rest.partition(" ")[2] if mark else name


class _File:
    """A file open for reading, closed when the object is deleted."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # bound early: at exit `os` may be gone
        close(self.descriptor)


class ShardFiles:
    """Images by the name that `row_name` returns. Safe to fork: reads use no file position."""

    def __init__(self, root: str, shards: dict[str, Shard]):
        self.root, self.shards = root, shards
        self._open: OrderedDict[str, _File] = OrderedDict()  # the last used file is at the end

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
            raise OSError("no such row") from None
        if offset < 0:
            raise OSError("the row has no image")
        if length > MAX_FILE_BYTES:
            raise OSError(f"it is larger than {MAX_FILE_BYTES:,} bytes")
        data = self._bytes(shard.path, offset, length)
        if len(data) < length:
            raise OSError("the shard ends too early")
        if shard.sums is not None and zlib.crc32(data) != shard.sums[row]:
            raise OSError("its bytes have changed since it was packed")
        return data

    def _bytes(self, path: str, offset: int, length: int) -> bytes:
        if not hasattr(os, "pread"):
            with open(path, "rb") as fresh:
                fresh.seek(offset)
                return fresh.read(length)
        file = self._file(path)  # the reference keeps it open if another thread drops it
        return os.pread(file.descriptor, length, offset)

    def _file(self, path: str) -> _File:
        """Return an open file. Needs no lock, which could be held during a fork: each dict operation is atomic."""
        file = self._open.pop(path, None) or _File(os.open(path, os.O_RDONLY))
        # If two threads get here at once, the first file is kept: replacing it would close it while it is in use.
        file = self._open.setdefault(path, file)
        while len(self._open) > _MAX_OPEN:
            with contextlib.suppress(KeyError):  # another thread emptied it
                self._open.popitem(last=False)
        return file
