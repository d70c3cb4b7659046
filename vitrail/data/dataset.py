"""Any data at a path -> labelled splits whose images are read by index."""

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
from vitrail.data.sources.image_list import UNSPLIT, ImageList, class_list, counted, plural, quoted, shorten
from vitrail.data.sources.read import read_source
from vitrail.data.splits import DEFAULT_SPLIT, SplitRule, note_leaks
from vitrail.data.traits import Trait
from vitrail.errors import UserError, user_path

# Weights of the first format know no more than this many digests of files, those that sort first.
SKETCH_SIZE = 65_536  # of their own training images
EARLIER_SKETCH_SIZE = 8_192  # of those that the starting weights had, and theirs


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
    multilabel: bool = False  # an image can have any number of the classes


def content_digests(samples: Samples) -> np.ndarray:
    """What images are recognised by later, uint64 (n,): a digest of their pixels or, where those are not known, of the
    file."""
    return np.where(samples.pixel_digests != 0, samples.pixel_digests, samples.original_digests)


def match_digests(samples: Samples, digests: np.ndarray) -> np.ndarray:
    """Which samples are among the images of these digests, (n,) bool."""
    return (np.isin(samples.pixel_digests, digests) & (samples.pixel_digests != 0)) | np.isin(
        samples.original_digests, digests
    )


def match_sketch(samples: Samples, known: Sequence[str], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Which samples are among the images of a sketch, and of which that cannot be told, (n,) bool each.

    A full sketch, of `size` digests, holds those that sort first: of what sorts after them nothing is known.
    """
    digests = np.array([int(digest, 16) for digest in known], np.uint64)
    beyond = samples.original_digests > digests.max() if len(known) >= size else np.zeros(len(samples), bool)
    return match_digests(samples, digests), beyond


def bundled_images() -> Path:
    """2,000 training and 1,000 test images of CIFAR-10, which come with the package."""
    return Path(__file__).parent / "bundled" / "cifar10-3000.zip"


RuleChooser = Callable[[str, Set[str]], SplitRule | None]  # by the fingerprint, and the splits that the data has


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
    read: Callable[[Path, list[str]], ImageList | None] | None = None,
) -> Dataset:
    """The data set at `path`; what it is, is seen from what lies there (see `read_source`).

    Every image is decoded once and what cannot be used is listed, not swapped or repaired. Splits that the data does
    not have are made by `rule`, which can be a function that chooses one; without a rule they stay as they are, and
    unsplit data is one split "all". With `classes` (those of a weights file) labels follow that order, else the order
    the data states or that of their code points; unless `labelled`, there is one class of all images. Images that the
    list `quarantine` names are left out before all this; so are links in the data, unless `follow_links`. `read` is
    for data that can be read in another way; where it gives nothing, the usual way is taken.
    """
    notes: list[str] = []
    source = (read(user_path(path), notes) if read else None) or read_source(path, notes, labelled, follow_links)
    needs_train = source.given_split and isinstance(rule, SplitRule)
    _check_train(source, needs_train, path)  # before the scan: a wrong layout is told at once
    fewest = 2 if labelled else 1
    class_list(source, classes, path, fewest)
    listed = Quarantine.read(quarantine) if quarantine else None
    found = scan_source(source, max_pixels, progress)
    problems = {source.entries[row].name: found.problems[row] for row in sorted(found.problems)}
    excluded = source.unreadable + list(problems.items())
    usable = _usable(source, found, excluded, path, notes)
    _note_traits(found, usable, notes)
    if listed is not None:
        usable = listed.exclude(source.entries, found.digests, usable, notes)
    images = source.keep(usable)
    _check_train(images, needs_train, path)
    names = class_list(images, classes, path, fewest)
    seen = found.rows(usable)
    digests = [digest.tobytes() for digest in seen.digests]
    fingerprint = _fingerprint(images, digests)  # of what the data says, before anything is held out
    if rule is not None and not isinstance(rule, SplitRule):
        rule = rule(fingerprint, set(images.splits))
        _check_train(images, source.given_split and rule is not None, path)
    if rule is not None:
        _check_weights(images, path)
        firsts = [
            digest.tobytes() for digest in seen.original_digests
        ]  # an image keeps its side when it is made smaller
        images = rule.apply(images, firsts, seen.descriptors, notes)
    if source.given_split or rule is None:
        _note_absent(images, names, notes)
    note_leaks(images, digests, notes)
    return Dataset(
        root=os.path.normpath(user_path(path).absolute()),
        classes=names,
        splits=_samples(images, names, seen, rule is None or rule.group_similar),
        excluded=excluded,
        notes=notes,
        fingerprint=fingerprint,
        given_split=source.given_split,
        median_size=(int(np.median(seen.shapes[:, 0])), int(np.median(seen.shapes[:, 1]))),
        multilabel=source.multilabel,
    )


def scan_source(
    source: ImageList, max_pixels: int, progress: Progress | None = None, *, verify: bool = False
) -> ScanResult:
    """What a look at every image finds; one that stands in two splits, as ImageNet's "real" has, is looked at once.

    Of packed data an earlier look is known; to `verify` is to read all of it and compare checksums.
    """
    if source.scan is not None:
        if not verify:
            return source.scan
        return replace(source.scan, problems=find_unreadable(source.files, source.entries, progress))
    once = {entry.name: entry for entry in source.entries}
    if len(once) == len(source.entries):
        return scan(source.files, source.entries, max_pixels, progress)
    found = scan(source.files, list(once.values()), max_pixels, progress)
    place = {name: row for row, name in enumerate(once)}
    return found.rows([place[entry.name] for entry in source.entries])


def _check_train(images: ImageList, needed: bool, path: str | Path) -> None:
    if needed and "train" not in images.splits:
        others = quoted(dict.fromkeys(images.splits))
        kind = "folder" if images.noun == "class folder" else "split"
        raise UserError(f"'{path}' has images for {others} but none that can be used in a 'train' {kind}")


def _check_weights(images: ImageList, path: str | Path) -> None:
    if images.weights is not None and not any(
        weight for weight, split in zip(images.weights, images.splits, strict=True) if split in ("train", UNSPLIT)
    ):
        raise UserError(f"'{path}' gives every training image a weight of 0: nothing would be learned")


def _usable(
    source: ImageList, found: ScanResult, excluded: list[tuple[str, str]], path: str | Path, notes: list[str]
) -> list[int]:
    """The rows of the images that can be decoded; the rest, and classes that have nothing else, are noted."""
    check_readable(source, found, path)
    rows = usable_rows(source, found, path)
    broken = [(name, reason) for name, reason in excluded if not reason.startswith(NOT_FOUND)]
    missing = [(name, reason) for name, reason in excluded if reason.startswith(NOT_FOUND)]
    if broken:
        name, reason = broken[0]
        kinds = by_extension(name for name, _ in broken)
        notes.append(f"Left out {counted(len(broken), 'image')} that cannot be used; '{name}': {reason} ({kinds}).")
    if missing:
        name, reason = missing[0]
        notes.append(f"Missing: {counted(len(missing), 'file')}; '{shorten(name)}': {reason}.")
    lost = sorted(set(source.labels) - {source.labels[row] for row in rows})
    if lost and not source.multilabel:
        notes.append(f"No image can be used in the {plural(source.noun)} {quoted(labels[0] for labels in lost)}.")
    return rows


def usable_rows(source: ImageList, found: ScanResult, path: str | Path) -> list[int]:
    """The rows of the images that can be decoded, of which there must be one."""
    rows = [row for row in range(len(source.entries)) if row not in found.problems]
    if not rows:
        row, reason = next(iter(found.problems.items()))
        name = source.entries[row].name
        raise UserError(f"'{path}' has no image that can be used, of {len(found.problems):,}; '{name}': {reason}")
    return rows


def check_readable(source: ImageList, found: ScanResult, path: str | Path) -> None:
    """That at least half of the images can be read: what is left of others is hardly the data that was meant."""
    bad = {
        source.entries[row].name: why for row, why in sorted(found.problems.items()) if not why.startswith(NOT_FOUND)
    }
    left = len(usable_rows(source, found, path))
    if len(bad) <= left:
        return
    name, reason = next(iter(bad.items()))
    raise UserError(
        f"'{path}' has {counted(len(bad), 'image')} that cannot be read ({by_extension(bad)}) and {left:,} that can; "
        f"'{name}': {reason}. vitrail reads {SUPPORTED_FORMATS}: mend, convert or remove them"
    )


def _note_traits(found: ScanResult, usable: Sequence[int], notes: list[str]) -> None:
    """What is read in part, or in a way that the data does not fix."""
    for trait, what in (
        (Trait.ANIMATED, "with several frames or pages, of which the first is used"),
        (Trait.WIDE, "with 32 bits a pixel: values beyond the usual range are stretched image by image"),
    ):
        number = int(np.count_nonzero(found.traits[list(usable)] & trait))
        if number:
            notes.append(f"There are {counted(number, 'image')} {what}.")


def _note_absent(images: ImageList, classes: tuple[str, ...], notes: list[str]) -> None:
    for split in dict.fromkeys(images.splits):
        sets = {labels for labels, other in zip(images.labels, images.splits, strict=True) if other == split}
        present = {name for labels in sets for name in labels}
        absent = [name for name in classes if name not in present]
        if absent:
            notes.append(f"The {split} split has no images of {quoted(absent)}.")


def _samples(images: ImageList, classes: tuple[str, ...], seen: ScanResult, alike: bool) -> dict[str, Samples]:
    """`alike`: whether likeness counts."""
    index = {name: number for number, name in enumerate(classes)}
    digests, firsts, pixels = map(_first_eight, (seen.digests, seen.original_digests, seen.original_pixel_digests))
    areas = seen.shapes.astype(np.int64).prod(axis=1)
    splits = {}
    for split in dict.fromkeys(("train", "val", "test", *images.splits)):
        rows = [row for row, other in enumerate(images.splits) if other == split]
        if not rows:
            continue
        labels = [[index[name] for name in images.labels[row]] for row in rows]
        several = images.multilabel or split == "real" or any(len(own) != 1 for own in labels)
        weights = np.ones(len(rows)) if images.weights is None else np.array([images.weights[row] for row in rows])
        if weights.any():
            weights = weights / weights.mean()  # so that the scale of the weights is not one of the learning rate
        splits[split] = Samples(
            classes,
            images.files,
            Texts.of(images.entries[row].name for row in rows),
            np.array([own[0] if own else -1 for own in labels], np.int64),
            LabelSets.of(labels) if several else None,
            weights.astype(np.float32),
            digests[rows],
            firsts[rows],
            pixels[rows],
            areas[rows],
            None if images.groups is None else Texts.of(images.groups[row] for row in rows),
            seen.descriptors[rows] if alike else None,
        )
    return splits


def _first_eight(digests: np.ndarray) -> np.ndarray:
    """Of digests in bytes, (n, 8 or more): as numbers, uint64 (n,)."""
    return np.ascontiguousarray(digests[:, :8]).view(">u8")[:, 0].astype(np.uint64)


def _fingerprint(images: ImageList, digests: list[bytes]) -> str:
    """Of names, classes, content, and what a table says of splits, groups and weights."""
    whole = hashlib.blake2b(digest_size=16)
    for row, (entry, labels, digest) in enumerate(zip(images.entries, images.labels, digests, strict=True)):
        said = [column[row] for column in (images.groups, images.weights) if column is not None]
        text = "\0".join((entry.name, *labels, images.splits[row], *map(str, said), ""))
        whole.update(text.encode("utf-8", "surrogateescape") + digest)
    return whole.hexdigest()
