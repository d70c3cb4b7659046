"""Class folders, in a directory or a .zip archive -> labelled splits whose images are read by index."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from vitrail.errors import UserError, did_you_mean
from vitrail.images.decode import MAX_PIXELS
from vitrail.images.files import Files, FolderFiles, ZipFiles, is_image_name
from vitrail.images.layout import UNSPLIT, Placed, class_list, count, place, some, split_folders, step_inside
from vitrail.images.scan import Progress, Scan, scan

SKETCH = 65_536  # digests kept: 1 MB of a weights file


@dataclass(frozen=True, eq=False)
class Samples:
    """One split. Names are one buffer and not a list of texts, so that loader workers share it and stay small."""

    classes: tuple[str, ...]
    labels: np.ndarray  # int64 (n,): index in classes
    files: Files
    digests: np.ndarray  # uint64 (n,): of the content
    areas: np.ndarray  # int64 (n,): height times width
    buffer: bytes  # every name, one after the other
    offsets: np.ndarray  # int64 (n + 1,): where each name starts

    @classmethod
    def of(
        cls,
        files: Files,
        names: Sequence[str],
        labels: Sequence[int],
        classes: tuple[str, ...],
        digests: np.ndarray,
        areas: np.ndarray,
    ) -> Samples:
        encoded = [os.fsencode(name) for name in names]
        offsets = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
        return cls(classes, np.array(labels, np.int64), files, digests, areas, b"".join(encoded), offsets)

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, index: int) -> str:
        """The path of an image under the root of the data."""
        index = range(len(self))[index]
        return os.fsdecode(self.buffer[self.offsets[index] : self.offsets[index + 1]])

    def read(self, index: int) -> bytes:
        """The encoded image; raises OSError when it cannot be had."""
        return self.files.read(self.name(index))

    def subset(self, indices: Iterable[int]) -> Samples:
        chosen = [int(index) for index in indices]
        names, labels = [self.name(i) for i in chosen], self.labels[chosen].tolist()
        return Samples.of(self.files, names, labels, self.classes, self.digests[chosen], self.areas[chosen])


@dataclass(frozen=True, eq=False)
class Dataset:
    """Everything that is known about the data before the first batch."""

    root: str
    classes: tuple[str, ...]
    splits: dict[str, Samples]  # "train", "val", "test"; or "all" when nothing was to be split
    excluded: list[tuple[str, str]]  # (name, why it cannot be used)
    notes: list[str]  # sentences for the user: what was ignored, and what is odd
    fingerprint: str  # of names, classes and content; not of the place or the order of listing
    given_split: bool  # the data came with its own split folders
    median_size: tuple[int, int]  # (height, width)


def sketch(samples: Samples) -> list[str]:
    """Digests by which images can be recognised later: all of them, or of a million those that sort first."""
    return [f"{digest:016x}" for digest in np.sort(samples.digests)[:SKETCH].tolist()]


def seen_in(samples: Samples, known: Sequence[str]) -> np.ndarray:
    """Which samples are among the images of a sketch, (n,) bool."""
    return np.isin(samples.digests, np.array([int(digest, 16) for digest in known], np.uint64))


def bundled_images() -> Path:
    """2,000 training and 1,000 test images of CIFAR-10, which come with the package."""
    return Path(__file__).parent / "bundled" / "cifar10-3000.zip"


def open_dataset(
    path: str | Path,
    *,
    holdout: float = 0.2,
    monitor: float = 0.1,
    split_seed: int = 0,
    max_pixels: int = MAX_PIXELS,
    classes: Sequence[str] | None = None,
    split: bool = True,
    progress: Progress | None = None,
) -> Dataset:
    """The data set at `path`: <class>/... or {train,val,test}/<class>/..., as a folder or a .zip archive of one.

    Every image is decoded once and what cannot be used is listed, not swapped or repaired. Data without a validation
    or test split has `holdout` of each class held out as "val"; data with a test split alone has `monitor` of each
    training class as "val", so that nothing looks at the test images before the end. With `classes` (those of a
    weights file) labels follow that order, else the order of their code points; with `split` off, unsplit data is one
    split "all".
    """
    for share in (holdout, monitor):
        if not 0 < share < 1:
            raise UserError(f"the share to hold out must be between 0 and 1, not {share}")
    notes: list[str] = []
    files = _files_at(path)
    files, listing = step_inside(files, files.list(), notes)
    given = split_folders(listing, path)
    placed = place(listing, given, path, notes)
    _check_train(placed, bool(given) and split, path)  # before the scan: a wrong layout is told at once
    class_list(placed, classes, path)
    found = scan(files, placed.entries, max_pixels, progress)
    excluded = listing.unreadable + [(placed.entries[row].name, found.problems[row]) for row in sorted(found.problems)]
    usable = _usable(placed, found, excluded, path, notes)
    images = placed.keep(usable)
    _check_train(images, bool(given) and split, path)
    names = class_list(images, classes, path)
    digests = [found.digests[row].tobytes() for row in usable]
    if split and "val" not in images.splits:
        share = monitor if "test" in images.splits else holdout
        images = _hold_out(images, digests, share, split_seed, notes)
    if given or not split:
        _note_absent(images, names, notes)
    _note_copies(images, digests, notes)
    return Dataset(
        root=os.path.normpath(Path(path).expanduser().absolute()),
        classes=names,
        splits=_samples(files, images, names, digests, found.shapes[usable].astype(np.int64).prod(axis=1)),
        excluded=excluded,
        notes=notes,
        fingerprint=_fingerprint(images, digests),
        given_split=bool(given),
        median_size=(int(np.median(found.shapes[usable, 0])), int(np.median(found.shapes[usable, 1]))),
    )


def _files_at(path: str | Path) -> Files:
    place = Path(path).expanduser()
    try:
        if place.is_dir():
            with os.scandir(place):
                return FolderFiles(str(place.absolute()))
        if not place.exists():
            siblings = [child.name for child in place.parent.iterdir()] if place.parent.is_dir() else []
            raise UserError(f"'{path}' does not exist{did_you_mean(place.name, siblings)}")
    except OSError as error:
        raise UserError(f"'{path}' cannot be opened: {error.strerror}") from None
    if place.suffix.lower() == ".zip":
        return ZipFiles(str(place.absolute()))
    if is_image_name(place.name):
        raise UserError(f"'{path}' is a single image; give the folder that holds a folder of images for each class")
    raise UserError(f"'{path}' is neither a folder nor a .zip archive of class folders")


def _check_train(images: Placed, needed: bool, path: str | Path) -> None:
    if needed and "train" not in images.splits:
        others = some(dict.fromkeys(images.splits))
        raise UserError(f"'{path}' has images for {others} but none that can be used in a 'train' folder")


def _usable(
    placed: Placed, found: Scan, excluded: list[tuple[str, str]], path: str | Path, notes: list[str]
) -> list[int]:
    """The rows of the images that can be decoded; the rest, and classes that have nothing else, are noted."""
    rows = [row for row in range(len(placed.entries)) if row not in found.problems]
    if not rows:
        name, reason = excluded[0]
        raise UserError(f"'{path}' has no image that can be used, of {len(excluded):,}; '{name}': {reason}")
    if excluded:
        name, reason = excluded[0]
        notes.append(f"Left out {count(len(excluded), 'image')} that cannot be used; '{name}': {reason}.")
    lost = sorted(set(placed.classes) - {placed.classes[row] for row in rows})
    if lost:
        notes.append(f"No image can be used in the class folders {some(lost)}.")
    return rows


def _hold_out(images: Placed, digests: list[bytes], share: float, seed: int, notes: list[str]) -> Placed:
    """Part of each class becomes "val". The choice depends on the seed and the content alone: an image that is added or
    removed moves hardly any other one across, a new name moves none, and copies stand together."""
    by_class: dict[str, list[int]] = {}
    splits = ["train" if split == UNSPLIT else split for split in images.splits]
    for row, name in enumerate(images.classes):
        if splits[row] == "train":
            by_class.setdefault(name, []).append(row)
    for rows in by_class.values():
        number = min(max(1, round(share * len(rows))), len(rows) - 1)
        ranked = sorted(rows, key=lambda row: (_rank(seed, digests[row]), images.entries[row].name))
        for row in ranked[:number]:
            splits[row] = "val"
    single = sorted(name for name, rows in by_class.items() if len(rows) == 1)
    if single:
        notes.append(f"Nothing is held out of classes with a single image: {some(single)}.")
    return replace(images, splits=splits)


def _rank(seed: int, digest: bytes) -> bytes:
    return hashlib.blake2b(f"{seed}/".encode() + digest, digest_size=8).digest()


def _note_absent(images: Placed, classes: tuple[str, ...], notes: list[str]) -> None:
    for split in dict.fromkeys(images.splits):
        present = {name for name, other in zip(images.classes, images.splits, strict=True) if other == split}
        absent = [name for name in classes if name not in present]
        if absent:
            notes.append(f"The {split} split has no images of {some(absent)}.")


def _note_copies(images: Placed, digests: list[bytes], notes: list[str]) -> None:
    """Byte for byte the same image on both sides makes a measured accuracy better than it is."""
    training = {digest for digest, split in zip(digests, images.splits, strict=True) if split == "train"}
    rows = [row for row, split in enumerate(images.splits) if split != "train" and digests[row] in training]
    if rows:
        copies = [images.entries[row].name for row in rows]
        notes.append(f"Exact copies of training images lie in other splits ({len(rows):,}): {some(copies)}.")


def _samples(
    files: Files, images: Placed, classes: tuple[str, ...], digests: list[bytes], areas: np.ndarray
) -> dict[str, Samples]:
    label = {name: index for index, name in enumerate(classes)}
    short = np.array([int.from_bytes(digest[:8], "big") for digest in digests], np.uint64)
    splits = {}
    for split in ("train", "val", "test", UNSPLIT):
        rows = [row for row, other in enumerate(images.splits) if other == split]
        if rows:
            names = [images.entries[row].name for row in rows]
            labels = [label[images.classes[row]] for row in rows]
            splits[split] = Samples.of(files, names, labels, classes, short[rows], areas[rows])
    return splits


def _fingerprint(images: Placed, digests: list[bytes]) -> str:
    whole = hashlib.blake2b(digest_size=16)
    for entry, name, digest in zip(images.entries, images.classes, digests, strict=True):
        whole.update(f"{entry.name}\0{name}\0".encode("utf-8", "surrogateescape") + digest)
    return whole.hexdigest()
