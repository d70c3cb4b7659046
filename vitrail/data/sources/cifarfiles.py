"""The files of CIFAR: labels and pixels of a batch, and single images out of it as BMP files.

The images are bare pixels, 32x32, one colour after the other. A BMP file holds the same pixels behind a header.
"""

from __future__ import annotations

import struct
import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import numpy as np

from vitrail.data.files import MAX_FILE_BYTES
from vitrail.data.sources.cifarpickle import plain_values
from vitrail.errors import UserError

SIDE = 32
PIXELS = 3 * SIDE * SIDE
BMP_HEADER = struct.pack("<2sIHHI", b"BM", 54 + PIXELS, 0, 0, 54) + struct.pack(
    "<IiiHHIIiiII", 40, SIDE, SIDE, 1, 24, 0, PIXELS, 2835, 2835, 0, 0
)
MAX_MEMBERS = 100  # of a .tar.gz, which has nine


@dataclass(frozen=True)
class Version:
    title: str
    kind: str
    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    meta: str  # names the classes
    label_bytes: int  # in front of the pixels of each image, the last of them is used; none: the files are pickles

    @property
    def batches(self) -> dict[str, str]:
        return {**dict.fromkeys(self.train, "train"), **dict.fromkeys(self.test, "test")}

    @property
    def step(self) -> int:
        """The bytes of a label and an image."""
        return self.label_bytes + PIXELS

    @property
    def label_key(self) -> str:
        return "labels" if self.title == "CIFAR-10" else "fine_labels"


class Members(Protocol):
    """Something that reads one of the files by name, and raises OSError where there is none. Can be pickled."""

    @property
    def identity(self) -> tuple[str, str]: ...

    def read(self, name: str) -> bytes: ...


class TarMembers:
    """The files of a CIFAR archive. They are read into memory in one go, once in a process; no name is ever a path."""

    def __init__(self, path: str, folder: str) -> None:
        self.path, self.folder = path, folder
        self._data: dict[str, bytes] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_data": None}

    @property
    def identity(self) -> tuple[str, str]:
        status = Path(self.path).stat()
        return self.path, f"{status.st_size} {status.st_mtime_ns}"

    def names(self) -> set[str]:
        return set(self._loaded())

    def read(self, name: str) -> bytes:
        if name not in self._loaded():
            raise OSError("the archive does not hold it")
        return self._loaded()[name]

    def drop(self) -> None:
        """Forget the files, of which the pixels have been taken."""
        self._data = None

    def _loaded(self) -> dict[str, bytes]:
        if self._data is None:
            self._data = self._load()
        return self._data

    def _load(self) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        room = MAX_FILE_BYTES
        try:
            with tarfile.open(self.path, "r|*") as archive:
                for number, member in enumerate(archive):
                    room -= member.size
                    if room < 0 or member.size < 0 or number == MAX_MEMBERS:
                        raise OSError("it holds more than CIFAR does")
                    name = PurePosixPath(member.name)
                    file = archive.extractfile(member) if member.isreg() and name.parent.name == self.folder else None
                    if file is not None:
                        found[name.name] = file.read()
        except (tarfile.TarError, EOFError, zlib.error) as error:
            raise OSError(f"the archive is damaged ({error})") from None
        return found


@dataclass(frozen=True)
class StoredPixels:
    """Batches of the binary version, of which each image is read where it lies."""

    root: str
    version: Version

    @property
    def identity(self) -> tuple[str, str]:
        return self.root, self.version.folder

    def read(self, name: str) -> bytes:
        batch, row = _batch_and_row(name, self.version)
        with open(Path(self.root) / batch, "rb") as file:
            file.seek(row * self.version.step + self.version.label_bytes)
            data = file.read(PIXELS)
        if len(data) < PIXELS:
            raise OSError("the file ends too early")
        return data


class LoadedPixels:
    """Batches that have to be unpacked first: in memory, and loaded anew in a process that gets a pickled copy."""

    def __init__(self, members: Members, version: Version) -> None:
        self.members, self.version = members, version
        self.batches: dict[str, np.ndarray] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "batches": {}}

    @property
    def identity(self) -> tuple[str, str]:
        return self.members.identity

    def read(self, name: str) -> bytes:
        batch, row = _batch_and_row(name, self.version)
        if batch not in self.batches:
            try:
                self.batches[batch] = read_batch(self.members.read(batch), self.version, f"'{batch}'")[0]
            except UserError as error:
                raise OSError(str(error)) from None
        if row >= len(self.batches[batch]):
            raise OSError("there is no such row")
        return self.batches[batch][row].tobytes()


def _batch_and_row(name: str, version: Version) -> tuple[str, int]:
    batch, _, row = name.rpartition("#")
    if batch not in version.batches or not row.isdecimal() or len(row) > 9:
        raise OSError("there is no such image")
    return batch, int(row)


@dataclass(frozen=True, eq=False)
class CifarFiles:
    """Images by name, `<batch>#<row>`."""

    pixels: StoredPixels | LoadedPixels

    @property
    def identity(self) -> tuple[str, str]:
        return self.pixels.identity

    def read(self, name: str) -> bytes:
        return bmp(self.pixels.read(name))


def bmp(pixels: bytes) -> bytes:
    """A BMP file of red, green and blue planes: it has the last row first, and blue before green before red."""
    planes = np.frombuffer(pixels, np.uint8).reshape(3, SIDE, SIDE)
    return BMP_HEADER + planes[::-1, ::-1].transpose(1, 2, 0).tobytes()


def read_batch(data: bytes, version: Version, where: str) -> tuple[np.ndarray, list[int]]:
    """The pixels (n, 3072) and labels of one file."""
    if not version.label_bytes:
        values = plain_values(data, where)
        pixels, labels = values.bytes("data", PIXELS), values.numbers(version.label_key)
        if len(pixels) != len(labels):
            raise UserError(f"{where} has {len(pixels):,} images and {len(labels):,} labels")
        return pixels, labels
    if not data or len(data) % version.step:
        raise UserError(
            f"{where} has {len(data):,} bytes, which is no whole number of images of {version.step:,} bytes"
        )
    rows = np.frombuffer(data, np.uint8).reshape(-1, version.step)
    return rows[:, version.label_bytes :], rows[:, version.label_bytes - 1].tolist()
