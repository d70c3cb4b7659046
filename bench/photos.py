"""Synthetic JPEG photos, made from the images that are bundled with the package."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vitrail.data.dataset import bundled_images
from vitrail.data.decode import decode

SIZE = (375, 500)  # (height, width): the typical size in ImageNet
QUALITY = 90
GRAIN = 9.0  # standard deviation of the texture; the files have 35 to 45 KB


def make_photos(root: Path, count: int, classes: int = 10) -> dict[str, Any]:
    """Write `count` files into class folders under `root` and return their number and sizes.

    Each file is a bundled 32-pixel image, enlarged, plus noise at four scales as texture.
    """
    texture = _texture(np.random.default_rng(0))
    sizes = []
    with zipfile.ZipFile(bundled_images()) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
        names = [name for name in names if Path(name).suffix in (".webp", ".png", ".jpg")]
        for index in range(count):
            small = archive.read(names[index * 7 % len(names)])
            data = _photo(small, texture, np.random.default_rng(index))
            folder = root / f"class{index % classes}"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{index:06}.jpg").write_bytes(data)
            sizes.append(len(data))
    low, median, high = np.percentile(sizes, [25, 50, 75]) / 1024
    return {
        "count": count,
        "kilobytes": round(float(median), 1),
        "quartiles": [round(float(low), 1), round(float(high), 1)],
    }


def _texture(random: np.random.Generator) -> np.ndarray:
    """Noise at four scales, float32 (1024, 1024, 3), of standard deviation 1."""
    total = np.zeros((1024, 1024, 3), np.float32)
    for side in (1, 2, 4, 8):
        coarse = random.integers(0, 256, (1024 // side, 1024 // side, 3), dtype=np.uint8)
        smooth = Image.fromarray(coarse).resize((1024, 1024), Image.Resampling.BICUBIC)
        total += np.asarray(smooth, np.float32) * side**0.5
    return (total - total.mean()) / total.std()


def _photo(small: bytes, texture: np.ndarray, random: np.random.Generator) -> bytes:
    height, width = SIZE
    shapes = Image.fromarray(decode(small)).resize((width, height), Image.Resampling.BICUBIC)
    top, left = random.integers(0, 1024 - height), random.integers(0, 1024 - width)
    pixels = np.asarray(shapes, np.float32) + GRAIN * texture[top : top + height, left : left + width]
    file = io.BytesIO()
    Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(file, "JPEG", quality=QUALITY)
    return file.getvalue()
