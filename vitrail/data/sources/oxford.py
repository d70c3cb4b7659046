"""Oxford Flowers-102 and Oxford-IIIT Pets as the Visual Geometry Group publishes them."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from vitrail.data.sources.image_list import ImageList
from vitrail.data.sources.matfile import read_mat
from vitrail.data.sources.root import Root, annotated
from vitrail.errors import UserError

FLOWER_SPLITS = {"trnid": "train", "valid": "val", "tstid": "test"}
FLOWER_FILES = {"imagelabels.mat": "the class", "setid.mat": "the split"}
PET_SPLITS = {"annotations/trainval.txt": "train", "annotations/test.txt": "test"}
PET_LINE = re.compile(r"((\S+)_\d+) (\d{1,4}) \d+ \d+")  # Abyssinian_100 1 1 1: image, class, species, breed


def flower_names() -> tuple[str, ...]:
    """The 102 names in the order of their labels, which the data set itself does not hold."""
    return tuple((Path(__file__).parents[1] / "bundled" / "flowers102.txt").read_text(encoding="utf-8").splitlines())


def read_flowers(root: Root, notes: list[str]) -> ImageList | None:
    """jpg/image_00001.jpg, imagelabels.mat and setid.mat."""
    parts = {name: f", which tells {what} of each image" for name, what in FLOWER_FILES.items()}
    if "jpg" not in root.folders() or not root.has_all("Oxford Flowers-102", parts):
        return None
    notes.append("Read as Oxford Flowers-102 in its original layout.")
    classes = flower_names()
    labels = _numbers(root, "imagelabels.mat", "labels")
    if labels.min(initial=1) < 1 or labels.max(initial=1) > len(classes):
        raise UserError(f"{root.where('imagelabels.mat')} has labels outside 1 to {len(classes)}")
    listed: dict[str, tuple[str, str]] = {}
    for key, split in FLOWER_SPLITS.items():
        for number in _numbers(root, "setid.mat", key).tolist():
            name = f"jpg/image_{number:05d}.jpg"
            if not 1 <= number <= len(labels):
                raise UserError(f"{root.where('setid.mat')} names image {number}, and there are {len(labels):,} labels")
            if name in listed:
                raise UserError(f"{root.where('setid.mat')} names image {number} twice")
            listed[name] = split, classes[labels[number - 1] - 1]
    return annotated(root, "jpg", listed, classes, notes)


def _numbers(root: Root, file: str, key: str) -> np.ndarray:
    values = read_mat(root.read(file), root.where(file)).get(key)
    if not isinstance(values, np.ndarray) or values.dtype.kind not in "iuf" or not np.isfinite(values).all():
        raise UserError(f"{root.where(file)} has no numbers called '{key}'")
    return values.ravel().astype(np.int64)


def read_pets(root: Root, notes: list[str]) -> ImageList | None:
    """images/Abyssinian_100.jpg, annotations/trainval.txt and annotations/test.txt."""
    lists = {name: f", which lists the images to {split} on" for name, split in PET_SPLITS.items()}
    there = next((name for name in lists if root.has(name)), "")
    if not there or "images" not in root.folders() or not _lists_pets(root.read(there)):
        return None
    root.has_all("Oxford-IIIT Pets", lists)
    notes.append("Read as Oxford-IIIT Pets in its original layout.")
    listed: dict[str, tuple[str, str]] = {}
    name_of: dict[int, str] = {}
    for file, split in PET_SPLITS.items():
        for line in root.lines(file):
            if line.startswith("#"):
                continue
            parts = PET_LINE.fullmatch(line)
            if parts is None:
                raise UserError(f"{root.where(file)} has the line '{line}', and not an image with three numbers")
            name, label, number = f"images/{parts[1]}.jpg", parts[2], int(parts[3])
            if name_of.setdefault(number, label) != label:
                raise UserError(f"{root.where(file)} calls class {number} '{name_of[number]}' and '{label}'")
            if name in listed:
                raise UserError(f"{root.where(file)} lists '{parts[1]}', which was listed before")
            listed[name] = split, label
    classes = tuple(name_of[number] for number in sorted(name_of))
    if len(set(classes)) < len(classes):
        twice = next(name for name in classes if classes.count(name) > 1)
        raise UserError(f"'{root.path}/annotations' gives the class '{twice}' two numbers")
    return annotated(root, "images", listed, classes, notes)


def _lists_pets(data: bytes) -> bool:
    """Object detectors borrow the form of these lists, with one class or with names alone."""
    found = [PET_LINE.fullmatch(line.strip()) for line in data.decode("latin-1").splitlines()]
    return len({parts[2] for parts in found if parts}) > 1
