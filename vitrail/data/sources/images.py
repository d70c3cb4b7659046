"""Images that a user points at, whether or not they have labels: files, folders, archives, tables and data sets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.data.decode import BadImage
from vitrail.data.files import FILE_NOT_FOUND, PATH_NOT_FOUND, Files, FolderFiles, ZipFiles, read_error_reason
from vitrail.data.samples import Texts
from vitrail.data.sources.cifar import is_tar
from vitrail.data.sources.class_folders import note_ignored, note_links
from vitrail.data.sources.manifest import is_manifest, read_paths
from vitrail.data.sources.packed import is_packed, read_packed
from vitrail.data.sources.parquet import is_parquet, read_images
from vitrail.data.sources.read import read_standard
from vitrail.errors import UserError, did_you_mean_path, user_path

_Place = tuple[Files | None, Path | None]  # what reads the images, and the path that their names begin with


@dataclass(frozen=True, eq=False)
class Images:
    """Images by number, for a Reader: what the user calls each, and its bytes. Compact, as there may be millions."""

    places: list[_Place]
    place: np.ndarray  # int32 (n,): in places
    keys: Texts  # what each is called at its place
    unreadable: dict[int, str]  # row -> why it cannot be read, where that is known without trying

    def __len__(self) -> int:
        return len(self.place)

    def name(self, index: int) -> str:
        base, key = self.places[self.place[index]][1], self.keys[index]
        return key if base is None else str(base / key)

    def read(self, index: int) -> bytes:
        files = self.places[self.place[index]][0]
        if files is None or index in self.unreadable:
            raise BadImage(self.unreadable[index])
        try:
            return files.read(self.keys[index])
        except OSError as error:
            raise BadImage(read_error_reason(error)) from None
        except ValueError as error:  # a table names a path with a null character
            raise BadImage(f"cannot be read: {error}") from None

    def labels_of(self, indices: np.ndarray) -> np.ndarray:
        return np.zeros(len(indices), np.int64)

    def weights_of(self, indices: np.ndarray) -> np.ndarray:
        return np.ones(len(indices), np.float32)

    def subset(self, rows: Sequence[int]) -> Images:
        known = {new: self.unreadable[old] for new, old in enumerate(rows) if old in self.unreadable}
        return replace(self, place=self.place[rows], keys=Texts.of(self.keys[row] for row in rows), unreadable=known)


def image_paths(images: str | Path | Iterable[str | Path]) -> list[str | Path]:
    """What a program gives as images, as a list of paths."""
    one = isinstance(images, str | Path | bytes) or not isinstance(images, Iterable)
    paths: list[Any] = [images] if one else [*images]  # type: ignore[misc]
    for path in paths:
        if not isinstance(path, str | Path):
            raise UserError(
                f"images are paths here, not {type(path).__name__}; for images in memory there are the methods of "
                "vitrail.load(WEIGHTS)"
            )
    return paths


def find_images(paths: Sequence[str | Path], notes: list[str] | None = None, follow: bool = True) -> Images:
    """Files as given; folders and archives as the images in them, in order; tables and shards as their rows; published
    data sets that are no image files, such as CIFAR, as their images.

    What looks like a picture and cannot be opened, or is not there and not all that was asked for, has a row too.
    What was ignored is noted. Unless `follow`, links in folders are left out.
    """
    places: dict[int, tuple[int, _Place]] = {}  # by identity: number, place
    numbers: list[int] = []
    keys: list[str] = []
    unreadable: dict[int, str] = {}
    for place, key, reason in _found(paths, [] if notes is None else notes, follow):
        number, _ = places.setdefault(id(place), (len(places), place))
        if reason:
            unreadable[len(keys)] = reason
        numbers.append(number)
        keys.append(key)
    return Images([place for _, place in places.values()], np.array(numbers, np.int32), Texts.of(keys), unreadable)


_Row = tuple[_Place, str, str]  # where it is, what it is called there, why it cannot be read


def _found(paths: Sequence[str | Path], notes: list[str], follow: bool) -> Iterator[_Row]:
    nowhere: _Place = (None, None)
    folders: dict[Path, _Place] = {}  # of single files
    for path in map(user_path, paths):
        if is_packed(path):
            packed = read_packed(path, [])
            yield from _rows((packed.files, None), (entry.name for entry in packed.entries))
        elif is_parquet(path):
            files, names = read_images(path)
            yield from _rows((files, None), names)
        elif is_manifest(path):
            listed, names = read_paths(path)
            yield from _rows((listed, None), names)
        elif path.is_dir():
            yield from _in_tree(path, FolderFiles(str(path.absolute()), follow), notes, follow)
        elif path.suffix.lower() == ".zip" and path.is_file():
            yield from _in_tree(path, ZipFiles(str(path.absolute())), notes, follow)
        elif path.is_file() and is_tar(path) and (rows := _published(path, notes, follow)):
            yield from rows
        elif path.is_file():
            folder = folders.setdefault(path.parent, (FolderFiles(str(path.absolute().parent)), path.parent))
            yield folder, path.name, ""
        elif path.is_symlink() and not path.exists():
            yield nowhere, str(path), f"{FILE_NOT_FOUND}: a broken link"
        elif path.exists():
            yield nowhere, str(path), "it is not a file"
        elif len(paths) > 1:
            yield nowhere, str(path), f"{PATH_NOT_FOUND}{did_you_mean_path(path)}"
        else:
            raise UserError(f"{path} {PATH_NOT_FOUND}{did_you_mean_path(path)}")


def _rows(place: _Place, names: Iterable[str]) -> Iterator[_Row]:
    yield from ((place, name, "") for name in names)


def _in_tree(path: Path, files: FolderFiles | ZipFiles, notes: list[str], follow: bool) -> Iterator[_Row]:
    """The pictures in a folder or an archive; where there is none, those of a data set in files of its own."""
    listing = files.list()
    if not listing.images and not listing.unreadable and (rows := _published(path, notes, follow)):
        yield from rows
        return
    note_ignored(listing, notes)
    note_links(listing, notes)
    place = (files, path)
    yield from _rows(place, (entry.name for entry in listing.images))
    yield from ((place, name, reason) for name, reason in listing.unreadable)


def _published(path: Path, notes: list[str], follow: bool) -> list[_Row]:
    """The images of a data set in its original layout, or none; one that is damaged is a row that says why."""
    try:
        found = read_standard(path, notes, follow)
    except UserError as error:
        return [((None, None), str(path), str(error))]
    return [] if found is None else list(_rows((found.files, path), (entry.name for entry in found.entries)))
