"""Image sources in memory, for the tests of data."""

from __future__ import annotations

import hashlib
import io

import numpy as np
from PIL import Image

from vitrail.data.decode import decode


def encode(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def photo(height: int, width: int, seed: int = 0) -> np.ndarray:
    """Colours, edges and texture at every scale, like a photograph."""
    random = np.random.default_rng(seed)
    total = np.full((height, width, 3), 128.0)
    for side in (2, 5, 11, 37, 97):
        coarse = random.integers(0, 256, (-(-height // side), -(-width // side), 3), dtype=np.uint8)
        smooth = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
        total += (np.asarray(smooth).astype(float) - 128) * (0.15 + side / 150)
    return np.clip(total, 0, 255).astype(np.uint8)


class MemorySource:
    """Encoded images in memory; those in `broken` cannot be read. With `sets`, multilabel with that many labels."""

    def __init__(self, files: list[bytes], broken: frozenset[int] = frozenset(), sets: int = 0):
        self.files, self.broken, self.sets = files, broken, sets
        self.labels = np.arange(len(files)) % 3
        self.reads = 0

    @classmethod
    def noise(cls, count: int, broken: frozenset[int] = frozenset(), sets: int = 0) -> MemorySource:
        shapes = [(12 + i % 3, 10 + i % 2, 3) for i in range(count)]
        images = [np.random.default_rng(i).integers(0, 255, shape, dtype=np.uint8) for i, shape in enumerate(shapes)]
        return cls([encode(Image.fromarray(image), "PNG") for image in images], broken, sets)

    def __len__(self) -> int:
        return len(self.files)

    def name(self, index: int) -> str:
        return f"{index}.png"

    def read(self, index: int) -> bytes:
        self.reads += 1
        if index in self.broken:
            raise FileNotFoundError(2, "No such file or directory")
        return self.files[index]

    def labels_of(self, indices: np.ndarray) -> np.ndarray:
        if not self.sets:
            return self.labels[indices]
        return (indices[:, None] >> np.arange(self.sets) & 1).astype(np.uint8)

    def weights_of(self, indices: np.ndarray) -> np.ndarray:
        return (1 + indices % 2).astype(np.float32)

    @property
    def areas(self) -> np.ndarray:
        return np.array([np.prod(decode(data).shape[:2]) for data in self.files], np.int64)

    @property
    def digests(self) -> np.ndarray:
        firsts = [hashlib.blake2b(data, digest_size=16).digest()[:8] for data in self.files]
        return np.array([int.from_bytes(first, "big") for first in firsts], np.uint64)
