"""Images as files, in a folder or a .zip archive: list them, and read one by name."""

from __future__ import annotations

import copy
import os
import re
import stat
import zipfile
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from vitrail.data.formats import (
    EXTENSIONS,
    HEAD_BYTES,
    NON_IMAGE_EXTENSIONS,
    detect_format,
    extension_of,
    is_image_name,
    unsupported_format_reason,
)
from vitrail.errors import UserError, error_reason

MAX_FILE_BYTES = 500_000_000
FILE_NOT_FOUND = "the file cannot be found"
ANNOTATED_NOT_FOUND = "the annotations name it, and there is no such file"
PATH_NOT_FOUND = "does not exist"  # of a path that was given
# A reason that begins with one of these: there is no file, rather than a broken one.
NOT_FOUND = (FILE_NOT_FOUND, ANNOTATED_NOT_FOUND, PATH_NOT_FOUND)

_SYSTEM_FOLDERS = frozenset({"__MACOSX", "@eaDir"})
_SYSTEM_FILES = frozenset({"thumbs.db", "ehthumbs.db", "desktop.ini"})
_NOT_TEXT = re.compile(rb"[\x00-\x08\x0e-\x1a\x1c-\x1f]")
# Files of the folders that vitrail writes, each of which a run, a check or an explanation has; the pictures in them are
# no data.
OUTPUT_FOLDERS = (
    frozenset({"config.toml", "metrics.jsonl", "model.safetensors"}),
    frozenset({"quarantine.csv", "report.json", "report.html"}),
    frozenset({"explain.html", "explain.json"}),
)
_PART = 256  # files whose first bytes one thread reads at a time


class Entry(NamedTuple):
    """One image file: its name under the root, size in bytes, and a stamp that changes when the content does."""

    name: str
    size: int
    stamp: int


@dataclass
class Listing:
    """What lies under a root, before any image is opened. Names are relative, with forward slashes.

    A file is an image by its name, or else by its first bytes.
    """

    images: list[Entry] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    unreadable: list[tuple[str, str]] = field(default_factory=list)  # (name, reason); pictures of other formats, too
    hidden: int = 0  # dot-files, dot-folders and what operating systems leave behind
    outputs: list[str] = field(default_factory=list)  # folders that vitrail wrote: runs, checks, explanations
    others: list[str] = field(default_factory=list)  # files that are no pictures
    unknown: list[str] = field(default_factory=list)  # pictures of formats that are not read, and others but text
    relinked: int = 0  # links to folders that were already read, or around all of them
    outside: list[str] = field(default_factory=list)  # links to files and folders outside of the root
    not_followed: list[str] = field(default_factory=list)  # links, where none are to be followed

    def sort(self) -> Listing:
        """In an order that does not depend on the file system."""
        texts = self.folders, self.others, self.unknown, self.outside, self.not_followed
        for column in (self.images, self.unreadable, *texts):
            column.sort()
        return self

    def note(self, entry: Entry, head: bytes) -> None:
        """Sort a file without the name of an image by its first bytes."""
        kind = detect_format(head, entry.name)
        if kind in EXTENSIONS:
            self.images.append(entry)
        elif kind:
            self.unreadable.append((entry.name, unsupported_format_reason(kind)))
            self.unknown.append(entry.name)
        else:
            self.others.append(entry.name)
            if _NOT_TEXT.search(head) and extension_of(entry.name) not in NON_IMAGE_EXTENSIONS:
                self.unknown.append(entry.name)


def read_file(path: str | Path) -> bytes:
    """All of a regular file; nothing that would wait for a writer or never end."""
    with open(path, "rb", opener=_without_waiting) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError("it is no regular file")
        if status.st_size > MAX_FILE_BYTES:
            raise OSError(f"the file is larger than {MAX_FILE_BYTES:,} bytes")
        return file.read()


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


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
    follow: bool = True  # links that lie in it

    @property
    def identity(self) -> tuple[str, str]:
        return self.root, "folder"

    def under(self, folder: str) -> FolderFiles:
        return replace(self, root=os.path.join(self.root, folder))  # noqa: PTH118

    def read(self, name: str) -> bytes:
        return read_file(os.path.join(self.root, name))  # noqa: PTH118, called for every sample

    def list(self) -> Listing:
        """Real folders come first and links after them, each real place once, so that loops of links end."""
        found, seen, top = Listing(), set[str](), os.path.realpath(self.root)
        queue, links = [""], list[str]()
        unsorted: list[Entry] = []
        real: dict[str, str] = {}
        while queue or links:
            over_link = not queue
            folder = queue.pop() if queue else links.pop(0)
            place = os.path.realpath(os.path.join(self.root, folder))  # noqa: PTH118
            if place in seen or (folder and _is_in(top, place)):
                found.relinked += 1
                continue
            seen.add(place)
            if folder:
                found.folders.append(folder)
            if over_link and not _is_in(place, top):
                found.outside.append(folder)
            try:
                children = sorted(os.scandir(place), key=lambda child: child.name)
            except OSError as error:
                found.unreadable.append((folder or ".", f"the folder cannot be opened: {error_reason(error)}"))
                continue
            names = {child.name for child in children}
            if folder and any(own <= names for own in OUTPUT_FOLDERS):
                found.outputs.append(found.folders.pop())
                continue
            for child in children:
                name = f"{folder}/{child.name}" if folder else child.name
                linked = child.is_symlink()
                if _is_hidden(child.name):
                    found.hidden += 1
                elif linked and not self.follow:
                    found.not_followed.append(name)
                elif _is_folder(child):
                    (links if linked else queue).append(name)
                else:
                    there = _note_file(found, unsorted, name, child)
                    if linked and there and not _is_in(_real_file(child.path, real), top):
                        found.outside.append(name)
        for entry, head in zip(unsorted, _heads(self.root, unsorted), strict=True):
            found.note(entry, head)
        return found.sort()


def read_error_reason(error: OSError) -> str:
    """Why the bytes of a file cannot be had."""
    gone = isinstance(error, FileNotFoundError | NotADirectoryError)
    return f"{FILE_NOT_FOUND if gone else 'cannot be read'}: {error_reason(error)}"


def _heads(root: str, entries: Sequence[Entry]) -> list[bytes]:
    """The first bytes of files; empty of one that cannot be read, which is then known by its name alone."""

    def read(part: Sequence[Entry]) -> list[bytes]:
        return [_head(os.path.join(root, entry.name)) for entry in part]  # noqa: PTH118

    if not entries:
        return []
    with ThreadPoolExecutor() as pool:  # more threads than cores: on a network each read is a wait
        parts = pool.map(read, (entries[start : start + _PART] for start in range(0, len(entries), _PART)))
        return [head for part in parts for head in part]


def _head(path: str) -> bytes:
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read(HEAD_BYTES) or b""
    except OSError:
        return b""


def _is_in(place: str, folder: str) -> bool:
    """Whether a real path is a folder or lies in it."""
    return place == folder or place.startswith(folder.rstrip(os.sep) + os.sep)


def _is_folder(child: os.DirEntry[str]) -> bool:
    try:
        return child.is_dir()
    except OSError:  # a link to itself; opened as a file it says so
        return False


def _note_file(found: Listing, unsorted: list[Entry], name: str, child: os.DirEntry[str]) -> bool:
    """An image by its name goes to the others of its kind, any other file to the unsorted ones. Returns whether there
    is a file."""
    try:
        status = child.stat()
    except OSError as error:
        if child.is_symlink():
            found.unreadable.append((name, f"{FILE_NOT_FOUND}: a broken link to '{_target(child.path)}'"))
        else:
            found.unreadable.append((name, read_error_reason(error)))
        return False
    if not stat.S_ISREG(status.st_mode):
        found.others.append(name)
        return True
    entry = Entry(name, status.st_size, status.st_mtime_ns)
    (found.images if is_image_name(name) else unsorted).append(entry)
    return True


def _real_file(link: str, known: dict[str, str]) -> str:
    """The real path of the file that a link leads to; `known` are real paths of folders, of which links share few."""
    folder, name = os.path.split(os.path.join(os.path.dirname(link), os.readlink(link)))  # noqa: PTH115, PTH118, PTH120
    if folder not in known:
        known[folder] = os.path.realpath(folder)
    target = os.path.join(known[folder], name)  # noqa: PTH118
    return os.path.realpath(target) if os.path.islink(target) else target  # noqa: PTH114


def _target(path: str) -> str:
    try:
        return os.readlink(path)  # noqa: PTH115, it shows what is written in the link
    except OSError:
        return "?"


class ZipFiles:
    """The files of an archive, under an inner folder if one is given. Member names never reach the file system."""

    def __init__(self, path: str, inside: str = "") -> None:
        self.path = path
        self.inside = inside
        self._heads: dict[str, bytes] = {}  # of members without the name of an image
        self._open: tuple[int, zipfile.ZipFile] | None = None

    def under(self, folder: str) -> ZipFiles:
        other = copy.copy(self)
        other.inside = f"{self.inside}{folder}/"
        return other

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": None, "_heads": {}}

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
            if any(_is_hidden(part) for part in parts[:-1]) or (parts[-1] and _is_hidden(parts[-1])):
                found.hidden += not member.is_dir()
                continue
            folders.update("/".join(parts[:depth]) for depth in range(1, len(parts)))
            if member.is_dir():
                continue
            entry = Entry(name, member.file_size, member.CRC)
            if is_image_name(name):
                found.images.append(entry)
            else:
                found.note(entry, self._head(member))
        found.folders.extend(folders)
        return found.sort()

    def _head(self, member: zipfile.ZipInfo) -> bytes:
        if member.filename not in self._heads:
            try:
                with self._archive().open(member) as file:
                    self._heads[member.filename] = file.read(HEAD_BYTES)
            except Exception:  # encrypted, damaged or compressed in a way of its own: known by its name alone
                self._heads[member.filename] = b""
        return self._heads[member.filename]


def _is_hidden(part: str) -> bool:
    return not part or part.startswith(".") or part in _SYSTEM_FOLDERS or part.lower() in _SYSTEM_FILES
