"""Image files in a folder or a .zip archive: list them, and read one by name."""

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
ANNOTATED_NOT_FOUND = "it is listed in the annotations, but the file does not exist"
PATH_NOT_FOUND = "does not exist"  # of a path of the user
# Reasons for a missing file begin with one of these; other reasons are for broken files.
NOT_FOUND = (FILE_NOT_FOUND, ANNOTATED_NOT_FOUND, PATH_NOT_FOUND)

_SYSTEM_FOLDERS = frozenset({"__MACOSX", "@eaDir"})
_SYSTEM_FILES = frozenset({"thumbs.db", "ehthumbs.db", "desktop.ini"})
_NOT_TEXT = re.compile(rb"[\x00-\x08\x0e-\x1a\x1c-\x1f]")
# vitrail writes runs, checks and explanations to folders with these files. The images in such folders are not data.
OUTPUT_FOLDERS = (
    frozenset({"config.toml", "metrics.jsonl", "model.safetensors"}),
    frozenset({"quarantine.csv", "report.json", "report.html"}),
    frozenset({"explain.html", "explain.json"}),
)
_CHUNK = 256  # files per task of a thread


class Entry(NamedTuple):
    """One image file: name under the root, size in bytes, and a number that changes with the content (mtime or CRC)."""

    name: str
    size: int
    stamp: int


@dataclass
class Listing:
    """The files and folders under a root, before any image is opened. Names are relative, with forward slashes.

    A file is an image if its name or its first bytes say so.
    """

    images: list[Entry] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    unreadable: list[tuple[str, str]] = field(default_factory=list)  # (name, reason); also unsupported formats
    hidden: int = 0  # dot-files, dot-folders and files of operating systems
    outputs: list[str] = field(default_factory=list)  # folders written by vitrail
    others: list[str] = field(default_factory=list)  # files that are not images
    unknown: list[str] = field(default_factory=list)  # unsupported images, and non-text files in `others`
    relinked: int = 0  # links to folders that are already listed, or that contain the root
    outside: list[str] = field(default_factory=list)  # links to files and folders outside the root
    not_followed: list[str] = field(default_factory=list)  # links, if links are not followed

    def sort(self) -> Listing:
        """Sort all lists, so that the order does not depend on the file system."""
        texts = self.folders, self.others, self.unknown, self.outside, self.not_followed
        for column in (self.images, self.unreadable, *texts):
            column.sort()
        return self

    def add_by_content(self, entry: Entry, head: bytes) -> None:
        """Add a file without an image extension, according to its first bytes."""
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
    """Return the bytes of a regular file. Pipes and devices, which may never end, raise OSError."""
    with open(path, "rb", opener=_without_waiting) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError("it is not a regular file")
        if status.st_size > MAX_FILE_BYTES:
            raise OSError(f"the file is larger than {MAX_FILE_BYTES:,} bytes")
        return file.read()


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


class Files(Protocol):
    """Encoded images by name. Cheap to pickle and safe to fork."""

    @property
    def identity(self) -> tuple[str, str]:
        """Where the files are, and a version that changes when an archive is replaced."""
        ...

    def read(self, name: str) -> bytes:
        """Return the bytes of one file; raise OSError if it cannot be read."""
        ...


@dataclass(frozen=True)
class FolderFiles:
    """The files of a folder."""

    root: str
    follow: bool = True  # follow links

    @property
    def identity(self) -> tuple[str, str]:
        return self.root, "folder"

    def under(self, folder: str) -> FolderFiles:
        return replace(self, root=os.path.join(self.root, folder))  # noqa: PTH118

    def read(self, name: str) -> bytes:
        return read_file(os.path.join(self.root, name))  # noqa: PTH118, called for every sample

    def list(self) -> Listing:
        """List all files. Real folders come before links and each real path is listed once, so link loops end."""
        listing, listed, top = Listing(), set[str](), os.path.realpath(self.root)
        queue, links = [""], list[str]()
        without_extension: list[Entry] = []
        real_paths: dict[str, str] = {}
        while queue or links:
            over_link = not queue
            folder = queue.pop() if queue else links.pop(0)
            real = os.path.realpath(os.path.join(self.root, folder))  # noqa: PTH118
            if real in listed or (folder and _is_in(top, real)):
                listing.relinked += 1
                continue
            listed.add(real)
            if folder:
                listing.folders.append(folder)
            if over_link and not _is_in(real, top):
                listing.outside.append(folder)
            try:
                children = sorted(os.scandir(real), key=lambda child: child.name)
            except OSError as error:
                listing.unreadable.append((folder or ".", f"the folder cannot be opened: {error_reason(error)}"))
                continue
            names = {child.name for child in children}
            if folder and any(files <= names for files in OUTPUT_FOLDERS):
                listing.outputs.append(listing.folders.pop())
                continue
            for child in children:
                name = f"{folder}/{child.name}" if folder else child.name
                is_link = child.is_symlink()
                if _is_hidden(child.name):
                    listing.hidden += 1
                elif is_link and not self.follow:
                    listing.not_followed.append(name)
                elif _is_folder(child):
                    (links if is_link else queue).append(name)
                else:
                    exists = _add_file(listing, without_extension, name, child)
                    if is_link and exists and not _is_in(_real_file(child.path, real_paths), top):
                        listing.outside.append(name)
        for entry, head in zip(without_extension, _heads(self.root, without_extension), strict=True):
            listing.add_by_content(entry, head)
        return listing.sort()


def read_error_reason(error: OSError) -> str:
    """Return why a file cannot be read."""
    missing = isinstance(error, FileNotFoundError | NotADirectoryError)
    return f"{FILE_NOT_FOUND if missing else 'cannot be read'}: {error_reason(error)}"


def _heads(root: str, entries: Sequence[Entry]) -> list[bytes]:
    """Return the first bytes of files; empty for a file that cannot be read."""

    def read(chunk: Sequence[Entry]) -> list[bytes]:
        return [_head(os.path.join(root, entry.name)) for entry in chunk]  # noqa: PTH118

    if not entries:
        return []
    with ThreadPoolExecutor() as pool:  # more threads than cores, because network reads wait
        chunks = pool.map(read, (entries[start : start + _CHUNK] for start in range(0, len(entries), _CHUNK)))
        return [head for chunk in chunks for head in chunk]


def _head(path: str) -> bytes:
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read(HEAD_BYTES) or b""
    except OSError:
        return b""


def _is_in(path: str, folder: str) -> bool:
    """Whether a real path is the folder or inside it."""
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)


def _is_folder(child: os.DirEntry[str]) -> bool:
    try:
        return child.is_dir()
    except OSError:  # a link to itself: reading it as a file gives the reason
        return False


def _add_file(listing: Listing, without_extension: list[Entry], name: str, child: os.DirEntry[str]) -> bool:
    """Add a file to the images, or to `without_extension` if it is not named like one. Return whether it exists."""
    try:
        status = child.stat()
    except OSError as error:
        if child.is_symlink():
            listing.unreadable.append((name, f"{FILE_NOT_FOUND}: a broken link to '{_target(child.path)}'"))
        else:
            listing.unreadable.append((name, read_error_reason(error)))
        return False
    if not stat.S_ISREG(status.st_mode):
        listing.others.append(name)
        return True
    entry = Entry(name, status.st_size, status.st_mtime_ns)
    (listing.images if is_image_name(name) else without_extension).append(entry)
    return True


def _real_file(link: str, known: dict[str, str]) -> str:
    """Return the real path of the target of a link. `known` caches the real paths of folders."""
    folder, name = os.path.split(os.path.join(os.path.dirname(link), os.readlink(link)))  # noqa: PTH115, PTH118, PTH120
    if folder not in known:
        known[folder] = os.path.realpath(folder)
    target = os.path.join(known[folder], name)  # noqa: PTH118
    return os.path.realpath(target) if os.path.islink(target) else target  # noqa: PTH114


def _target(path: str) -> str:
    try:
        return os.readlink(path)  # noqa: PTH115, the text of the link
    except OSError:
        return "?"


class ZipFiles:
    """The files of a .zip archive, or of a folder in it. Member names are never used as paths."""

    def __init__(self, path: str, inside: str = "") -> None:
        self.path = path
        self.inside = inside
        self._heads: dict[str, bytes] = {}  # of members without an image extension
        self._open: tuple[int, zipfile.ZipFile] | None = None

    def under(self, folder: str) -> ZipFiles:
        inner = copy.copy(self)
        inner.inside = f"{self.inside}{folder}/"
        return inner

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": None, "_heads": {}}

    @property
    def identity(self) -> tuple[str, str]:
        status = Path(self.path).stat()
        return f"{self.path}/{self.inside}", f"{status.st_size} {status.st_mtime_ns}"

    def _archive(self) -> zipfile.ZipFile:
        """Return the archive, opened once per process: a forked process would share the file position of its parent."""
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
        listing, folders = Listing(), set[str]()
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
                listing.hidden += not member.is_dir()
                continue
            folders.update("/".join(parts[:depth]) for depth in range(1, len(parts)))
            if member.is_dir():
                continue
            entry = Entry(name, member.file_size, member.CRC)
            if is_image_name(name):
                listing.images.append(entry)
            else:
                listing.add_by_content(entry, self._head(member))
        listing.folders.extend(folders)
        return listing.sort()

    def _head(self, member: zipfile.ZipInfo) -> bytes:
        if member.filename not in self._heads:
            try:
                with self._archive().open(member) as file:
                    self._heads[member.filename] = file.read(HEAD_BYTES)
            except Exception:  # encrypted, damaged or an unsupported compression: only its name is known
                self._heads[member.filename] = b""
        return self._heads[member.filename]


def _is_hidden(part: str) -> bool:
    return not part or part.startswith(".") or part in _SYSTEM_FOLDERS or part.lower() in _SYSTEM_FILES
