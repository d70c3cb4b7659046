"""ImageNet (ILSVRC2012) with the ReaL labels, and Tiny-ImageNet, as they are published.

Both name classes by WordNet ids (n01440764), train in folders of these, and label a flat folder of validation images
in side files. The order of the classes is that of the sorted ids, as everywhere.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from vitrail.data.files import Entry
from vitrail.data.sources.image_list import ImageList, counted, quoted
from vitrail.data.sources.matfile import read_mat
from vitrail.data.sources.root import Root, note_links, unreadable_files
from vitrail.errors import UserError

WNID = re.compile(r"n\d{8}")
VAL_IMAGE = re.compile(r"ILSVRC2012_val_(\d{8})")
CLASSES = 1000
IMAGES = ("", "Data/CLS-LOC/", "ILSVRC/Data/CLS-LOC/")  # where train and val lie; the latter two as Kaggle packs them
SIDES = ("", "ILSVRC2012_devkit_t12/data/", "ILSVRC2012_devkit_t12/", "devkit/data/", "data/")
SOLUTION, TRUTH, META = "LOC_val_solution.csv", "ILSVRC2012_validation_ground_truth.txt", "meta.mat"
WORDS = ("LOC_synset_mapping.txt", "synset_words.txt", "words.txt")
REAL = "real.json"


def read_tiny(root: Root, notes: list[str]) -> ImageList | None:
    """wnids.txt, words.txt, train/<wnid>/images and val/images with val/val_annotations.txt."""
    folders = root.folders("train") if root.has("wnids.txt") else []
    if not _all_wnids(folders) or root.folders(f"train/{folders[0]}") != ["images"]:
        return None
    notes.append("Read as Tiny-ImageNet in its original layout.")
    labels, missing = {}, "'val/val_annotations.txt' is missing"
    if root.has("val/val_annotations.txt"):
        rows = [line.split() for line in root.lines("val/val_annotations.txt")]
        labels = {f"val/images/{row[0]}": row[1] for row in rows if len(row) > 1}
        missing = "'val/val_annotations.txt' does not name them"
    words = _words(root, notes)
    wnids = sorted(set(root.lines("wnids.txt")))
    found = _image_list(root, {wnid: words.get(wnid, wnid) for wnid in wnids}, labels, missing, notes)
    return _labelled(found, root, missing)


def read_imagenet(root: Root, notes: list[str]) -> ImageList | None:
    """train/<wnid> and val/<wnid> with side files, or a flat val. Without these, class folders are all there is."""
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
    labels, missing = _val_labels(root) if flat else ({}, "they lie in no folder of a class")
    words = _words(root, notes)
    wnids = set(train or folders or labels.values())
    names = {wnid: words.get(wnid, wnid) for wnid in sorted(wnids or (words if len(words) == CLASSES else ()))}
    images = root.under(inner.rstrip("/"))
    found = _image_list(images, names, labels, missing, notes)
    if side := _side(root, REAL):
        found = _with_real(found, images, list(names.values()), root, side, notes)
    return _labelled(found, root, missing)


def _labelled(found: ImageList, root: Root, missing: str) -> ImageList:
    if not found.entries:
        raise UserError(f"'{root.path}' has no image with a label: {missing}")
    return found


def _all_wnids(names: list[str]) -> bool:
    return len(names) > 1 and all(WNID.fullmatch(name) for name in names)


def _side(root: Root, name: str) -> str:
    """Where a side file lies, or nothing."""
    return next((folder + name for folder in SIDES if root.has(folder + name)), "")


def _words(root: Root, notes: list[str]) -> dict[str, str]:
    """Id -> class name: the id and the first of its words, "n01443537 goldfish"."""
    for name in WORDS:
        if side := _side(root, name):
            rows = [line.split(maxsplit=1) for line in root.lines(side)]
            return {row[0]: _class_name(row[0], row[1]) for row in rows if len(row) == 2}
    if side := _side(root, META):
        return {wnid: _class_name(wnid, words) for wnid, words in _synsets(root, side).values()}
    notes.append(f"Classes go by their ids alone: '{WORDS[-1]}' is missing.")
    return {}


def _class_name(wnid: str, words: str) -> str:
    return f"{wnid} {words.split(',')[0]}".strip()


def _stem(name: str) -> str:
    return name.rpartition("/")[2].rpartition(".")[0]


def _val_labels(root: Root) -> tuple[dict[str, str], str]:
    """Validation image -> id, and why those that are not among them have none."""
    if side := _side(root, SOLUTION):
        rows = [line.replace(",", " ").split() for line in root.lines(side)]
        labels = {f"val/{row[0]}.JPEG": row[1] for row in rows if len(row) > 1 and VAL_IMAGE.fullmatch(row[0])}
        return labels, f"'{side}' does not name them"
    truth, meta = _side(root, TRUTH), _side(root, META)
    absent = [name for name, side in ((TRUTH, truth), (META, meta)) if not side]
    if absent:
        return {}, f"{quoted(absent)} of the development kit, or '{SOLUTION}', is missing"
    wnid_of = {number: wnid for number, (wnid, _) in _synsets(root, meta).items()}
    labels = {}
    for row, line in enumerate(root.lines(truth), 1):
        if not line.isdecimal() or int(line[:9]) not in wnid_of:
            raise UserError(f"{root.where(truth)} has the label '{line[:40]}' in line {row}, which '{meta}' does not")
        labels[f"val/ILSVRC2012_val_{row:08d}.JPEG"] = wnid_of[int(line[:9])]
    return labels, f"'{truth}' does not name them"


def _synsets(root: Root, side: str) -> dict[int, tuple[str, str]]:
    """Number in the development kit -> (id, words) of the classes, which come before the groups of classes."""
    found: dict[int, tuple[str, str]] = {}
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
            raise UserError(f"{root.where(side)} has a synset without its number and id")
        if 1 <= number.item() <= CLASSES:
            found[int(number.item())] = wnid, words if isinstance(words, str) else ""
    if not found:
        raise UserError(f"{root.where(side)} has no synsets")
    return found


def _image_list(root: Root, names: dict[str, str], labels: dict[str, str], missing: str, notes: list[str]) -> ImageList:
    """The class of an image is that of a folder around it, else the one its side file tells."""
    found = ImageList(root.files, [], [], [], classes=tuple(names.values()))
    by_stem = {_stem(name): wnid for name, wnid in labels.items()}
    label_of: dict[str, tuple[str, ...]] = {}  # one tuple for all images of a class
    unlabelled: dict[str, list[str]] = {"train": [], "val": [], "test": []}
    elsewhere = []
    for entry in root.listing.images:
        split, *inner = entry.name.split("/")
        wnid = next((folder for folder in inner[:-1] if WNID.fullmatch(folder)), "")
        if split == "val" and not wnid:
            wnid = by_stem.get(_stem(entry.name), "")
        if split not in unlabelled:
            elsewhere.append(entry.name)
        elif not wnid:
            unlabelled[split].append(entry.name)
        else:
            found.entries.append(entry)
            found.splits.append(split)
            found.labels.append(label_of.setdefault(wnid, (names.get(wnid, wnid),)))
    _note_ignored(unlabelled, elsewhere, missing, notes)
    note_links(root.listing, notes)
    there = {_stem(entry.name) for entry in _val_images(found.entries)}
    found.unreadable.extend(unreadable_files(root.listing, {name for name in labels if _stem(name) not in there}))
    return found


def _note_ignored(unlabelled: dict[str, list[str]], elsewhere: list[str], missing: str, notes: list[str]) -> None:
    for split, names in unlabelled.items():
        if names:
            reason = "." if split == "test" else f": {missing}."  # test images are published so
            notes.append(f"Ignored {counted(len(names), 'image')} of '{split}' without a label{reason}")
    if elsewhere:
        notes.append(f"Ignored {counted(len(elsewhere), 'image')} outside 'train' and 'val': {quoted(elsewhere)}.")


def _with_real(found: ImageList, images: Root, names: list[str], root: Root, side: str, notes: list[str]) -> ImageList:
    """The validation images once more, as a split "real" with the labels of Beyer et al. (2020), any number of them."""
    if len(names) != CLASSES:
        notes.append(f"Ignored '{side}': its labels are of all 1,000 classes of ImageNet, and here are {len(names):,}.")
        return found
    sets = _real_sets(root, side)
    rows = [*zip(found.entries, found.splits, found.labels, strict=True)]
    none = 0
    for entry in _val_images(images.listing.images):
        number = VAL_IMAGE.fullmatch(_stem(entry.name))
        labels = sets[int(number[1]) - 1] if number and 1 <= int(number[1]) <= len(sets) else []
        if labels:
            rows.append((entry, "real", tuple(names[label] for label in dict.fromkeys(labels))))
        else:
            none += 1
    rows.sort(key=lambda row: row[0].name)
    entries, splits = [row[0] for row in rows], [row[1] for row in rows]
    real = splits.count("real")
    notes.append(f"The split 'real' has the ReaL labels of {real:,} validation images; {none:,} have none.")
    return ImageList(
        found.files, entries, splits, [row[2] for row in rows], classes=found.classes, unreadable=found.unreadable
    )


def _val_images(entries: Iterable[Entry]) -> list[Entry]:
    return [entry for entry in entries if entry.name.startswith("val/")]


def _real_sets(root: Root, side: str) -> list[list[int]]:
    try:
        sets = json.loads(root.read(side))
        good = isinstance(sets, list) and all(
            isinstance(labels, list) and all(type(label) is int and 0 <= label < CLASSES for label in labels)
            for labels in sets
        )
    except (ValueError, RecursionError):
        good = False
    if not good:
        raise UserError(f"{root.where(side)} is not a list of lists of class numbers from 0 to {CLASSES - 1}")
    return list(sets)
