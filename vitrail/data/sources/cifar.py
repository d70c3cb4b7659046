"""CIFAR-10 and CIFAR-100 as published: the binary or the Python version, in a folder, a .zip or their .tar.gz archive.

The versions differ in file names and in the bytes of a batch. An image is 32x32 raw pixels, stored as three colour
planes. It is returned as a BMP file: the same pixels with a header.
"""

from __future__ import annotations

import struct
import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from vitrail.data.files import MAX_FILE_BYTES, Entry, FolderFiles
from vitrail.data.sources.cifarpickle import byte_rows, load_pickle, names_in, numbers_in
from vitrail.data.sources.data_source import DataSource, quoted
from vitrail.data.sources.root import Root, Tree
from vitrail.errors import UserError, os_errors_as

SIDE = 32
PIXELS = 3 * SIDE * SIDE
BMP_HEADER = struct.pack("<2sIHHI", b"BM", 54 + PIXELS, 0, 0, 54) + struct.pack(
    "<IiiHHIIiiII", 40, SIDE, SIDE, 1, 24, 0, PIXELS, 2835, 2835, 0, 0
)
MAX_MEMBERS = 100  # of a .tar.gz archive; the published ones have nine
SIZES = {"train": 50_000, "test": 10_000}


@dataclass(frozen=True)
class Version:
    """The files of one published version."""

    title: str
    kind: str
    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    meta: str  # the file with the class names
    label_bytes: int = 0  # before the pixels of each image, the last one is used; 0: the files are pickles
    key: str = ""  # of the labels in pickles

    @property
    def batches(self) -> dict[str, str]:
        return {**dict.fromkeys(self.train, "train"), **dict.fromkeys(self.test, "test")}

    @property
    def row_bytes(self) -> int:
        """The size of a label and an image."""
        return self.label_bytes + PIXELS


_FIVE = tuple(f"data_batch_{number}" for number in range(1, 6))
_FIVE_BIN = tuple(f"{name}.bin" for name in _FIVE)
VERSIONS = (
    Version("CIFAR-10", "binary", "cifar-10-batches-bin", _FIVE_BIN, ("test_batch.bin",), "batches.meta.txt", 1),
    Version("CIFAR-10", "Python", "cifar-10-batches-py", _FIVE, ("test_batch",), "batches.meta", key="label"),
    Version("CIFAR-100", "binary", "cifar-100-binary", ("train.bin",), ("test.bin",), "fine_label_names.txt", 2),
    Version("CIFAR-100", "Python", "cifar-100-python", ("train",), ("test",), "meta", key="fine_label"),
)


def read_cifar(root: Root, notes: list[str]) -> DataSource | None:
    """Read a folder or .zip archive of CIFAR; None if it is not one."""
    for version in VERSIONS:
        batches = [name for name in version.batches if root.has(name)]
        if batches and (root.has(version.meta) or root.name == version.folder):
            return _data_source(root, version, batches, notes)
    return None


def is_tar(path: Path) -> bool:
    return path.name.lower().endswith((".tar", ".tar.gz", ".tgz"))


def read_cifar_tar(path: Path, notes: list[str]) -> DataSource | None:
    """Read cifar-10-binary.tar.gz and similar archives; None for any other archive."""
    version = _version_in(path)
    if version is None:
        return None
    files = TarFiles(str(path.absolute()), version.folder)
    root = Root(files, str(path))  # type: ignore[arg-type]  # only reads files by name
    with os_errors_as(f"'{path}' cannot be read"):
        batches = [name for name in version.batches if name in files.members()]
    if not batches:
        raise UserError(f"'{path}' has a folder of {version.title}, but none of its files")
    images = _data_source(root, version, batches, notes)
    files.clear()
    return images


def _version_in(path: Path) -> Version | None:
    """Return the version in an archive. Only the first members are read, so other archives are not unpacked."""
    try:
        with tarfile.open(path, "r|*") as archive:
            for _ in range(3):
                member = archive.next()
                parts = PurePosixPath(member.name).parts if member else ()
                for version in VERSIONS:
                    if version.folder in parts:
                        return version
                if member is None or member.size > MAX_FILE_BYTES:
                    break
    except (OSError, tarfile.TarError, EOFError, zlib.error):
        pass
    return None


def _data_source(root: Root, version: Version, batches: list[str], notes: list[str]) -> DataSource:
    notes.append(f"Read as {version.title} in its original layout, the {version.kind} version.")
    classes = _classes(root, version)
    files = CifarFiles(root.files, version)
    images = DataSource(files, [], [], [], classes=classes)
    label_of = [(name,) for name in classes]
    for name in batches:
        where = root.where(name)
        labels = files.load(name, root.read(name), where)
        if len(labels) and max(labels) >= len(classes):
            raise UserError(f"{where} has the label {max(labels)}, but {version.meta} has only {len(classes)} classes")
        file = Path(root.files.root) / name if isinstance(root.files, FolderFiles) else Path(root.files.path)
        stamp = file.stat().st_mtime_ns
        images.entries.extend(Entry(f"{name}#{row}", len(BMP_HEADER) + PIXELS, stamp) for row in range(len(labels)))
        images.splits.extend([version.batches[name]] * len(labels))
        images.labels.extend(label_of[label] for label in labels)
    missing = [name for name in version.batches if name not in batches]
    if missing:
        notes.append(f"Missing files of {version.title}: {quoted(missing, 6)}.")
    for split, size in SIZES.items():
        number = images.splits.count(split)
        if number not in (0, size):
            notes.append(f"The {split} split has {number:,} images; the published one has {size:,}.")
    if version.title == "CIFAR-100":
        notes.append("The labels are the 100 fine classes; the 20 coarse classes are not used.")
    return images


def _classes(root: Root, version: Version) -> tuple[str, ...]:
    where = root.where(version.meta)
    if not root.has(version.meta):
        raise UserError(f"{where} is missing; it has the class names of {version.title}")
    if version.label_bytes:
        names = root.lines(version.meta)
    else:
        names = names_in(load_pickle(root.read(version.meta), where), f"{version.key}_names", where)
    if len(names) < 2 or len(set(names)) < len(names):
        raise UserError(f"{where} must list the class names of {version.title}, each once")
    return tuple(names)


class CifarFiles:
    """Images by name, `<batch>#<row>`.

    Images of the binary version in a folder are read from their file one by one. Other batches are kept in memory; a
    process that gets a pickled copy loads them again.
    """

    def __init__(self, files: Tree | TarFiles, version: Version) -> None:
        self.files, self.version = files, version
        self.folder: Path | None = None  # if images can be read one by one
        if isinstance(files, FolderFiles) and version.label_bytes:
            self.folder = Path(files.root)
        self.pixels: dict[str, np.ndarray] = {}  # batch -> uint8 (n, 3072)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "pixels": {}}

    @property
    def identity(self) -> tuple[str, str]:
        return self.files.identity

    def load(self, batch: str, data: bytes, where: str) -> list[int]:
        """Keep the pixels of a batch in memory, unless images are read one by one; return the labels."""
        pixels, labels = read_batch(data, self.version, where)
        if not self.folder:
            self.pixels[batch] = pixels
        return labels

    def read(self, name: str) -> bytes:
        batch, _, row = name.rpartition("#")
        if batch not in self.version.batches or not row.isdecimal() or len(row) > 9:
            raise OSError("no such image")
        if self.folder:
            with open(self.folder / batch, "rb") as file:
                file.seek(int(row) * self.version.row_bytes + self.version.label_bytes)
                pixels = file.read(PIXELS)
            if len(pixels) < PIXELS:
                raise OSError("the file ends too early")
            return bmp(pixels)
        if batch not in self.pixels:
            try:
                self.load(batch, self.files.read(batch), f"'{batch}'")
            except UserError as error:
                raise OSError(str(error)) from None
        if int(row) >= len(self.pixels[batch]):
            raise OSError("no such row")
        return bmp(self.pixels[batch][int(row)].tobytes())


def bmp(pixels: bytes) -> bytes:
    """Return a BMP file of red, green and blue planes. BMP stores the last row first, in the order blue, green, red."""
    planes = np.frombuffer(pixels, np.uint8).reshape(3, SIDE, SIDE)
    return BMP_HEADER + planes[::-1, ::-1].transpose(1, 2, 0).tobytes()


def read_batch(data: bytes, version: Version, where: str) -> tuple[np.ndarray, list[int]]:
    """Return the pixels, uint8 (n, 3072), and labels of one file."""
    if not version.label_bytes:
        values = load_pickle(data, where)
        pixels, labels = byte_rows(values, "data", PIXELS, where), numbers_in(values, f"{version.key}s", where)
        if len(pixels) != len(labels):
            raise UserError(f"{where} has {len(pixels):,} images and {len(labels):,} labels")
        return pixels, labels
    if not data or len(data) % version.row_bytes:
        raise UserError(
            f"{where} has {len(data):,} bytes, which is not a multiple of {version.row_bytes:,}, the size of an image"
        )
    rows = np.frombuffer(data, np.uint8).reshape(-1, version.row_bytes)
    return rows[:, version.label_bytes :], rows[:, version.label_bytes - 1].tolist()


class TarFiles:
    """The files in one folder of a tar archive, read into memory at once. Member names are never used as paths."""

    def __init__(self, path: str, folder: str) -> None:
        self.path, self.folder = path, folder
        self._members: dict[str, bytes] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_members": {}}

    @property
    def identity(self) -> tuple[str, str]:
        status = Path(self.path).stat()
        return self.path, f"{status.st_size} {status.st_mtime_ns}"

    def read(self, name: str) -> bytes:
        if name not in self.members():
            raise OSError("it is not in the archive")
        return self.members()[name]

    def members(self) -> dict[str, bytes]:
        self._members = self._members or self._load()
        return self._members

    def clear(self) -> None:
        self._members = {}

    def _load(self) -> dict[str, bytes]:
        contents: dict[str, bytes] = {}
        room = MAX_FILE_BYTES  # left for members
        try:
            with tarfile.open(self.path, "r|*") as archive:
                for number, member in enumerate(archive):
                    room -= member.size
                    if room < 0 or member.size < 0 or number == MAX_MEMBERS:
                        raise OSError("it has more or larger files than CIFAR")
                    name = PurePosixPath(member.name)
                    file = archive.extractfile(member) if member.isreg() and name.parent.name == self.folder else None
                    if file is not None:
                        contents[name.name] = file.read()
        except (tarfile.TarError, EOFError, zlib.error) as error:
            raise OSError(f"the archive is damaged ({error})") from None
        return contents
