"""Two layouts in which lists say which image is where: the Describable Textures Dataset, and the tasks of VTAB-1k."""

from __future__ import annotations

import re

from vitrail.data.sources.image_list import ImageList
from vitrail.data.sources.root import Root, annotated
from vitrail.errors import UserError

TEXTURE_LISTS = {"labels/train1.txt": "train", "labels/val1.txt": "val", "labels/test1.txt": "test"}
VTAB_1K_LISTS = {"train800.txt": "train", "val200.txt": "val", "test.txt": "test"}
LISTED = re.compile(r"(\S.*?)\s+(\d{1,4})")  # images/train800/000000.jpg 12


def read_textures(root: Root, notes: list[str]) -> ImageList | None:
    """images/banded/banded_0002.jpg, and ten folds of lists in labels/, of which the first is the one that is used."""
    lists = {name: f", its {split} split" for name, split in TEXTURE_LISTS.items()}
    if "images" not in root.folders() or not root.has_all("the Describable Textures Dataset", lists):
        return None
    notes.append("Read as the Describable Textures Dataset in its original layout, with the first of its ten folds.")
    listed: dict[str, tuple[str, str]] = {}
    for file, split in TEXTURE_LISTS.items():
        for line in root.lines(file):
            _add(listed, f"images/{line}", split, line.partition("/")[0], root.where(file))
    classes = tuple(sorted({label for _, label in listed.values()}))
    return annotated(root, "images", listed, classes, notes)


def read_vtab_1k(root: Root, notes: list[str]) -> ImageList | None:
    """A task of VTAB-1k as it is passed around: train800.txt, val200.txt and test.txt, each a list of images and of the
    numbers of their classes, beside the images."""
    if not root.has("train800.txt") or not root.has_all("a task of VTAB-1k", dict.fromkeys(VTAB_1K_LISTS, "")):
        return None
    notes.append("Read as a task of VTAB-1k with its published lists.")
    listed: dict[str, tuple[str, str]] = {}
    for file, split in VTAB_1K_LISTS.items():
        for line in root.lines(file):
            parts = LISTED.fullmatch(line)
            if parts is None:
                raise UserError(f"{root.where(file)} has the line '{line[:60]}', and not an image with its class")
            _add(listed, parts[1], split, f"class {int(parts[2])}", root.where(file))
    most = max(int(label.removeprefix("class ")) for _, label in listed.values())
    classes = tuple(f"class {number}" for number in range(most + 1))
    folders = {name.partition("/")[0] for name in listed}
    if len(folders) > 1 or not all("/" in name for name in listed):
        raise UserError(f"'{root.path}' lists images of several folders, {sorted(folders)[:3]}, and not of one")
    return annotated(root, folders.pop(), listed, classes, notes)


def _add(listed: dict[str, tuple[str, str]], name: str, split: str, label: str, where: str) -> None:
    if name in listed:
        raise UserError(f"{where} lists '{name}', which was listed before")
    listed[name] = split, label
