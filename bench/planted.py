"""Synthetic datasets with known faults: duplicates, leaks, conflicting labels and corrupt files."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

CLASSES = 20
TEST_EVERY = 5  # one of five images is a test image
FRACTIONS = {
    "leak": 0.01,
    "near-leak": 0.024,
    "conflict": 0.005,
    "duplicate": 0.01,
    "near-duplicate": 0.012,
    "corrupt": 0.005,
}

Change = Callable[[Image.Image], tuple[bytes, str]]  # returns the encoded copy and its file extension


@dataclass
class Planted:
    """The planted faults."""

    # kind of finding -> the names that one case must contain
    cases: dict[str, list[frozenset[str]]] = field(default_factory=lambda: {kind: [] for kind in FRACTIONS})
    changes: dict[frozenset[str], str] = field(default_factory=dict)  # pairs of near-duplicates -> key of CHANGES
    images: int = 0


def encode(image: Image.Image, kind: str = "JPEG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def _scaled(image: Image.Image, factor: float) -> Image.Image:
    size = max(1, round(image.width * factor)), max(1, round(image.height * factor))
    return image.resize(size, Image.Resampling.LANCZOS)


def _cropped(image: Image.Image) -> Image.Image:
    x, y = round(0.03 * image.width), round(0.03 * image.height)
    return image.crop((x, y, image.width - x, image.height - y))


def _framed(image: Image.Image) -> Image.Image:
    return ImageOps.expand(image, round(0.03 * image.width), 0)


CHANGES: dict[str, Change] = {
    "JPEG quality 50": lambda image: (encode(image, quality=50), ".jpg"),
    "WebP": lambda image: (encode(image, "WEBP", quality=75), ".webp"),
    "PNG": lambda image: (encode(image, "PNG"), ".png"),
    "a quarter of the size": lambda image: (encode(_scaled(image, 0.25), quality=90), ".jpg"),
    "twice the size": lambda image: (encode(_scaled(image, 2), quality=85), ".jpg"),
    "brighter": lambda image: (encode(ImageEnhance.Brightness(image).enhance(1.15), quality=85), ".jpg"),
    "more contrast": lambda image: (encode(ImageEnhance.Contrast(image).enhance(1.25), quality=85), ".jpg"),
    "less colour": lambda image: (encode(ImageEnhance.Color(image).enhance(0.5), quality=85), ".jpg"),
    "grey": lambda image: (encode(image.convert("L"), quality=85), ".jpg"),
    "3 % cropped": lambda image: (encode(_cropped(image), quality=90), ".jpg"),
    "3 % black border": lambda image: (encode(_framed(image), quality=90), ".jpg"),
    "mirrored": lambda image: (encode(ImageOps.mirror(image), quality=85), ".jpg"),
}


def generated(count: int, size: tuple[int, int] = (225, 300)) -> Iterator[Image.Image]:
    """Generate random images with structure at several scales, strongest at coarse ones, as in photos."""
    height, width = size
    for seed in range(count):
        random = np.random.default_rng(seed)
        total = np.full((height, width, 3), 128, np.float32)
        for side in (3, 9, 27, 81):
            coarse = random.integers(0, 256, (-(-height // side) + 1, -(-width // side) + 1, 3), dtype=np.uint8)
            smooth = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
            total += (np.asarray(smooth, np.float32) - 128) * (0.1 + side / 120)
        yield Image.fromarray(np.clip(total, 0, 255).astype(np.uint8))


def plant(root: Path, images: Iterator[Image.Image], count: int) -> Planted:
    """Write about `count` files into class folders under train/ and test/, with the FRACTIONS of faults."""
    planted = Planted()
    generator = np.random.default_rng(0)
    faults = [kind for kind, fraction in FRACTIONS.items() for _ in range(max(2, round(fraction * count)))]
    originals = count - len(faults)
    fault_of = dict(zip(generator.choice(originals, len(faults), replace=False).tolist(), faults, strict=True))
    changes = cycle(CHANGES.items())
    for index, image in zip(range(originals), images, strict=False):
        label = index % CLASSES
        split = "test" if index // CLASSES % TEST_EVERY == 0 and index not in fault_of else "train"
        name = f"{split}/c{label:02d}/{index:05d}.jpg"
        data = encode(image, quality=90)
        _write(root, name, data, planted)
        if index in fault_of:
            _add_fault(root, fault_of[index], image, data, name, index, changes, planted)
    return planted


def _add_fault(
    root: Path,
    kind: str,
    image: Image.Image,
    data: bytes,
    name: str,
    index: int,
    changes: Iterator[tuple[str, Change]],
    planted: Planted,
) -> None:
    """Write a second file for the image `name`, with one kind of fault."""
    label = index % CLASSES + (kind == "conflict")
    split = "test" if kind.endswith("leak") else "train"
    stem = f"{split}/c{label % CLASSES:02d}/{index:05d}-{kind}"
    if kind == "corrupt":
        corrupt = (data[: len(data) // 2], b"", b"<!doctype html><title>404</title>", data[:3])[index % 4]
        _write(root, f"{stem}.jpg", corrupt, planted)
        planted.cases[kind].append(frozenset({f"{stem}.jpg"}))
        return
    change, extension = "none", ".jpg"
    if kind.startswith("near"):
        change, make = next(changes)
        data, extension = make(image)
    _write(root, stem + extension, data, planted)
    planted.cases[kind].append(frozenset({name, stem + extension}))
    planted.changes[planted.cases[kind][-1]] = change


def _write(root: Path, name: str, data: bytes, planted: Planted) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_bytes(data)
    planted.images += 1
