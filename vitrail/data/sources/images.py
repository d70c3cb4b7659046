"""Images at paths, with or without labels: files, folders, archives, tables and data sets."""

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

_Location = tuple[Files | None, Path | None]  # what reads the images, and the path before their names


@dataclass(frozen=True, eq=False)
class Images:
    """Images by index, as a Reader needs them. Compact in memory, as there may be millions."""

    locations: list[_Location]
    location: np.ndarray  # int32 (n,): index in `locations`
    names: Texts  # of each image at its location
    unreadable: dict[int, str]  # row -> why it cannot be read, if that is known without trying

    def __len__(self) -> int:
        return len(self.location)

    def name(self, index: int) -> str:
        """Return the path of an image as the user would type it."""
        base, name = self.locations[self.location[index]][1], self.names[index]
        return name if base is None else str(base / name)

    def read(self, index: int) -> bytes:
        """Return the encoded image; raise BadImage if it cannot be read."""
        files = self.locations[self.location[index]][0]
        if files is None or index in self.unreadable:
            raise BadImage(self.unreadable[index])
        try:
            return files.read(self.names[index])
        except OSError as error:
            raise BadImage(read_error_reason(error)) from None
        except ValueError as error:  # a path in a table has a null character
            raise BadImage(f"cannot be read: {error}") from None

    def labels_of(self, indices: np.ndarray) -> np.ndarray:
        return np.zeros(len(indices), np.int64)

    def weights_of(self, indices: np.ndarray) -> np.ndarray:
        return np.ones(len(indices), np.float32)

    def subset(self, rows: Sequence[int]) -> Images:
        unreadable = {new: self.unreadable[old] for new, old in enumerate(rows) if old in self.unreadable}
        names = Texts.of(self.names[row] for row in rows)
        return replace(self, location=self.location[rows], names=names, unreadable=unreadable)


def image_paths(images: str | Path | Iterable[str | Path]) -> list[str | Path]:
    """Return the paths in an argument of the Python API as a list."""
    single = isinstance(images, str | Path | bytes) or not isinstance(images, Iterable)
    paths: list[Any] = [images] if single else [*images]  # type: ignore[misc]
    for path in paths:
        if not isinstance(path, str | Path):
            raise UserError(
                f"images must be paths, not {type(path).__name__}; for images in memory use the methods of "
                "vitrail.load(WEIGHTS)"
            )
    return paths


def find_images(paths: Sequence[str | Path], notes: list[str] | None = None, follow: bool = True) -> Images:
    """Return the images at `paths`, in order.

    A folder or archive gives the images in it, a table or shard its rows, and a standard data set that is not image
    files, such as CIFAR, its images. An image that cannot be opened has a row too, and so has a missing path if there
    are several paths. Ignored files are noted. With `follow=False` links in folders are skipped.
    """
    locations: dict[int, tuple[int, _Location]] = {}  # by identity: number, location
    numbers: list[int] = []
    names: list[str] = []
    unreadable: dict[int, str] = {}
    for location, name, reason in _find(paths, [] if notes is None else notes, follow):
        number, _ = locations.setdefault(id(location), (len(locations), location))
        if reason:
            unreadable[len(names)] = reason
        numbers.append(number)
        names.append(name)
    distinct = [location for _, location in locations.values()]
    return Images(distinct, np.array(numbers, np.int32), Texts.of(names), unreadable)


_Row = tuple[_Location, str, str]  # location, name there, why it cannot be read


def _find(paths: Sequence[str | Path], notes: list[str], follow: bool) -> Iterator[_Row]:
    nowhere: _Location = (None, None)
    folders: dict[Path, _Location] = {}  # of single files
    for path in map(user_path, paths):
        if is_packed(path):
            packed = read_packed(path, [])
            yield from _rows((packed.files, None), (entry.name for entry in packed.entries))
        elif is_parquet(path):
            shards, names = read_images(path)
            yield from _rows((shards, None), names)
        elif is_manifest(path):
            files, names = read_paths(path)
            yield from _rows((files, None), names)
        elif path.is_dir():
            yield from _in_tree(path, FolderFiles(str(path.absolute()), follow), notes, follow)
        elif path.suffix.lower() == ".zip" and path.is_file():
            yield from _in_tree(path, ZipFiles(str(path.absolute())), notes, follow)
        elif path.is_file() and is_tar(path) and (rows := _in_data_set(path, notes, follow)):
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


def _rows(location: _Location, names: Iterable[str]) -> Iterator[_Row]:
    yield from ((location, name, "") for name in names)


def _in_tree(path: Path, files: FolderFiles | ZipFiles, notes: list[str], follow: bool) -> Iterator[_Row]:
    """Yield the images in a folder or an archive; if it has none, those of a standard data set in it."""
    listing = files.list()
    if not listing.images and not listing.unreadable and (rows := _in_data_set(path, notes, follow)):
        yield from rows
        return
    note_ignored(listing, notes)
    note_links(listing, notes)
    location = (files, path)
    yield from _rows(location, (entry.name for entry in listing.images))
    yield from ((location, name, reason) for name, reason in listing.unreadable)


def _in_data_set(path: Path, notes: list[str], follow: bool) -> list[_Row]:
    """Return the images of a standard data set; a damaged one is a single row with the reason."""
    try:
        images = read_standard(path, notes, follow)
    except UserError as error:
        return [((None, None), str(path), str(error))]
    return [] if images is None else list(_rows((images.files, path), (entry.name for entry in images.entries)))
