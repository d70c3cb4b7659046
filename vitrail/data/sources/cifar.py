"""CIFAR-10 and CIFAR-100 as they are published: binary or pickled, in a folder, a .zip archive or their .tar.gz.

The versions differ in the names of their files and in the bytes of a batch; all else is shared. An image is bare
pixels, 32x32, one colour after the other; it is given as a BMP file, which holds the same pixels behind a header.
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
from vitrail.data.sources.cifarpickle import byte_rows, names_in, numbers_in, plain_values
from vitrail.data.sources.image_list import ImageList, quoted
from vitrail.data.sources.root import Root, Tree
from vitrail.errors import UserError, os_errors_as

SIDE = 32
PIXELS = 3 * SIDE * SIDE
BMP_HEADER = struct.pack("<2sIHHI", b"BM", 54 + PIXELS, 0, 0, 54) + struct.pack(
    "<IiiHHIIiiII", 40, SIDE, SIDE, 1, 24, 0, PIXELS, 2835, 2835, 0, 0
)
MAX_MEMBERS = 100  # of a .tar.gz, which has nine
SIZES = {"train": 50_000, "test": 10_000}


@dataclass(frozen=True)
class Version:
    title: str
    kind: str
    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    meta: str  # names the classes
    label_bytes: int = 0  # in front of the pixels of each image, the last of them is used; none: the files are pickles
    key: str = ""  # what pickles call a label

    @property
    def batches(self) -> dict[str, str]:
        return {**dict.fromkeys(self.train, "train"), **dict.fromkeys(self.test, "test")}

    @property
    def step(self) -> int:
        """The bytes of a label and an image."""
        return self.label_bytes + PIXELS


_FIVE = tuple(f"data_batch_{number}" for number in range(1, 6))
_FIVE_BIN = tuple(f"{name}.bin" for name in _FIVE)
VERSIONS = (
    Version("CIFAR-10", "binary", "cifar-10-batches-bin", _FIVE_BIN, ("test_batch.bin",), "batches.meta.txt", 1),
    Version("CIFAR-10", "Python", "cifar-10-batches-py", _FIVE, ("test_batch",), "batches.meta", key="label"),
    Version("CIFAR-100", "binary", "cifar-100-binary", ("train.bin",), ("test.bin",), "fine_label_names.txt", 2),
    Version("CIFAR-100", "Python", "cifar-100-python", ("train",), ("test",), "meta", key="fine_label"),
)


def read_cifar(root: Root, notes: list[str]) -> ImageList | None:
    for version in VERSIONS:
        batches = [name for name in version.batches if root.has(name)]
        if batches and (root.has(version.meta) or root.name == version.folder):
            return _image_list(root, version, batches, notes)
    return None


def is_tar(place: Path) -> bool:
    return place.name.lower().endswith((".tar", ".tar.gz", ".tgz"))


def read_cifar_tar(place: Path, notes: list[str]) -> ImageList | None:
    """From cifar-10-binary.tar.gz and the like; nothing for any other archive."""
    version = _version_in(place)
    if version is None:
        return None
    files = TarFiles(str(place.absolute()), version.folder)
    root = Root(files, str(place))  # type: ignore[arg-type]  # of which files are read by name, and nothing is listed
    with os_errors_as(f"'{place}' cannot be read"):
        batches = [name for name in version.batches if name in files.members()]
    if not batches:
        raise UserError(f"'{place}' has the folder of {version.title}, and none of its files")
    found = _image_list(root, version, batches, notes)
    files.forget()
    return found


def _version_in(place: Path) -> Version | None:
    """Seen from the first members, which is all that is unpacked of a foreign archive."""
    try:
        with tarfile.open(place, "r|*") as archive:
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


def _image_list(root: Root, version: Version, batches: list[str], notes: list[str]) -> ImageList:
    notes.append(f"Read as {version.title} in its original layout, the {version.kind} version.")
    classes = _classes(root, version)
    files = CifarFiles(root.files, version)
    found = ImageList(files, [], [], [], classes=classes)
    label_of = [(name,) for name in classes]
    for name in batches:
        where = root.where(name)
        labels = files.load(name, root.read(name), where)
        if len(labels) and max(labels) >= len(classes):
            raise UserError(f"{where} has the label {max(labels)}, and {version.meta} names {len(classes)} classes")
        file = Path(root.files.root) / name if isinstance(root.files, FolderFiles) else Path(root.files.path)
        changed = file.stat().st_mtime_ns
        found.entries.extend(Entry(f"{name}#{row}", len(BMP_HEADER) + PIXELS, changed) for row in range(len(labels)))
        found.splits.extend([version.batches[name]] * len(labels))
        found.labels.extend(label_of[label] for label in labels)
    absent = [name for name in version.batches if name not in batches]
    if absent:
        notes.append(f"Missing from {version.title}: {quoted(absent, 6)}.")
    for split, size in SIZES.items():
        number = found.splits.count(split)
        if number not in (0, size):
            notes.append(f"The {split} split has {number:,} images, and that of {version.title} {size:,}.")
    if version.title == "CIFAR-100":
        notes.append("The labels are the 100 fine ones; the 20 coarse ones of CIFAR-100 are not used.")
    return found


def _classes(root: Root, version: Version) -> tuple[str, ...]:
    where = root.where(version.meta)
    if not root.has(version.meta):
        raise UserError(f"{where} is missing, which names the classes of {version.title}")
    if version.label_bytes:
        names = root.lines(version.meta)
    else:
        names = names_in(plain_values(root.read(version.meta), where), f"{version.key}_names", where)
    if len(names) < 2 or len(set(names)) < len(names):
        raise UserError(f"{where} does not name the classes of {version.title}")
    return tuple(names)


class CifarFiles:
    """Images by name, `<batch>#<row>`.

    Of an unpacked binary version each is read where it lies. Other batches are kept in memory, and loaded anew in a
    process that gets a pickled copy.
    """

    def __init__(self, holder: Tree | TarFiles, version: Version) -> None:
        self.holder, self.version = holder, version
        self.folder: Path | None = None  # where images can be read one by one
        if isinstance(holder, FolderFiles) and version.label_bytes:
            self.folder = Path(holder.root)
        self.pixels: dict[str, np.ndarray] = {}  # batch -> uint8 (n, 3072)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "pixels": {}}

    @property
    def identity(self) -> tuple[str, str]:
        return self.holder.identity

    def load(self, batch: str, data: bytes, where: str) -> list[int]:
        """Take the pixels out of the bytes of a batch, unless they are read where they lie; returns the labels."""
        pixels, labels = read_batch(data, self.version, where)
        if not self.folder:
            self.pixels[batch] = pixels
        return labels

    def read(self, name: str) -> bytes:
        batch, _, row = name.rpartition("#")
        if batch not in self.version.batches or not row.isdecimal() or len(row) > 9:
            raise OSError("there is no such image")
        if self.folder:
            with open(self.folder / batch, "rb") as file:
                file.seek(int(row) * self.version.step + self.version.label_bytes)
                pixels = file.read(PIXELS)
            if len(pixels) < PIXELS:
                raise OSError("the file ends too early")
            return bmp(pixels)
        if batch not in self.pixels:
            try:
                self.load(batch, self.holder.read(batch), f"'{batch}'")
            except UserError as error:
                raise OSError(str(error)) from None
        if int(row) >= len(self.pixels[batch]):
            raise OSError("there is no such row")
        return bmp(self.pixels[batch][int(row)].tobytes())


def bmp(pixels: bytes) -> bytes:
    """A BMP file of red, green and blue planes: it has the last row first, and blue before green before red."""
    planes = np.frombuffer(pixels, np.uint8).reshape(3, SIDE, SIDE)
    return BMP_HEADER + planes[::-1, ::-1].transpose(1, 2, 0).tobytes()


def read_batch(data: bytes, version: Version, where: str) -> tuple[np.ndarray, list[int]]:
    """The pixels (n, 3072) and labels of one file."""
    if not version.label_bytes:
        values = plain_values(data, where)
        pixels, labels = byte_rows(values, "data", PIXELS, where), numbers_in(values, f"{version.key}s", where)
        if len(pixels) != len(labels):
            raise UserError(f"{where} has {len(pixels):,} images and {len(labels):,} labels")
        return pixels, labels
    if not data or len(data) % version.step:
        raise UserError(
            f"{where} has {len(data):,} bytes, which is no whole number of images of {version.step:,} bytes"
        )
    rows = np.frombuffer(data, np.uint8).reshape(-1, version.step)
    return rows[:, version.label_bytes :], rows[:, version.label_bytes - 1].tolist()


class TarFiles:
    """The files in one folder of an archive. They are read into memory in one go; no name is ever a path."""

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
            raise OSError("the archive does not hold it")
        return self.members()[name]

    def members(self) -> dict[str, bytes]:
        self._members = self._members or self._load()
        return self._members

    def forget(self) -> None:
        self._members = {}

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
