"""The place where a data set lies, and the lists of names, classes and splits that it keeps beside its images."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path, PurePosixPath

from vitrail.data.files import ANNOTATED_NOT_FOUND, FolderFiles, Listing, ZipFiles
from vitrail.data.formats import is_image_name
from vitrail.data.sources.image_list import ImageList, counted, quoted
from vitrail.errors import UserError, os_errors_as

Tree = FolderFiles | ZipFiles


class Root:
    """A folder or a .zip archive, or a folder in one, where a data set may lie."""

    def __init__(self, files: Tree, path: str) -> None:
        self.files = files
        self.path = path  # as the user knows it

    @classmethod
    def at(cls, place: Path, follow: bool = True) -> Root:
        """Of a folder or an archive. Unless `follow`, links in a folder are left out."""
        full = str(place.absolute())
        zipped = not place.is_dir() and place.suffix.lower() == ".zip"
        return cls(ZipFiles(full) if zipped else FolderFiles(full, follow), str(place))

    @property
    def name(self) -> str:
        return PurePosixPath(Path(self.path).absolute().as_posix()).name

    @cached_property
    def listing(self) -> Listing:
        return self.files.list()

    def under(self, folder: str) -> Root:
        return Root(self.files.under(folder), f"{self.path}/{folder}") if folder else self

    def has(self, name: str) -> bool:
        """Whether there is such a file."""
        if isinstance(self.files, FolderFiles):
            return (Path(self.files.root) / name).is_file()
        try:
            self.files.read(name)
        except OSError:
            return False
        return True

    def has_all(self, title: str, files: Mapping[str, str]) -> bool:
        """Whether the files lie here that a data set comes with, name -> what each is for. Some without the others are
        an error."""
        there = [name for name in files if self.has(name)]
        for name, use in files.items():
            if there and name not in there:
                raise UserError(f"'{self.path}' is {title} without '{name}'{use}")
        return bool(there)

    def folders(self, inside: str = "") -> list[str]:
        """The names of the folders directly in a folder, which need not exist."""
        if isinstance(self.files, FolderFiles):
            return sorted(child.name for child in self._children(inside) if child.is_dir())
        return _direct(self.listing.folders, inside)

    def images(self, inside: str) -> list[str]:
        """The names of the images directly in a folder, which need not exist."""
        if isinstance(self.files, FolderFiles):
            return sorted(child.name for child in self._children(inside) if is_image_name(child.name))
        return _direct([entry.name for entry in self.listing.images], inside)

    def _children(self, inside: str) -> list[os.DirEntry[str]]:
        """Looked up without the rest of the tree, which may hold a million files and be no standard data set."""
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
        """The lines of a text file that have something on them."""
        return text_lines(self.read(name), self.where(name))


def _direct(names: list[str], inside: str) -> list[str]:
    start = f"{inside}/" if inside else ""
    inner = [name.removeprefix(start) for name in names if name.startswith(start)]
    return [name for name in inner if "/" not in name]


def text_lines(data: bytes, where: str) -> list[str]:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"{where} is not UTF-8 text") from None
    return [line.strip() for line in text.splitlines() if line.strip()]


def annotated(
    root: Root,
    folder: str,
    listed: dict[str, tuple[str, str]],
    classes: tuple[str, ...],
    notes: list[str],
) -> ImageList:
    """The images of `folder` that side files list, as name -> (split, class)."""
    images = {entry.name: entry for entry in root.listing.images if entry.name.startswith(f"{folder}/")}
    extra = sorted(images.keys() - listed.keys())
    if extra:
        notes.append(f"Ignored {counted(len(extra), 'image')} that the annotations do not name: {quoted(extra)}.")
    note_links(root.listing, notes)
    label_of = {name: (name,) for name in classes}  # one tuple for all images of a class
    present = sorted(images.keys() & listed.keys())
    if not present:
        raise UserError(f"'{root.path}/{folder}' has none of the {len(listed):,} images that the annotations name")
    return ImageList(
        root.files,
        [images[name] for name in present],
        [listed[name][0] for name in present],
        [label_of[listed[name][1]] for name in present],
        classes=classes,
        unreadable=unreadable_files(root.listing, listed.keys() - images.keys()),
    )


def unreadable_files(listing: Listing, absent: set[str]) -> list[tuple[str, str]]:
    """What the folder could not give, and what the annotations name and is not in it."""
    known = dict(listing.unreadable)
    return sorted({**dict.fromkeys(absent, ANNOTATED_NOT_FOUND), **known}.items())


def note_links(listing: Listing, notes: list[str]) -> None:
    for names, what in (
        (listing.outside, "Followed {} out of the data (--no-follow leaves them out): {}."),
        (listing.not_followed, "Left out {}, which --no-follow asked for: {}."),
    ):
        if names:
            notes.append(what.format(counted(len(names), "link"), quoted(names)))
