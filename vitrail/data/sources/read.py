"""Find out which kind of data is at a path, and read it as a `DataSource`.

Each reader takes a `Root` and returns a DataSource, or None if the data is not of its kind; then the next reader is
tried. To add a data set, write such a function and list it in LAYOUTS.
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
from vitrail.data.sources.data_source import DataSource, quoted
from vitrail.data.sources.imagenet import read_imagenet, read_tiny
from vitrail.data.sources.manifest import is_manifest, read_manifest
from vitrail.data.sources.oxford import read_flowers, read_pets
from vitrail.data.sources.packed import is_packed, read_packed
from vitrail.data.sources.parquet import is_parquet, read_parquet
from vitrail.data.sources.root import Root
from vitrail.data.sources.split_lists import read_textures, read_vtab_1k
from vitrail.errors import UserError, did_you_mean_path, os_errors_as, user_path

SourceReader = Callable[[Root, list[str]], DataSource | None]
# Readers of standard data sets in their published layouts, in a folder or a .zip archive. The first that returns an
# DataSource wins; if none does, folders are classes.
LAYOUTS: tuple[SourceReader, ...] = (
    read_cifar,
    read_flowers,
    read_pets,
    read_vtab_1k,
    read_textures,
    read_caltech,
    read_tiny,
    read_imagenet,
)
# Folder names that their archives unpack to. They are also found inside the folder that a path names.
UNPACKED = frozenset(
    (
        *(version.folder for version in VERSIONS),
        *("102flowers", "flowers-102", "oxford-iiit-pet", "dtd", "tiny-imagenet-200"),
        *("caltech-101", "caltech101", CALTECH),
    )
)
MAX_DEPTH = 2  # caltech-101/101_ObjectCategories


def read_source(path: str | Path, notes: list[str], labelled: bool = True, follow: bool = True) -> DataSource:
    """Return the images at `path` without decoding any.

    With `labelled=False` all images get one label, and folders need not be classes. With `follow=False` links in a
    folder are skipped, and so are table rows that lead over links.
    """
    images = _read(path, notes, read_folders if labelled else read_unlabelled, follow)
    if labelled:
        return images
    return replace(images, labels=[NO_LABEL] * len(images.entries), classes=None, multilabel=False)


def _read(
    path: str | Path, notes: list[str], read_other: Callable[[Root, list[str]], DataSource], follow: bool
) -> DataSource:
    full_path = user_path(path)
    _check_exists(full_path, path)
    if is_packed(full_path):
        return read_packed(full_path, notes)
    if is_parquet(full_path):
        return read_parquet(full_path, notes)
    if is_manifest(full_path):
        return read_manifest(full_path, notes, follow)
    if full_path.is_dir() or full_path.suffix.lower() == ".zip":
        root = Root.at(full_path, follow)
        standard = _read_layout(root, notes, MAX_DEPTH)
        root.path = str(path)
        return standard or read_other(root, notes)
    if is_tar(full_path) and (images := read_cifar_tar(full_path, notes)):
        return images
    if is_image_name(full_path.name):
        raise UserError(f"'{path}' is a single image; use a folder that has one folder of images per class")
    raise UserError(
        f"'{path}' is not a data set; use a folder, a .zip archive of class folders, a .csv table, a .parquet file or "
        "a .tar.gz archive of CIFAR"
    )


def _check_exists(full_path: Path, path: str | Path) -> None:
    with os_errors_as(f"'{path}' cannot be opened"):
        if full_path.is_dir():
            with os.scandir(full_path):
                pass
        elif not full_path.exists():
            raise UserError(f"'{path}' does not exist{did_you_mean_path(full_path)}")


def read_standard(path: Path, notes: list[str], follow: bool = True) -> DataSource | None:
    """Return the standard data set in a folder or an archive, with its published splits and classes, or None."""
    if is_tar(path):
        return read_cifar_tar(path, notes)
    return _read_layout(Root.at(path, follow), notes, MAX_DEPTH)


def _read_layout(root: Root, notes: list[str], depth: int) -> DataSource | None:
    for read in LAYOUTS:
        images = read(root, notes)
        if images is not None:
            return images
    folders = root.folders() if depth else []
    candidates = folders if len(folders) == 1 else [folder for folder in folders if folder in UNPACKED]
    inner = {name: _read_layout(root.under(name), notes, depth - 1) for name in candidates}
    data_sets = {name: images for name, images in inner.items() if images is not None}
    if len(data_sets) > 1:
        raise UserError(f"'{root.path}' has several data sets, {quoted(data_sets)}; use the folder of one of them")
    return next(iter(data_sets.values()), None)
