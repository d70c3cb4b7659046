"""The folder or archive of a data set, and its lists of names, classes and splits."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path, PurePosixPath

from vitrail.data.files import ANNOTATED_NOT_FOUND, FolderFiles, Listing, ZipFiles
from vitrail.data.formats import is_image_name
from vitrail.data.sources.data_source import DataSource, counted, quoted
from vitrail.errors import UserError, os_errors_as

Tree = FolderFiles | ZipFiles


class Root:
    """A folder, a .zip archive, or a folder inside one, that may hold a data set."""

    def __init__(self, files: Tree, path: str) -> None:
        self.files = files
        self.path = path  # as the user typed it

    @classmethod
    def at(cls, path: Path, follow: bool = True) -> Root:
        """Open a folder or a .zip archive. With `follow=False`, links in a folder are skipped."""
        full_path = str(path.absolute())
        zipped = not path.is_dir() and path.suffix.lower() == ".zip"
        return cls(ZipFiles(full_path) if zipped else FolderFiles(full_path, follow), str(path))

    @property
    def name(self) -> str:
        return PurePosixPath(Path(self.path).absolute().as_posix()).name

    @cached_property
    def listing(self) -> Listing:
        return self.files.list()

    def under(self, folder: str) -> Root:
        return Root(self.files.under(folder), f"{self.path}/{folder}") if folder else self

    def has(self, name: str) -> bool:
        """Whether the file exists."""
        if isinstance(self.files, FolderFiles):
            return (Path(self.files.root) / name).is_file()
        try:
            self.files.read(name)
        except OSError:
            return False
        return True

    def has_all(self, title: str, files: Mapping[str, str]) -> bool:
        """Whether all of `files` (name -> its purpose, for the message) exist. If only some do, that is an error."""
        present = [name for name in files if self.has(name)]
        for name, purpose in files.items():
            if present and name not in present:
                raise UserError(f"'{self.path}' looks like {title}, but '{name}' is missing{purpose}")
        return bool(present)

    def folders(self, inside: str = "") -> list[str]:
        """Return the names of the folders directly inside a folder; none if it does not exist."""
        if isinstance(self.files, FolderFiles):
            return sorted(child.name for child in self._children(inside) if child.is_dir())
        return _direct(self.listing.folders, inside)

    def images(self, inside: str) -> list[str]:
        """Return the names of the images directly inside a folder; none if it does not exist."""
        if isinstance(self.files, FolderFiles):
            return sorted(child.name for child in self._children(inside) if is_image_name(child.name))
        return _direct([entry.name for entry in self.listing.images], inside)

    def _children(self, inside: str) -> list[os.DirEntry[str]]:
        """List one folder only: the whole tree may have a million files and be no standard data set."""
        assert isinstance(self.files, FolderFiles)
        try:
            with os.scandir(Path(self.files.root) / inside) as children:
                return [child for child in children if not child.name.startswith(".")]
        except OSError:
            return []

    def where(self, name: str) -> str:
        return f"'{self.path}/{name}'"

    def read(self, name: str) -> bytes:
        with os_errors_as(f"{self.where(name)} cannot be read"):
            return self.files.read(name)

    def lines(self, name: str) -> list[str]:
        """Return the non-empty lines of a text file."""
        try:
            text = self.read(name).decode("utf-8-sig")
        except UnicodeDecodeError:
            raise UserError(f"{self.where(name)} is not UTF-8 text") from None
        return [line.strip() for line in text.splitlines() if line.strip()]


def _direct(names: list[str], inside: str) -> list[str]:
    start = f"{inside}/" if inside else ""
    inner = [name.removeprefix(start) for name in names if name.startswith(start)]
    return [name for name in inner if "/" not in name]


def annotated_images(
    root: Root,
    folder: str,
    annotations: dict[str, tuple[str, str]],
    classes: tuple[str, ...],
    notes: list[str],
) -> DataSource:
    """Return the images in `folder` that annotation files list, as name -> (split, class)."""
    images = {entry.name: entry for entry in root.listing.images if entry.name.startswith(f"{folder}/")}
    extra = sorted(images.keys() - annotations.keys())
    if extra:
        notes.append(f"Ignored {counted(len(extra), 'image')} not listed in the annotations: {quoted(extra)}.")
    note_links(root.listing, notes)
    label_of = {name: (name,) for name in classes}  # one tuple for all images of a class
    present = sorted(images.keys() & annotations.keys())
    if not present:
        raise UserError(f"'{root.path}/{folder}' has none of the {len(annotations):,} images listed in the annotations")
    return DataSource(
        root.files,
        [images[name] for name in present],
        [annotations[name][0] for name in present],
        [label_of[annotations[name][1]] for name in present],
        classes=classes,
        unreadable=unreadable_files(root.listing, annotations.keys() - images.keys()),
    )


def unreadable_files(listing: Listing, missing: set[str]) -> list[tuple[str, str]]:
    """Return unreadable files, and files listed in the annotations that do not exist."""
    return sorted({**dict.fromkeys(missing, ANNOTATED_NOT_FOUND), **dict(listing.unreadable)}.items())


def note_links(listing: Listing, notes: list[str]) -> None:
    for names, what in (
        (listing.outside, "Followed {} to files outside the data: {}. To skip links, pass --no-follow."),
        (listing.not_followed, "Skipped {} because of --no-follow: {}."),
    ):
        if names:
            notes.append(what.format(counted(len(names), "link"), quoted(names)))
