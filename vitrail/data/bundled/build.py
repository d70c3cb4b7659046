"""Build cifar10-3000.zip from the CIFAR-10 binaries: python build.py cifar-10-batches-bin cifar10-3000.zip

The choice and order of images depend only on their indices; the bytes also depend on the version of libwebp.
"""

from __future__ import annotations

import hashlib
import io
import sys
import zipfile
from pathlib import Path

import numpy as np
from PIL import Image

PER_CLASS = {"train": 200, "test": 100}
BATCHES = {"train": [f"data_batch_{number}.bin" for number in range(1, 6)], "test": ["test_batch.bin"]}


def build_archive(binaries: Path, target: Path) -> None:
    """Write a zip of lossless WebP images, PER_CLASS of each class and split."""
    classes = (binaries / "batches.meta.txt").read_text().split()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
        for split, count in PER_CLASS.items():
            records = np.concatenate(
                [np.fromfile(binaries / name, np.uint8).reshape(-1, 3073) for name in BATCHES[split]]
            )
            for label, name in enumerate(classes):
                indices = sorted(np.flatnonzero(records[:, 0] == label).tolist(), key=lambda i: _rank(split, i))
                for index in sorted(indices[:count]):
                    pixels = records[index, 1:].reshape(3, 32, 32).transpose(1, 2, 0)
                    member = zipfile.ZipInfo(f"{split}/{name}/{index:05d}.webp", date_time=(2009, 4, 8, 0, 0, 0))
                    archive.writestr(member, _lossless(np.ascontiguousarray(pixels)))


def _rank(split: str, index: int) -> bytes:
    """Hash that orders the images of a class: a fixed shuffle."""
    return hashlib.blake2b(f"{split}/{index}".encode()).digest()


def _lossless(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "WEBP", lossless=True, quality=100, method=6, exact=True)
    with Image.open(io.BytesIO(file.getvalue())) as image:
        if not np.array_equal(np.asarray(image), pixels):
            raise RuntimeError("libwebp changed the pixels")
    return file.getvalue()


if __name__ == "__main__":
    build_archive(Path(sys.argv[1]), Path(sys.argv[2]))
