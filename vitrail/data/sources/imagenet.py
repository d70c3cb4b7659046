"""ImageNet (ILSVRC2012) with the ReaL labels, and Tiny-ImageNet, in their published layouts.

In both, classes are WordNet ids (n01440764), training images are in one folder per class, and side files label a flat
folder of validation images. The classes are ordered by id, as everywhere.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from vitrail.data.files import Entry
from vitrail.data.sources.data_source import DataSource, counted, quoted
from vitrail.data.sources.matfile import read_mat
from vitrail.data.sources.root import Root, note_links, unreadable_files
from vitrail.errors import UserError

WNID = re.compile(r"n\d{8}")
VAL_IMAGE = re.compile(r"ILSVRC2012_val_(\d{8})")
CLASSES = 1000
IMAGES = ("", "Data/CLS-LOC/", "ILSVRC/Data/CLS-LOC/")  # where train and val are; the last two as on Kaggle
SIDES = ("", "ILSVRC2012_devkit_t12/data/", "ILSVRC2012_devkit_t12/", "devkit/data/", "data/")
SOLUTION, TRUTH, META = "LOC_val_solution.csv", "ILSVRC2012_validation_ground_truth.txt", "meta.mat"
WORDS = ("LOC_synset_mapping.txt", "synset_words.txt", "words.txt")
REAL = "real.json"


def read_tiny(root: Root, notes: list[str]) -> DataSource | None:
    """Read wnids.txt, words.txt, train/<wnid>/images and val/images with val/val_annotations.txt."""
    folders = root.folders("train") if root.has("wnids.txt") else []
    if not _all_wnids(folders) or root.folders(f"train/{folders[0]}") != ["images"]:
        return None
    notes.append("Read as Tiny-ImageNet in its original layout.")
    labels, reason = {}, "'val/val_annotations.txt' is missing"
    if root.has("val/val_annotations.txt"):
        rows = [line.split() for line in root.lines("val/val_annotations.txt")]
        labels = {f"val/images/{row[0]}": row[1] for row in rows if len(row) > 1}
        reason = "they are not in 'val/val_annotations.txt'"
    words = _words(root, notes)
    wnids = sorted(set(root.lines("wnids.txt")))
    images = _data_source(root, {wnid: words.get(wnid, wnid) for wnid in wnids}, labels, reason, notes)
    return _check_labelled(images, root, reason)


def read_imagenet(root: Root, notes: list[str]) -> DataSource | None:
    """Read train/<wnid> and val/<wnid> with side files, or a flat val; None for plain class folders."""
    for inner in IMAGES:
        train, folders = root.folders(f"{inner}train"), root.folders(f"{inner}val")
        flat = any(VAL_IMAGE.fullmatch(_stem(name)) for name in root.images(f"{inner}val"))
        if (flat and not train) or _all_wnids(train or folders):
            break
    else:
        return None
    if not (flat or inner or any(_side(root, name) for name in (*WORDS, META, REAL))):
        return None
    notes.append("Read as ImageNet (ILSVRC2012) in its original layout.")
    labels, reason = _val_labels(root) if flat else ({}, "they are not in a class folder")
    words = _words(root, notes)
    wnids = set(train or folders or labels.values())
    names = {wnid: words.get(wnid, wnid) for wnid in sorted(wnids or (words if len(words) == CLASSES else ()))}
    image_root = root.under(inner.rstrip("/"))
    images = _data_source(image_root, names, labels, reason, notes)
    if side := _side(root, REAL):
        images = _with_real(images, image_root, list(names.values()), root, side, notes)
    return _check_labelled(images, root, reason)


def _check_labelled(images: DataSource, root: Root, reason: str) -> DataSource:
    if not images.entries:
        raise UserError(f"'{root.path}' has no image with a label: {reason}")
    return images


def _all_wnids(names: list[str]) -> bool:
    return len(names) > 1 and all(WNID.fullmatch(name) for name in names)


def _side(root: Root, name: str) -> str:
    """Return the path of a side file, or an empty string."""
    return next((folder + name for folder in SIDES if root.has(folder + name)), "")


def _words(root: Root, notes: list[str]) -> dict[str, str]:
    """Return id -> class name: the id and its first word, "n01443537 goldfish"."""
    for name in WORDS:
        if side := _side(root, name):
            rows = [line.split(maxsplit=1) for line in root.lines(side)]
            return {row[0]: _class_name(row[0], row[1]) for row in rows if len(row) == 2}
    if side := _side(root, META):
        return {wnid: _class_name(wnid, words) for wnid, words in _synsets(root, side).values()}
    notes.append(f"The class names are WordNet ids, because '{WORDS[-1]}' is missing.")
    return {}


def _class_name(wnid: str, words: str) -> str:
    return f"{wnid} {words.split(',')[0]}".strip()


def _stem(name: str) -> str:
    return name.rpartition("/")[2].rpartition(".")[0]


def _val_labels(root: Root) -> tuple[dict[str, str], str]:
    """Return validation image -> id, and the reason why the other images have no label."""
    if side := _side(root, SOLUTION):
        rows = [line.replace(",", " ").split() for line in root.lines(side)]
        labels = {f"val/{row[0]}.JPEG": row[1] for row in rows if len(row) > 1 and VAL_IMAGE.fullmatch(row[0])}
        return labels, f"they are not in '{side}'"
    truth, meta = _side(root, TRUTH), _side(root, META)
    missing = [name for name, side in ((TRUTH, truth), (META, meta)) if not side]
    if missing:
        return {}, f"{quoted(missing)} of the development kit is missing, and so is '{SOLUTION}'"
    wnid_of = {number: wnid for number, (wnid, _) in _synsets(root, meta).items()}
    labels = {}
    for row, line in enumerate(root.lines(truth), 1):
        if not line.isdecimal() or int(line[:9]) not in wnid_of:
            raise UserError(f"{root.where(truth)} has the label '{line[:40]}' in line {row}, which is not in '{meta}'")
        labels[f"val/ILSVRC2012_val_{row:08d}.JPEG"] = wnid_of[int(line[:9])]
    return labels, f"they are not in '{truth}'"


def _synsets(root: Root, side: str) -> dict[int, tuple[str, str]]:
    """Return number in the development kit -> (id, words) of the classes; higher numbers are groups of classes."""
    classes: dict[int, tuple[str, str]] = {}
    synsets = read_mat(root.read(side), root.where(side)).get("synsets")
    for row in synsets.ravel() if isinstance(synsets, np.ndarray) else ():
        fields: dict[str, Any] = row if isinstance(row, dict) else {}
        number, wnid, words = (fields.get(key) for key in ("ILSVRC2012_ID", "WNID", "words"))
        if (
            not isinstance(number, np.ndarray)
            or number.size != 1
            or number.dtype.kind not in "iuf"
            or not isinstance(wnid, str)
        ):
            raise UserError(f"{root.where(side)} has a synset without a number or an id")
        if 1 <= number.item() <= CLASSES:
            classes[int(number.item())] = wnid, words if isinstance(words, str) else ""
    if not classes:
        raise UserError(f"{root.where(side)} has no synsets")
    return classes


def _data_source(
    root: Root, names: dict[str, str], labels: dict[str, str], reason: str, notes: list[str]
) -> DataSource:
    """Return the images, each with the class of a folder around it or the class in its side file (`labels`)."""
    images = DataSource(root.files, [], [], [], classes=tuple(names.values()))
    wnid_of = {_stem(name): wnid for name, wnid in labels.items()}
    label_of: dict[str, tuple[str, ...]] = {}  # one tuple for all images of a class
    unlabelled: dict[str, list[str]] = {"train": [], "val": [], "test": []}
    outside = []
    for entry in root.listing.images:
        split, *inner = entry.name.split("/")
        wnid = next((folder for folder in inner[:-1] if WNID.fullmatch(folder)), "")
        if split == "val" and not wnid:
            wnid = wnid_of.get(_stem(entry.name), "")
        if split not in unlabelled:
            outside.append(entry.name)
        elif not wnid:
            unlabelled[split].append(entry.name)
        else:
            images.entries.append(entry)
            images.splits.append(split)
            images.labels.append(label_of.setdefault(wnid, (names.get(wnid, wnid),)))
    _note_ignored(unlabelled, outside, reason, notes)
    note_links(root.listing, notes)
    present = {_stem(entry.name) for entry in _val_images(images.entries)}
    missing = {name for name in labels if _stem(name) not in present}
    images.unreadable.extend(unreadable_files(root.listing, missing))
    return images


def _note_ignored(unlabelled: dict[str, list[str]], outside: list[str], reason: str, notes: list[str]) -> None:
    for split, names in unlabelled.items():
        if names:
            why = "." if split == "test" else f": {reason}."  # test images are published without labels
            notes.append(f"Ignored {counted(len(names), 'image')} of '{split}' without a label{why}")
    if outside:
        notes.append(f"Ignored {counted(len(outside), 'image')} outside 'train' and 'val': {quoted(outside)}.")


def _with_real(
    images: DataSource, image_root: Root, names: list[str], root: Root, side: str, notes: list[str]
) -> DataSource:
    """Return the images with a split "real": the validation images with the ReaL labels of Beyer et al. (2020)."""
    if len(names) != CLASSES:
        notes.append(
            f"Ignored '{side}': its labels need all 1,000 classes of ImageNet, and this data has {len(names):,}."
        )
        return images
    sets = _real_sets(root, side)
    rows = [*zip(images.entries, images.splits, images.labels, strict=True)]
    unlabelled = 0
    for entry in _val_images(image_root.listing.images):
        number = VAL_IMAGE.fullmatch(_stem(entry.name))
        labels = sets[int(number[1]) - 1] if number and 1 <= int(number[1]) <= len(sets) else []
        if labels:
            rows.append((entry, "real", tuple(names[label] for label in dict.fromkeys(labels))))
        else:
            unlabelled += 1
    rows.sort(key=lambda row: row[0].name)
    entries, splits = [row[0] for row in rows], [row[1] for row in rows]
    real = splits.count("real")
    notes.append(f"The split 'real' has the ReaL labels of {real:,} validation images; {unlabelled:,} have none.")
    return DataSource(
        images.files, entries, splits, [row[2] for row in rows], classes=images.classes, unreadable=images.unreadable
    )


def _val_images(entries: Iterable[Entry]) -> list[Entry]:
    return [entry for entry in entries if entry.name.startswith("val/")]


def _real_sets(root: Root, side: str) -> list[list[int]]:
    try:
        sets = json.loads(root.read(side))
        valid = isinstance(sets, list) and all(
            isinstance(labels, list) and all(type(label) is int and 0 <= label < CLASSES for label in labels)
            for labels in sets
        )
    except (ValueError, RecursionError):
        valid = False
    if not valid:
        raise UserError(f"{root.where(side)} is not a list of lists of class numbers from 0 to {CLASSES - 1}")
    return list(sets)
