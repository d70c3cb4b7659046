"""Which kind of data lies at a path."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from vitrail.data.files import FolderFiles, ZipFiles
from vitrail.data.formats import is_image_name
from vitrail.data.sources.catalogue import Catalogue
from vitrail.data.sources.layout import NO_LABEL, read_folders, read_unlabelled
from vitrail.data.sources.manifest import is_manifest, read_manifest
from vitrail.data.sources.packed import is_packed, read_packed
from vitrail.data.sources.parquet import is_parquet, read_parquet
from vitrail.data.sources.standard import read_standard
from vitrail.errors import UserError, did_you_mean_path, given_path


def read_source(path: str | Path, notes: list[str], labelled: bool = True, follow: bool = True) -> Catalogue:
    """What lies at `path`, without decoding an image. Unless `labelled`, all images have one label, and folders need
    not be classes. Unless `follow`, links in a folder, and rows of a table that lead over links, are left out."""
    found = _read(path, notes, read_folders if labelled else read_unlabelled, follow)
    return found if labelled else replace(found, labels=[NO_LABEL] * len(found.entries), classes=None, several=False)


def _read(path: str | Path, notes: list[str], of_folders: Callable[..., Catalogue], follow: bool) -> Catalogue:
    place = given_path(path)
    try:
        if place.is_dir():
            with os.scandir(place):
                pass
        elif not place.exists():
            raise UserError(f"'{path}' does not exist{did_you_mean_path(place)}")
    except OSError as error:
        raise UserError(f"'{path}' cannot be opened: {error.strerror}") from None
    if is_packed(place):
        return read_packed(place, notes)
    if is_parquet(place):
        return read_parquet(place, notes)
    if is_manifest(place):
        return read_manifest(place, notes, follow)
    standard = read_standard(place, notes, follow)
    if standard is not None:
        return standard
    if place.is_dir():
        return of_folders(FolderFiles(str(place.absolute()), follow), path, notes)
    if place.suffix.lower() == ".zip":
        return of_folders(ZipFiles(str(place.absolute())), path, notes)
    if is_image_name(place.name):
        raise UserError(f"'{path}' is a single image; give the folder that holds a folder of images for each class")
    known = "a folder, a .zip archive of class folders, a .csv table, a .parquet file or a .tar.gz archive of CIFAR"
    raise UserError(f"'{path}' is not a data set; that would be {known}")
