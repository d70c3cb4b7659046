"""Images that a user points at, without labels: files, folders, archives, tables and shards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from vitrail.data.files import GONE, MISSING, Files, FolderFiles, ZipFiles, why_unread
from vitrail.data.sources.layout import note_ignored, note_links
from vitrail.data.sources.manifest import is_manifest, read_paths
from vitrail.data.sources.packed import is_packed, read_packed
from vitrail.data.sources.parquet import is_parquet, read_images
from vitrail.errors import UserError, did_you_mean_path, given_path
from vitrail.inference.classifier import Classifier, Prediction


@dataclass(frozen=True)
class Item:
    """An image to label: what the user calls it, and where its bytes are."""

    name: str
    files: Files
    key: str


@dataclass(frozen=True)
class Row:
    """One file's outcome: a prediction, or the reason there is none."""

    file: str
    prediction: Prediction | None
    error: str | None


def find_images(
    paths: Sequence[str | Path], notes: list[str] | None = None, follow: bool = True
) -> Iterator[Item | Row]:
    """Files as given; folders and archives as the images in them, in order; tables and shards as their rows.

    What looks like a picture and cannot be opened, or is not there and not all that was asked for, is a row that says
    why. What was ignored is noted. Unless `follow`, links in folders are left out.
    """
    notes = [] if notes is None else notes
    for path in map(given_path, paths):
        if is_packed(path):
            packed = read_packed(path, [])
            yield from (Item(entry.name, packed.files, entry.name) for entry in packed.entries)
        elif is_parquet(path):
            yield from _rows(*read_images(path))
        elif is_manifest(path):
            yield from _rows(*read_paths(path))
        elif path.is_dir():
            yield from _listed(path, FolderFiles(str(path.absolute()), follow), notes)
        elif path.suffix.lower() == ".zip" and path.is_file():
            yield from _listed(path, ZipFiles(str(path.absolute())), notes)
        elif path.is_file():
            yield Item(str(path), FolderFiles(str(path.absolute().parent)), path.name)
        elif path.is_symlink() and not path.exists():
            yield Row(str(path), None, f"{MISSING}: a broken link")
        elif path.exists():
            yield Row(str(path), None, "it is not a file")
        elif len(paths) > 1:
            yield Row(str(path), None, f"{GONE}{did_you_mean_path(path)}")
        else:
            raise UserError(f"{path} {GONE}{did_you_mean_path(path)}")


def _rows(files: Files, names: Sequence[str]) -> Iterator[Item]:
    yield from (Item(name, files, name) for name in names)


def _listed(path: Path, files: FolderFiles | ZipFiles, notes: list[str]) -> Iterator[Item | Row]:
    listing = files.list()
    note_ignored(listing, notes)
    note_links(listing, notes)
    yield from (Item(f"{path / entry.name}", files, entry.name) for entry in listing.images)
    yield from (Row(f"{path / name}", None, reason) for name, reason in listing.unreadable)


def opened(classifier: Classifier, item: Item) -> tuple[str, Tensor] | Row:
    """The name and pixels of an image, or why there are none."""
    try:
        return item.name, classifier.pixels(item.files.read(item.key))
    except OSError as error:
        return Row(item.name, None, why_unread(error))
    except ValueError as error:  # a table names a path with a null character
        return Row(item.name, None, f"cannot be read: {error}")
    except UserError as error:
        return Row(item.name, None, str(error).removeprefix("the image: "))
