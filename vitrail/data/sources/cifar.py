"""CIFAR-10 and CIFAR-100 as they are published, in the binary and the Python version, unpacked or in their .tar.gz."""

from __future__ import annotations

import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from vitrail.data.files import MAX_FILE_BYTES, Entry, FolderFiles
from vitrail.data.sources.catalogue import Catalogue, some
from vitrail.data.sources.cifarfiles import (
    BMP_HEADER,
    PIXELS,
    CifarFiles,
    LoadedPixels,
    Members,
    StoredPixels,
    TarMembers,
    Version,
    read_batch,
)
from vitrail.data.sources.cifarpickle import plain_values
from vitrail.data.sources.sidefiles import Root, Tree, text_lines
from vitrail.errors import UserError

SIZES = {"train": 50_000, "test": 10_000}
_FIVE = tuple(f"data_batch_{number}" for number in range(1, 6))
_FIVE_BIN = tuple(f"{name}.bin" for name in _FIVE)
VERSIONS = (
    Version("CIFAR-10", "binary", "cifar-10-batches-bin", _FIVE_BIN, ("test_batch.bin",), "batches.meta.txt", 1),
    Version("CIFAR-10", "Python", "cifar-10-batches-py", _FIVE, ("test_batch",), "batches.meta", 0),
    Version("CIFAR-100", "binary", "cifar-100-binary", ("train.bin",), ("test.bin",), "fine_label_names.txt", 2),
    Version("CIFAR-100", "Python", "cifar-100-python", ("train",), ("test",), "meta", 0),
)


def read_cifar(root: Root, notes: list[str]) -> Catalogue | None:
    for version in VERSIONS:
        batches = [name for name in version.batches if root.has(name)]
        if batches and (root.has(version.meta) or root.name == version.folder):
            return _read(version, batches, root.files, root.path, _file_of(root.files), notes)
    return None


def is_tar(place: Path) -> bool:
    return place.name.lower().endswith((".tar", ".tar.gz", ".tgz"))


def read_cifar_tar(place: Path, notes: list[str]) -> Catalogue | None:
    """From cifar-10-binary.tar.gz and the like; nothing for any other archive."""
    version = _version_in(place)
    if version is None:
        return None
    members = TarMembers(str(place.absolute()), version.folder)
    try:
        batches = [name for name in version.batches if name in members.names()]
    except OSError as error:
        raise UserError(f"'{place}' cannot be read: {error.strerror or error}") from None
    if not batches:
        raise UserError(f"'{place}' has the folder of {version.title}, and none of its files")
    found = _read(version, batches, members, str(place), lambda name: place, notes)
    members.drop()
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


def _file_of(files: Tree) -> Callable[[str], Path]:
    if isinstance(files, FolderFiles):
        return lambda name: Path(files.root) / name
    return lambda name: Path(files.path)


def _read(
    version: Version, batches: list[str], members: Members, path: str, file_of: Callable[[str], Path], notes: list[str]
) -> Catalogue:
    """The catalogue of those batches; `file_of` tells where in the file system one lies."""
    notes.append(f"Read as {version.title} in its original layout, the {version.kind} version.")
    classes = _classes(version, members, path)
    loaded = LoadedPixels(members, version)
    in_place = isinstance(members, FolderFiles) and version.label_bytes
    pixels = StoredPixels(str(file_of("")), version) if in_place else loaded
    found = Catalogue(CifarFiles(pixels), [], [], [], classes=classes)
    label_of = [(name,) for name in classes]
    for name in batches:
        where = f"'{path}/{name}'"
        values, labels = read_batch(_member(members, name, where), version, where)
        if len(labels) and max(labels) >= len(classes):
            raise UserError(f"{where} has the label {max(labels)}, and {version.meta} names {len(classes)} classes")
        if not in_place:
            loaded.batches[name] = values
        changed = file_of(name).stat().st_mtime_ns
        found.entries.extend(Entry(f"{name}#{row}", len(BMP_HEADER) + PIXELS, changed) for row in range(len(labels)))
        found.splits.extend([version.batches[name]] * len(labels))
        found.labels.extend(label_of[label] for label in labels)
    _note_odd(version, batches, found, notes)
    return found


def _note_odd(version: Version, batches: list[str], found: Catalogue, notes: list[str]) -> None:
    absent = [name for name in version.batches if name not in batches]
    if absent:
        notes.append(f"Missing from {version.title}: {some(absent, 6)}.")
    for split, size in SIZES.items():
        number = found.splits.count(split)
        if number not in (0, size):
            notes.append(f"The {split} split has {number:,} images, and that of {version.title} {size:,}.")
    if version.title == "CIFAR-100":
        notes.append("The labels are the 100 fine ones; the 20 coarse ones of CIFAR-100 are not used.")


def _member(members: Members, name: str, where: str) -> bytes:
    try:
        return members.read(name)
    except OSError as error:
        raise UserError(f"{where} cannot be read: {error.strerror or error}") from None


def _classes(version: Version, members: Members, path: str) -> tuple[str, ...]:
    where = f"'{path}/{version.meta}'"
    try:
        data = members.read(version.meta)
    except OSError:
        raise UserError(f"{where} is missing, which names the classes of {version.title}") from None
    if version.label_bytes:
        names = text_lines(data, where)
    else:
        names = plain_values(data, where).texts(version.label_key.rstrip("s") + "_names")
    if len(names) < 2 or len(set(names)) < len(names):
        raise UserError(f"{where} does not name the classes of {version.title}")
    return tuple(names)
