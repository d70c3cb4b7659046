"""Layouts whose splits are lists of images: the Describable Textures Dataset and the tasks of VTAB-1k."""

from __future__ import annotations

import re

from vitrail.data.sources.data_source import DataSource
from vitrail.data.sources.root import Root, annotated_images
from vitrail.errors import UserError

TEXTURE_LISTS = {"labels/train1.txt": "train", "labels/val1.txt": "val", "labels/test1.txt": "test"}
VTAB_1K_LISTS = {"train800.txt": "train", "val200.txt": "val", "test.txt": "test"}
VTAB_1K_NOTE = "Read as a task of VTAB-1k with its published lists."  # vtab.py looks for this note
VTAB_LINE = re.compile(r"(\S.*?)\s+(\d{1,4})")  # images/train800/000000.jpg 12


def read_textures(root: Root, notes: list[str]) -> DataSource | None:
    """Read images/banded/banded_0002.jpg with the first of the ten folds of lists in labels/."""
    lists = {name: f" (the list of the {split} split)" for name, split in TEXTURE_LISTS.items()}
    if "images" not in root.folders() or not root.has_all("the Describable Textures Dataset", lists):
        return None
    notes.append("Read as the Describable Textures Dataset in its original layout, with the first of its ten folds.")
    annotations: dict[str, tuple[str, str]] = {}
    for file, split in TEXTURE_LISTS.items():
        for line in root.lines(file):
            _add(annotations, f"images/{line}", split, line.partition("/")[0], root.where(file))
    classes = tuple(sorted({label for _, label in annotations.values()}))
    return annotated_images(root, "images", annotations, classes, notes)


def read_vtab_1k(root: Root, notes: list[str]) -> DataSource | None:
    """Read a task of VTAB-1k as it is commonly shared: a folder of images with train800.txt, val200.txt and test.txt.

    Each line of these lists is an image and its class number.
    """
    if not root.has("train800.txt") or not root.has_all("a task of VTAB-1k", dict.fromkeys(VTAB_1K_LISTS, "")):
        return None
    notes.append(VTAB_1K_NOTE)
    annotations: dict[str, tuple[str, str]] = {}
    for file, split in VTAB_1K_LISTS.items():
        for line in root.lines(file):
            match = VTAB_LINE.fullmatch(line)
            if match is None:
                raise UserError(
                    f"{root.where(file)} has the line '{line[:60]}'; each line must be an image path and a class number"
                )
            _add(annotations, match[1], split, f"class {int(match[2])}", root.where(file))
    highest = max(int(label.removeprefix("class ")) for _, label in annotations.values())
    classes = tuple(f"class {number}" for number in range(highest + 1))
    folders = {name.partition("/")[0] for name in annotations}
    if len(folders) > 1 or not all("/" in name for name in annotations):
        raise UserError(
            f"'{root.path}' lists images in several folders, {sorted(folders)[:3]}; they must be in one folder"
        )
    return annotated_images(root, folders.pop(), annotations, classes, notes)


def _add(annotations: dict[str, tuple[str, str]], name: str, split: str, label: str, where: str) -> None:
    if name in annotations:
        raise UserError(f"{where} lists '{name}', which is already listed")
    annotations[name] = split, label
