"""Images as files, in a folder or a .zip archive: list them, and read one by name."""

from __future__ import annotations

import copy
import os
import stat
import zipfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, Protocol

from vitrail.errors import UserError

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".jfif", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"})
MAX_FILE_BYTES = 500_000_000

_SYSTEM_FOLDERS = frozenset({"__MACOSX", "@eaDir"})


class Entry(NamedTuple):
    """One image file: its name under the root, size in bytes, and a stamp that changes when the content does."""

    name: str
    size: int
    stamp: int


@dataclass
class Listing:
    """What lies under a root, before anything is opened. Names are relative, with forward slashes."""

    images: list[Entry] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    unreadable: list[tuple[str, str]] = field(default_factory=list)  # (name, reason)
    hidden: int = 0  # dot-files, dot-folders and the folders operating systems leave behind
    others: int = 0  # files that do not have the name of an image
    relinked: int = 0  # links to folders that were already read

    def sort(self) -> Listing:
        """In an order that does not depend on the file system."""
        self.images.sort()
        self.folders.sort()
        self.unreadable.sort()
        return self


class Files(Protocol):
    """Encoded images by name. Cheap to pickle and safe to fork."""

    @property
    def identity(self) -> tuple[str, str]:
        """Where it is, and what changes when it is replaced as a whole."""
        ...

    def read(self, name: str) -> bytes:
        """The bytes of one file; raises OSError when they cannot be had."""
        ...


@dataclass(frozen=True)
class FolderFiles:
    root: str

    @property
    def identity(self) -> tuple[str, str]:
        return self.root, "folder"

    def read(self, name: str) -> bytes:
        with open(os.path.join(self.root, name), "rb") as file:  # noqa: PTH118, called for every sample
            if os.fstat(file.fileno()).st_size > MAX_FILE_BYTES:
                raise OSError(f"the file is larger than {MAX_FILE_BYTES:,} bytes")
            return file.read()

    def list(self) -> Listing:
        """Real folders come first and links after them, each real place once, so that loops of links end."""
        found, seen = Listing(), set[str]()
        queue, links = [""], list[str]()
        while queue or links:
            folder = queue.pop() if queue else links.pop(0)
            place = os.path.realpath(os.path.join(self.root, folder))  # noqa: PTH118
            if place in seen:
                found.relinked += 1
                continue
            seen.add(place)
            if folder:
                found.folders.append(folder)
            try:
                children = sorted(os.scandir(place), key=lambda child: child.name)
            except OSError as error:
                found.unreadable.append((folder or ".", f"the folder cannot be opened: {error.strerror}"))
                continue
            for child in children:
                name = f"{folder}/{child.name}" if folder else child.name
                if _is_hidden(child.name):
                    found.hidden += 1
                elif _is_folder(child):
                    (links if child.is_symlink() else queue).append(name)
                else:
                    _note_file(found, name, child)
        return found.sort()


def _is_folder(child: os.DirEntry[str]) -> bool:
    try:
        return child.is_dir()
    except OSError:  # a link to itself; opened as a file it says so
        return False


def _note_file(found: Listing, name: str, child: os.DirEntry[str]) -> None:
    if not is_image_name(name):
        found.others += 1
        return
    try:
        status = child.stat()
    except OSError as error:
        found.unreadable.append((name, f"the file cannot be found: {error.strerror}"))
        return
    if stat.S_ISREG(status.st_mode):
        found.images.append(Entry(name, status.st_size, status.st_mtime_ns))
    else:
        found.others += 1


class ZipFiles:
    """The files of an archive, under an inner folder if one is given. Member names never reach the file system."""

    def __init__(self, path: str, inside: str = "") -> None:
        self.path = path
        self.inside = inside
        self._open: tuple[int, zipfile.ZipFile] | None = None

    def under(self, folder: str) -> ZipFiles:
        other = copy.copy(self)
        other.inside = f"{self.inside}{folder}/"
        return other

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": None}

    @property
    def identity(self) -> tuple[str, str]:
        status = Path(self.path).stat()
        return f"{self.path}/{self.inside}", f"{status.st_size} {status.st_mtime_ns}"

    def _archive(self) -> zipfile.ZipFile:
        """One handle a process: a forked one would share, and so disturb, its parent's place in the file."""
        if self._open is None or self._open[0] != os.getpid():
            self._open = os.getpid(), zipfile.ZipFile(self.path)
        return self._open[1]

    def read(self, name: str) -> bytes:
        try:
            member = self._archive().getinfo(self.inside + name)
            if member.flag_bits & 0x1:
                raise OSError("it is encrypted")
            if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise OSError("its compression is not supported; use stored or deflated")
            if member.file_size > MAX_FILE_BYTES:
                raise OSError(f"it is larger than {MAX_FILE_BYTES:,} bytes")
            return self._archive().read(member)
        except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, RuntimeError, NotImplementedError) as error:
            raise OSError(f"the archive is damaged here ({error})") from None

    def list(self) -> Listing:
        found, folders = Listing(), set[str]()
        try:
            members = {member.filename: member for member in self._archive().infolist()}
        except (OSError, zipfile.BadZipFile, NotImplementedError, ValueError) as error:
            raise UserError(f"'{self.path}' cannot be read as a zip archive: {error}") from None
        for full_name, member in members.items():
            name = full_name.removeprefix(self.inside)
            if not full_name.startswith(self.inside) or not name:
                continue
            parts = name.split("/")
            if any(_is_hidden(part) for part in parts[:-1]) or parts[-1].startswith("."):
                found.hidden += not member.is_dir()
                continue
            folders.update("/".join(parts[:depth]) for depth in range(1, len(parts)))
            if member.is_dir():
                continue
            if is_image_name(name):
                found.images.append(Entry(name, member.file_size, member.CRC))
            else:
                found.others += 1
        found.folders.extend(folders)
        return found.sort()


def is_image_name(name: str) -> bool:
    return PurePosixPath(name).suffix.lower() in IMAGE_SUFFIXES


def _is_hidden(part: str) -> bool:
    return not part or part.startswith(".") or part in _SYSTEM_FOLDERS
