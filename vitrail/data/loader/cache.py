"""Cache of decoded images in one flat buffer that all loader processes fill and share."""

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
_EMPTY, _UNVERIFIED, _VALID = 0, 1, 2  # unverified: stored by an earlier run, checksum not compared yet


class PixelCache:
    """uint8 pixels by index, in anonymous memory shared with forked processes (not limited by /dev/shm).

    An image is marked valid after it is written, so no process sees a partial one.
    """

    def __init__(self, areas: np.ndarray, channels: int, pixels: np.ndarray | None = None) -> None:
        self.channels = channels
        self.starts = np.concatenate([[0], np.cumsum(areas.astype(np.int64) * channels)])
        self.pixels = shared_bytes(int(self.starts[-1])) if pixels is None else pixels
        self.state = shared_bytes(len(areas))  # uint8 (n,)
        self.heights = shared_bytes(4 * len(areas)).view(np.int32)
        self.sums = shared_bytes(4 * len(areas)).view(np.uint32)  # CRC-32 of images stored by an earlier run

    def get(self, index: int) -> np.ndarray | None:
        """Return the image as read-only uint8 (H, W, C), or None."""
        state = self.state[index]
        if state == _EMPTY:
            return None
        flat = self.pixels[self.starts[index] : self.starts[index + 1]]
        if state == _UNVERIFIED:
            if zlib.crc32(flat.data) != self.sums[index]:
                self.state[index], self.sums[index] = _EMPTY, 0
                return None
            self.state[index] = _VALID
        image = flat.reshape(int(self.heights[index]), -1, self.channels)
        image.flags.writeable = False
        return image

    def put(self, index: int, image: np.ndarray, data: bytes) -> None:
        """Store an image. Ignores one whose size changed since the scan."""
        start, stop = self.starts[index], self.starts[index + 1]
        if image.size != stop - start:
            return
        self.pixels[start:stop] = image.reshape(-1)
        self.heights[index] = image.shape[0]
        self.state[index] = _VALID

    def save(self) -> None:
        """Make new images available to later runs, if the cache supports it."""


class StoredPixelCache(PixelCache):
    """A PixelCache in a file that later runs reuse.

    The file name is a hash of the images' content and of everything their pixels depend on. A second file lists the
    stored images with checksums. It is written after the pixels are on disk, so a crash or damage never gives wrong
    pixels: such images are decoded again.
    """

    def __init__(self, samples: Samples, spec: Preprocess, folder: Path | None = None) -> None:
        """Raises OSError if the file cannot be created, for example because the disk is full."""
        size = int(samples.areas.sum()) * spec.channels
        self.path = (folder or cache_folder() / "pixels") / f"{_key(samples, spec)}.bin"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.map = _mapped(self.path, size)
        super().__init__(samples.areas, spec.channels, np.frombuffer(self.map, np.uint8))
        self.digests = samples.digests
        with contextlib.suppress(Exception):  # missing or damaged index: decode everything again
            self._load()

    @property
    def index_path(self) -> Path:
        return self.path.with_suffix(".npz")

    def put(self, index: int, image: np.ndarray, data: bytes) -> None:
        """Store an image if its content has not changed since the scan."""
        if int.from_bytes(hashlib.blake2b(data, digest_size=16).digest()[:8], "big") == int(self.digests[index]):
            super().put(index, image, data)

    def save(self) -> None:
        new = np.flatnonzero((self.state == _VALID) & (self.sums == 0))
        if not len(new):
            return
        for index in new.tolist():
            self.sums[index] = zlib.crc32(self.pixels[self.starts[index] : self.starts[index + 1]].data)
        filled = np.flatnonzero(self.state)
        with contextlib.suppress(OSError):  # the next run then decodes again
            self.map.flush()
            with atomic_write(self.index_path) as temporary, temporary.open("wb") as file:
                np.savez(file, filled=filled, heights=self.heights[filled], sums=self.sums[filled])

    def _load(self) -> None:
        with np.load(self.index_path, allow_pickle=False) as stored:
            filled, heights, sums = stored["filled"], stored["heights"], stored["sums"]
        sizes = self.starts[filled + 1] - self.starts[filled]
        fits = (heights > 0) & (sizes % np.maximum(heights.astype(np.int64) * self.channels, 1) == 0)
        kept = filled[fits]
        self.heights[kept], self.sums[kept], self.state[kept] = heights[fits], sums[fits], _UNVERIFIED


def shared_bytes(size: int) -> np.ndarray:
    """Zeroed uint8 (size,) shared with forked processes. Pages are allocated when they are written."""
    return np.frombuffer(mmap.mmap(-1, max(size, 1)), np.uint8)[:size]


def _mapped(path: Path, size: int) -> mmap.mmap:
    with open(os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666), "r+b") as file:
        if os.fstat(file.fileno()).st_size != size:
            file.truncate(size)
        if hasattr(os, "posix_fallocate") and size:
            os.posix_fallocate(file.fileno(), 0, size)  # fail now if the disk is full, not with SIGBUS while writing
        return mmap.mmap(file.fileno(), size)


def _simplejpeg_version() -> str | None:
    """Version of simplejpeg if it is installed; it contains its own JPEG library."""
    try:
        return metadata.version("simplejpeg")
    except metadata.PackageNotFoundError:
        return None


def _key(samples: Samples, spec: Preprocess) -> str:
    """Hash of everything that the decoded pixels depend on."""
    digest = hashlib.blake2b(digest_size=16)
    facts: list[Any] = [
        _VERSION,
        PIL.__version__,
        features.version_feature("libjpeg_turbo"),
        features.version("webp"),
        _simplejpeg_version(),
        spec.channels,
        spec.background,
        len(samples),
    ]
    digest.update(repr(facts).encode())
    digest.update(np.ascontiguousarray(samples.digests).tobytes() + np.ascontiguousarray(samples.areas).tobytes())
    return digest.hexdigest()
