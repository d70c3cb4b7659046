"""Folders of small images for the tests of `vitrail.data`."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np
from PIL import Image

from vitrail.data.dataset import Dataset


def image_bytes(value: int, size: tuple[int, int] = (4, 6), kind: str = "PNG") -> bytes:
    """An encoded image that differs for every value below 65,536."""
    file = io.BytesIO()
    pixels = np.full((*size, 3), value % 256, np.uint8)
    pixels[0, 0] = value // 256 % 256
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def fill(root: Path, names: list[str] | dict[str, bytes]) -> Path:
    """Write images; a list of names gets a different image for each name."""
    contents = names if isinstance(names, dict) else {name: image_bytes(i) for i, name in enumerate(names)}
    for name, data in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


def numbered(counts: dict[str, int]) -> list[str]:
    return [f"{name}/{i}.png" for name, count in counts.items() for i in range(count)]


def zipped(root: Path, target: Path, prefix: str = "") -> Path:
    with zipfile.ZipFile(target, "w") as archive:
        for path in sorted(root.rglob("*"), reverse=True):
            archive.write(path, prefix + path.relative_to(root).as_posix())
    return target


def contents(data: Dataset) -> dict[str, list[tuple[str, str]]]:
    return {split: [(s.name(i), s.classes[s.labels[i]]) for i in range(len(s))] for split, s in data.splits.items()}


def names_of(data: Dataset, split: str) -> set[str]:
    return {name for name, _ in contents(data)[split]}


def has_note(notes: list[str], *facts: str) -> bool:
    """Whether one of the notes has all these facts."""
    return any(all(fact in note for fact in facts) for note in notes)
