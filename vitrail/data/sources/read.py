"""Which kind of data lies at a path.

A source is a function that looks at a place and gives what it holds, image by image, as an ImageList: how to read the
bytes, the split, the classes. One that does not find its own kind there gives nothing, and the next one looks. To add
a data set is to write such a function, and to name it in LAYOUTS.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from vitrail.data.formats import is_image_name
from vitrail.data.sources.caltech import CALTECH, read_caltech
from vitrail.data.sources.cifar import VERSIONS, is_tar, read_cifar, read_cifar_tar
from vitrail.data.sources.class_folders import NO_LABEL, read_folders, read_unlabelled
from vitrail.data.sources.image_list import ImageList, quoted
from vitrail.data.sources.imagenet import read_imagenet, read_tiny
from vitrail.data.sources.manifest import is_manifest, read_manifest
from vitrail.data.sources.oxford import read_flowers, read_pets
from vitrail.data.sources.packed import is_packed, read_packed
from vitrail.data.sources.parquet import is_parquet, read_parquet
from vitrail.data.sources.root import Root
from vitrail.data.sources.split_lists import read_textures, read_vtab_1k
from vitrail.errors import UserError, did_you_mean_path, os_errors_as, user_path

Source = Callable[[Root, list[str]], ImageList | None]
# Standard data sets in the layouts they are published in, seen from what lies in a folder or a .zip archive. The first
# that knows the place as its own counts; where none does, folders are classes.
LAYOUTS: tuple[Source, ...] = (
    read_cifar,
    read_flowers,
    read_pets,
    read_vtab_1k,
    read_textures,
    read_caltech,
    read_tiny,
    read_imagenet,
)
# What their archives unpack to: one step further in, when a path names the folder around them.
UNPACKED = frozenset(
    (
        *(version.folder for version in VERSIONS),
        *("102flowers", "flowers-102", "oxford-iiit-pet", "dtd", "tiny-imagenet-200"),
        *("caltech-101", "caltech101", CALTECH),
    )
)
DEEPEST = 2  # caltech-101/101_ObjectCategories


def read_source(path: str | Path, notes: list[str], labelled: bool = True, follow: bool = True) -> ImageList:
    """What lies at `path`, without decoding an image. Unless `labelled`, all images have one label, and folders need
    not be classes. Unless `follow`, links in a folder, and rows of a table that lead over links, are left out."""
    found = _read(path, notes, read_folders if labelled else read_unlabelled, follow)
    return found if labelled else replace(found, labels=[NO_LABEL] * len(found.entries), classes=None, multilabel=False)


def _read(path: str | Path, notes: list[str], of_folders: Source, follow: bool) -> ImageList:
    place = user_path(path)
    _check_there(place, path)
    if is_packed(place):
        return read_packed(place, notes)
    if is_parquet(place):
        return read_parquet(place, notes)
    if is_manifest(place):
        return read_manifest(place, notes, follow)
    if place.is_dir() or place.suffix.lower() == ".zip":
        root = Root.at(place, follow)
        standard = _read_layout(root, notes, DEEPEST)
        root.path = str(path)
        found = standard or of_folders(root, notes)
    else:
        found = read_cifar_tar(place, notes) if is_tar(place) else None
    if found is not None:
        return found
    if is_image_name(place.name):
        raise UserError(f"'{path}' is a single image; give the folder that holds a folder of images for each class")
    known = "a folder, a .zip archive of class folders, a .csv table, a .parquet file or a .tar.gz archive of CIFAR"
    raise UserError(f"'{path}' is not a data set; that would be {known}")


def _check_there(place: Path, path: str | Path) -> None:
    with os_errors_as(f"'{path}' cannot be opened"):
        if place.is_dir():
            with os.scandir(place):
                pass
        elif not place.exists():
            raise UserError(f"'{path}' does not exist{did_you_mean_path(place)}")


def read_standard(place: Path, notes: list[str], follow: bool = True) -> ImageList | None:
    """The standard data set in a folder or an archive, with the split and classes it is known by, or nothing."""
    if is_tar(place):
        return read_cifar_tar(place, notes)
    return _read_layout(Root.at(place, follow), notes, DEEPEST)


def _read_layout(root: Root, notes: list[str], steps: int) -> ImageList | None:
    for read in LAYOUTS:
        found = read(root, notes)
        if found is not None:
            return found
    folders = root.folders() if steps else []
    inner = folders if len(folders) == 1 else [folder for folder in folders if folder in UNPACKED]
    sets = {name: each for name in inner if (each := _read_layout(root.under(name), notes, steps - 1)) is not None}
    if len(sets) > 1:
        raise UserError(f"'{root.path}' holds several data sets, {quoted(sets)}; give the folder of one of them")
    return next(iter(sets.values()), None)
