"""Open the data at a path as labelled splits whose images are read by index."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from vitrail.data.decode import MAX_PIXELS
from vitrail.data.files import NOT_FOUND
from vitrail.data.formats import SUPPORTED_FORMATS, by_extension
from vitrail.data.quarantine import Quarantine
from vitrail.data.samples import LabelSets, Samples, Texts
from vitrail.data.scan import Progress, ScanResult, find_unreadable, scan
from vitrail.data.sources.data_source import UNSPLIT, DataSource, class_list, counted, plural, quoted, shorten
from vitrail.data.sources.read import read_source
from vitrail.data.splits import DEFAULT_SPLIT, SplitRule, note_leaks
from vitrail.data.traits import Trait
from vitrail.errors import UserError, user_path

# Weights files of the first format store at most this many file digests: the smallest ones (a sketch).
SKETCH_SIZE = 65_536  # of the training images
EARLIER_SKETCH_SIZE = 8_192  # of the training images of each earlier training, back to the first weights


@dataclass(frozen=True, eq=False)
class Dataset:
    """The splits of a data set and what is known about it before the first batch."""

    root: str
    classes: tuple[str, ...]
    splits: dict[str, Samples]  # "train", "val", "test"; or "all" for data that is not split
    excluded: list[tuple[str, str]]  # (name, why it cannot be used)
    notes: list[str]  # sentences for the user: what was ignored, and what is unusual
    fingerprint: str  # of names, classes and content; independent of the folder and of the listing order
    given_split: bool  # the data came with its own splits
    median_size: tuple[int, int]  # (height, width)
    multilabel: bool = False  # an image can have any number of the classes


def content_digests(samples: Samples) -> np.ndarray:
    """Return the digests that identify the images later, uint64 (n,): of the pixels if known, else of the file."""
    return np.where(samples.pixel_digests != 0, samples.pixel_digests, samples.original_digests)


def match_digests(samples: Samples, digests: np.ndarray) -> np.ndarray:
    """Return which samples are among the images with these digests, bool (n,)."""
    return (np.isin(samples.pixel_digests, digests) & (samples.pixel_digests != 0)) | np.isin(
        samples.original_digests, digests
    )


def match_sketch(samples: Samples, sketch: Sequence[str], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return which samples are in a sketch, and for which it is unknown, bool (n,) each.

    A full sketch, of `size` digests, has only the smallest digests: nothing is known about larger ones.
    """
    digests = np.array([int(digest, 16) for digest in sketch], np.uint64)
    unknown = samples.original_digests > digests.max() if len(sketch) >= size else np.zeros(len(samples), bool)
    return match_digests(samples, digests), unknown


def bundled_images() -> Path:
    """Return the archive of 2,000 training and 1,000 test images of CIFAR-10 that comes with the package."""
    return Path(__file__).parent / "bundled" / "cifar10-3000.zip"


RuleChooser = Callable[[str, Set[str]], SplitRule | None]  # (fingerprint, splits in the data) -> rule


def open_dataset(
    path: str | Path,
    rule: SplitRule | RuleChooser | None = DEFAULT_SPLIT,
    *,
    max_pixels: int = MAX_PIXELS,
    classes: Sequence[str] | None = None,
    labelled: bool = True,
    quarantine: str | Path = "",
    follow_links: bool = True,
    progress: Progress | None = None,
    read: Callable[[Path, list[str]], DataSource | None] | None = None,
) -> Dataset:
    """Open the data set at `path` (see `read_source` for what it can be).

    Every image is decoded once. Images that cannot be used are listed in `excluded`.

    Parameters
    ----------
    rule
        Makes the splits that the data does not have; or a function that returns such a rule. With None the splits stay
        as they are, and unsplit data is one split "all".
    max_pixels
        Larger images are excluded.
    classes
        Class names in label order, as in a weights file. With None the order is that of the data, else sorted.
    labelled
        With False all images get one label.
    quarantine
        A CSV list of images to skip, as `vitrail check` writes it.
    follow_links
        Whether to follow links in the data.
    progress
        Called with (images scanned, total).
    read
        Reads other kinds of data; where it returns None, `read_source` is used.
    """
    notes: list[str] = []
    source = (read(user_path(path), notes) if read else None) or read_source(path, notes, labelled, follow_links)
    needs_train = source.given_split and isinstance(rule, SplitRule)
    _check_train(source, needs_train, path)  # before the scan, which may take long
    min_classes = 2 if labelled else 1
    class_list(source, classes, path, min_classes)
    quarantined = Quarantine.read(quarantine) if quarantine else None
    scanned = scan_source(source, max_pixels, progress)
    problems = {source.entries[row].name: scanned.problems[row] for row in sorted(scanned.problems)}
    excluded = source.unreadable + list(problems.items())
    usable = _usable(source, scanned, excluded, path, notes)
    _note_traits(scanned, usable, notes)
    if quarantined is not None:
        usable = quarantined.exclude(source.entries, scanned.digests, usable, notes)
    images = source.keep(usable)
    _check_train(images, needs_train, path)
    names = class_list(images, classes, path, min_classes)
    scanned = scanned.rows(usable)
    digests = [digest.tobytes() for digest in scanned.digests]
    fingerprint = _fingerprint(images, digests)  # of the data as it is, before it is split
    if rule is not None and not isinstance(rule, SplitRule):
        rule = rule(fingerprint, set(images.splits))
        _check_train(images, source.given_split and rule is not None, path)
    if rule is not None:
        _check_weights(images, path)
        originals = [digest.tobytes() for digest in scanned.original_digests]  # a resized image stays in its split
        images = rule.apply(images, originals, scanned.descriptors, notes)
    if source.given_split or rule is None:
        _note_empty_classes(images, names, notes)
    note_leaks(images, digests, notes)
    return Dataset(
        root=os.path.normpath(user_path(path).absolute()),
        classes=names,
        splits=_samples(images, names, scanned, rule is None or rule.group_similar),
        excluded=excluded,
        notes=notes,
        fingerprint=fingerprint,
        given_split=source.given_split,
        median_size=(int(np.median(scanned.shapes[:, 0])), int(np.median(scanned.shapes[:, 1]))),
        multilabel=source.multilabel,
    )


def scan_source(
    source: DataSource, max_pixels: int, progress: Progress | None = None, *, verify: bool = False
) -> ScanResult:
    """Return the scan of every image; an image in two splits, as in ImageNet's "real", is scanned once.

    Packed data comes with its scan. With `verify=True` all its bytes are read and their checksums compared.
    """
    if source.scan is not None:
        if not verify:
            return source.scan
        return replace(source.scan, problems=find_unreadable(source.files, source.entries, progress))
    unique = {entry.name: entry for entry in source.entries}
    if len(unique) == len(source.entries):
        return scan(source.files, source.entries, max_pixels, progress)
    scanned = scan(source.files, list(unique.values()), max_pixels, progress)
    row_of = {name: row for row, name in enumerate(unique)}
    return scanned.rows([row_of[entry.name] for entry in source.entries])


def _check_train(images: DataSource, needed: bool, path: str | Path) -> None:
    if needed and "train" not in images.splits:
        splits = quoted(dict.fromkeys(images.splits))
        kind = "folder" if images.noun == "class folder" else "split"
        raise UserError(f"'{path}' has images in {splits} but no usable image in a 'train' {kind}")


def _check_weights(images: DataSource, path: str | Path) -> None:
    if images.weights is not None and not any(
        weight for weight, split in zip(images.weights, images.splits, strict=True) if split in ("train", UNSPLIT)
    ):
        raise UserError(f"'{path}' has a weight of 0 for every training image; give some images a positive weight")


def _usable(
    source: DataSource, scanned: ScanResult, excluded: list[tuple[str, str]], path: str | Path, notes: list[str]
) -> list[int]:
    """Return the rows of usable images. Note the other images, and classes without usable images."""
    check_readable(source, scanned, path)
    rows = usable_rows(source, scanned, path)
    broken = [(name, reason) for name, reason in excluded if not reason.startswith(NOT_FOUND)]
    missing = [(name, reason) for name, reason in excluded if reason.startswith(NOT_FOUND)]
    if broken:
        name, reason = broken[0]
        kinds = by_extension(name for name, _ in broken)
        notes.append(f"Skipped {counted(len(broken), 'unusable file')} ({kinds}). First: '{name}': {reason}.")
    if missing:
        name, reason = missing[0]
        notes.append(f"Missing: {counted(len(missing), 'file')}. First: '{shorten(name)}': {reason}.")
    lost = sorted(set(source.labels) - {source.labels[row] for row in rows})
    if lost and not source.multilabel:
        notes.append(f"No usable image in the {plural(source.noun)} {quoted(labels[0] for labels in lost)}.")
    return rows


def usable_rows(source: DataSource, scanned: ScanResult, path: str | Path) -> list[int]:
    """Return the rows of the images that can be decoded; raise UserError if there is none."""
    rows = [row for row in range(len(source.entries)) if row not in scanned.problems]
    if not rows:
        row, reason = next(iter(scanned.problems.items()))
        name = source.entries[row].name
        raise UserError(f"'{path}' has no usable image among {len(scanned.problems):,}; '{name}': {reason}")
    return rows


def check_readable(source: DataSource, scanned: ScanResult, path: str | Path) -> None:
    """Raise UserError if most images cannot be read: then `path` is hardly the data that the user means."""
    problems = sorted(scanned.problems.items())
    bad = {source.entries[row].name: why for row, why in problems if not why.startswith(NOT_FOUND)}
    usable = len(usable_rows(source, scanned, path))
    if len(bad) <= usable:
        return
    name, reason = next(iter(bad.items()))
    raise UserError(
        f"'{path}' has {counted(len(bad), 'image')} that cannot be read ({by_extension(bad)}) and only {usable:,} that "
        f"can; '{name}': {reason}. Repair, convert or remove them. vitrail reads {SUPPORTED_FORMATS}"
    )


def _note_traits(scanned: ScanResult, usable: Sequence[int], notes: list[str]) -> None:
    """Note images of which only a part is read, or whose range of values is a guess."""
    for trait, what in (
        (Trait.ANIMATED, "with several frames or pages; only the first is used"),
        (Trait.WIDE, "with 32 bits per pixel; values outside the usual range are rescaled per image"),
    ):
        number = int(np.count_nonzero(scanned.traits[list(usable)] & trait))
        if number:
            notes.append(f"{counted(number, 'image')} {what}.")


def _note_empty_classes(images: DataSource, classes: tuple[str, ...], notes: list[str]) -> None:
    for split in dict.fromkeys(images.splits):
        sets = {labels for labels, name in zip(images.labels, images.splits, strict=True) if name == split}
        present = {name for labels in sets for name in labels}
        absent = [name for name in classes if name not in present]
        if absent:
            notes.append(f"The {split} split has no images of {quoted(absent)}.")


def _samples(
    images: DataSource, classes: tuple[str, ...], scanned: ScanResult, keep_descriptors: bool
) -> dict[str, Samples]:
    """Return the samples of each split."""
    index = {name: number for number, name in enumerate(classes)}
    columns = scanned.digests, scanned.original_digests, scanned.original_pixel_digests
    digests, original_digests, pixel_digests = map(_as_integers, columns)
    areas = scanned.shapes.astype(np.int64).prod(axis=1)
    splits = {}
    for split in dict.fromkeys(("train", "val", "test", *images.splits)):
        rows = [row for row, name in enumerate(images.splits) if name == split]
        if not rows:
            continue
        labels = [[index[name] for name in images.labels[row]] for row in rows]
        has_sets = images.multilabel or split == "real" or any(len(numbers) != 1 for numbers in labels)
        weights = np.ones(len(rows)) if images.weights is None else np.array([images.weights[row] for row in rows])
        if weights.any():
            weights = weights / weights.mean()  # their scale would act as a factor of the learning rate
        splits[split] = Samples(
            classes,
            images.files,
            Texts.of(images.entries[row].name for row in rows),
            np.array([numbers[0] if numbers else -1 for numbers in labels], np.int64),
            LabelSets.of(labels) if has_sets else None,
            weights.astype(np.float32),
            digests[rows],
            original_digests[rows],
            pixel_digests[rows],
            areas[rows],
            None if images.groups is None else Texts.of(images.groups[row] for row in rows),
            scanned.descriptors[rows] if keep_descriptors else None,
        )
    return splits


def _as_integers(digests: np.ndarray) -> np.ndarray:
    """Return the first eight bytes of digests, uint8 (n, >= 8), as uint64 (n,)."""
    return np.ascontiguousarray(digests[:, :8]).view(">u8")[:, 0].astype(np.uint64)


def _fingerprint(images: DataSource, digests: list[bytes]) -> str:
    """Return a digest of names, classes, content, and the splits, groups and weights that a table gives."""
    fingerprint = hashlib.blake2b(digest_size=16)
    for row, (entry, labels, digest) in enumerate(zip(images.entries, images.labels, digests, strict=True)):
        values = [column[row] for column in (images.groups, images.weights) if column is not None]
        text = "\0".join((entry.name, *labels, images.splits[row], *map(str, values), ""))
        fingerprint.update(text.encode("utf-8", "surrogateescape") + digest)
    return fingerprint.hexdigest()
