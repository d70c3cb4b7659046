"""Oxford Flowers-102 and Oxford-IIIT Pets in their published layouts."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from vitrail.data.sources.data_source import DataSource
from vitrail.data.sources.matfile import read_mat
from vitrail.data.sources.root import Root, annotated_images
from vitrail.errors import UserError

FLOWER_SPLITS = {"trnid": "train", "valid": "val", "tstid": "test"}
FLOWER_FILES = {"imagelabels.mat": "the class", "setid.mat": "the split"}
PET_SPLITS = {"annotations/trainval.txt": "train", "annotations/test.txt": "test"}
PET_LINE = re.compile(r"((\S+)_\d+) (\d{1,4}) \d+ \d+")  # Abyssinian_100 1 1 1: image, class, species, breed


def flower_names() -> tuple[str, ...]:
    """Return the 102 class names in label order. The data set itself has no names."""
    return tuple((Path(__file__).parents[1] / "bundled" / "flowers102.txt").read_text(encoding="utf-8").splitlines())


def read_flowers(root: Root, notes: list[str]) -> DataSource | None:
    """Read jpg/image_00001.jpg with imagelabels.mat and setid.mat."""
    side_files = {name: f" ({what} of each image)" for name, what in FLOWER_FILES.items()}
    if "jpg" not in root.folders() or not root.has_all("Oxford Flowers-102", side_files):
        return None
    notes.append("Read as Oxford Flowers-102 in its original layout.")
    classes = flower_names()
    labels = _numbers(root, "imagelabels.mat", "labels")
    if labels.min(initial=1) < 1 or labels.max(initial=1) > len(classes):
        raise UserError(f"{root.where('imagelabels.mat')} has labels outside 1 to {len(classes)}")
    annotations: dict[str, tuple[str, str]] = {}
    for key, split in FLOWER_SPLITS.items():
        for number in _numbers(root, "setid.mat", key).tolist():
            name = f"jpg/image_{number:05d}.jpg"
            if not 1 <= number <= len(labels):
                raise UserError(
                    f"{root.where('setid.mat')} lists image {number}, but there are only {len(labels):,} labels"
                )
            if name in annotations:
                raise UserError(f"{root.where('setid.mat')} lists image {number} twice")
            annotations[name] = split, classes[labels[number - 1] - 1]
    return annotated_images(root, "jpg", annotations, classes, notes)


def _numbers(root: Root, file: str, key: str) -> np.ndarray:
    values = read_mat(root.read(file), root.where(file)).get(key)
    if not isinstance(values, np.ndarray) or values.dtype.kind not in "iuf" or not np.isfinite(values).all():
        raise UserError(f"{root.where(file)} has no numeric array '{key}'")
    return values.ravel().astype(np.int64)


def read_pets(root: Root, notes: list[str]) -> DataSource | None:
    """Read images/Abyssinian_100.jpg with annotations/trainval.txt and annotations/test.txt."""
    lists = {name: f" (the list of the {split} split)" for name, split in PET_SPLITS.items()}
    present = next((name for name in lists if root.has(name)), "")
    if not present or "images" not in root.folders() or not _lists_pets(root.read(present)):
        return None
    root.has_all("Oxford-IIIT Pets", lists)
    notes.append("Read as Oxford-IIIT Pets in its original layout.")
    annotations: dict[str, tuple[str, str]] = {}
    name_of: dict[int, str] = {}
    for file, split in PET_SPLITS.items():
        for line in root.lines(file):
            if line.startswith("#"):
                continue
            match = PET_LINE.fullmatch(line)
            if match is None:
                raise UserError(
                    f"{root.where(file)} has the line '{line}'; each line must be an image name and three numbers"
                )
            name, label, number = f"images/{match[1]}.jpg", match[2], int(match[3])
            if name_of.setdefault(number, label) != label:
                raise UserError(
                    f"{root.where(file)} has two names for class {number}: '{name_of[number]}' and '{label}'"
                )
            if name in annotations:
                raise UserError(f"{root.where(file)} lists '{match[1]}', which is already listed")
            annotations[name] = split, label
    classes = tuple(name_of[number] for number in sorted(name_of))
    if len(set(classes)) < len(classes):
        repeated = next(name for name in classes if classes.count(name) > 1)
        raise UserError(f"'{root.path}/annotations' has two numbers for the class '{repeated}'")
    return annotated_images(root, "images", annotations, classes, notes)


def _lists_pets(data: bytes) -> bool:
    """Whether the list names several classes. Object detection data has similar lists with a single class."""
    matches = [PET_LINE.fullmatch(line.strip()) for line in data.decode("latin-1").splitlines()]
    return len({match[2] for match in matches if match}) > 1
