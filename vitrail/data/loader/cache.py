"""Decoded images of a split in one flat buffer, which all loader processes fill and share."""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import zlib
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import PIL
from PIL import features

from vitrail.atomic import atomic_write
from vitrail.config import Preprocess
from vitrail.data.samples import Samples
from vitrail.data.scan import cache_folder

_VERSION = 1
_EMPTY, _STORED, _GOOD = 0, 1, 2  # nothing there; there from an earlier run and not checked yet; there


class PixelCache:
    """uint8 pixels by index. An image is marked after it is written, so no process ever sees half of one.

    It lives in memory that forked processes share, and that no limit on /dev/shm touches. `stored` lays it over a file.
    """

    def __init__(self, areas: np.ndarray, channels: int, pixels: np.ndarray | None = None) -> None:
        self.channels = channels
        self.starts = np.concatenate([[0], np.cumsum(areas.astype(np.int64) * channels)])
        self.pixels = shared_bytes(int(self.starts[-1])) if pixels is None else pixels
        self.state = shared_bytes(len(areas))  # uint8 (n,)
        self.heights = shared_bytes(4 * len(areas)).view(np.int32)
        self.sums = shared_bytes(4 * len(areas)).view(np.uint32)  # CRC-32 of what an earlier run stored

    def get(self, index: int) -> np.ndarray | None:
        """uint8 (H, W, C), not to be written to; or none."""
        state = self.state[index]
        if state == _EMPTY:
            return None
        flat = self.pixels[self.starts[index] : self.starts[index + 1]]
        if state == _STORED:
            if zlib.crc32(flat.data) != self.sums[index]:
                self.state[index], self.sums[index] = _EMPTY, 0
                return None
            self.state[index] = _GOOD
        image = flat.reshape(int(self.heights[index]), -1, self.channels)
        image.flags.writeable = False
        return image

    def put(self, index: int, image: np.ndarray, data: bytes) -> None:
        """Keep an image; one of another size than it had when the data was looked through is not kept."""
        start, stop = self.starts[index], self.starts[index + 1]
        if image.size != stop - start:
            return
        self.pixels[start:stop] = image.reshape(-1)
        self.heights[index] = image.shape[0]
        self.state[index] = _GOOD

    def save(self) -> None:
        """Make what was added last beyond this run, where it can."""


class StoredPixelCache(PixelCache):
    """A PixelCache in a file that later runs find again.

    Its name stands for the content of the images and for everything their pixels depend on. What of it is filled is
    told by a second file with checksums, written only after the pixels have reached the disk; so neither a crash nor
    damage gives wrong pixels, only images that are decoded again.
    """

    def __init__(self, samples: Samples, spec: Preprocess, folder: Path | None = None) -> None:
        """Raises OSError where the file cannot be made, for one because the disk is full."""
        size = int(samples.areas.sum()) * spec.channels
        self.path = (folder or cache_folder() / "pixels") / f"{_key(samples, spec)}.bin"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.map = _mapped(self.path, size)
        super().__init__(samples.areas, spec.channels, np.frombuffer(self.map, np.uint8))
        self.digests = samples.digests
        with contextlib.suppress(Exception):  # absent or damaged: everything is decoded again
            self._load()

    @property
    def index_path(self) -> Path:
        return self.path.with_suffix(".npz")

    def put(self, index: int, image: np.ndarray, data: bytes) -> None:
        """As in memory, and only an image whose content is still the one the name of the file stands for."""
        if int.from_bytes(hashlib.blake2b(data, digest_size=16).digest()[:8], "big") == int(self.digests[index]):
            super().put(index, image, data)

    def save(self) -> None:
        fresh = np.flatnonzero((self.state == _GOOD) & (self.sums == 0))
        if not len(fresh):
            return
        for index in fresh.tolist():
            self.sums[index] = zlib.crc32(self.pixels[self.starts[index] : self.starts[index + 1]].data)
        filled = np.flatnonzero(self.state)
        with contextlib.suppress(OSError):  # without it the next run decodes again
            self.map.flush()
            with atomic_write(self.index_path) as temporary, temporary.open("wb") as file:
                np.savez(file, filled=filled, heights=self.heights[filled], sums=self.sums[filled])

    def _load(self) -> None:
        with np.load(self.index_path, allow_pickle=False) as stored:
            filled, heights, sums = stored["filled"], stored["heights"], stored["sums"]
        sizes = self.starts[filled + 1] - self.starts[filled]
        fits = (heights > 0) & (sizes % np.maximum(heights.astype(np.int64) * self.channels, 1) == 0)
        kept = filled[fits]
        self.heights[kept], self.sums[kept], self.state[kept] = heights[fits], sums[fits], _STORED


def shared_bytes(size: int) -> np.ndarray:
    """Zeroed uint8 (size,) that processes forked from this one read and write too. It takes memory as it is filled."""
    return np.frombuffer(mmap.mmap(-1, max(size, 1)), np.uint8)[:size]


def _mapped(path: Path, size: int) -> mmap.mmap:
    with open(os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666), "r+b") as file:
        if os.fstat(file.fileno()).st_size != size:
            file.truncate(size)
        if hasattr(os, "posix_fallocate") and size:
            os.posix_fallocate(file.fileno(), 0, size)  # a full disk is told now, and does not kill a writer later
        return mmap.mmap(file.fileno(), size)


def _simplejpeg() -> str | None:
    """Its version, where it is installed; it brings a JPEG library of its own."""
    try:
        return metadata.version("simplejpeg")
    except metadata.PackageNotFoundError:
        return None


def _key(samples: Samples, spec: Preprocess) -> str:
    whole = hashlib.blake2b(digest_size=16)
    facts: list[Any] = [
        _VERSION,
        PIL.__version__,
        features.version_feature("libjpeg_turbo"),
        features.version("webp"),
        _simplejpeg(),
        spec.channels,
        spec.background,
        len(samples),
    ]
    whole.update(repr(facts).encode())
    whole.update(np.ascontiguousarray(samples.digests).tobytes() + np.ascontiguousarray(samples.areas).tobytes())
    return whole.hexdigest()
