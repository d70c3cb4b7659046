"""Holding images out: by class, by content and by group, so that what belongs together stays on one side."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import replace

import numpy as np

from vitrail.images.sources.catalogue import UNSPLIT, Catalogue, count, some


def hold_out(
    images: Catalogue, digests: list[bytes], alike: np.ndarray | None, share: float, seed: int, notes: list[str]
) -> Catalogue:
    """Part of each class becomes "val".

    The choice depends on the seed and on the content (or the names of groups) alone: an image that is added or removed
    moves hardly any other one across, and a new name moves none. Copies, images of one group and images that look
    `alike` (equal numbers) stand on one side together.
    """
    splits = ["train" if split == UNSPLIT else split for split in images.splits]
    by_class: dict[str, list[_Unit]] = {}
    frequent = Counter(name for labels in images.labels for name in labels)
    for unit in _units(images, digests, alike, [row for row, split in enumerate(splits) if split == "train"]):
        by_class.setdefault(_main_label(images, unit.rows, frequent), []).append(unit)
    for units in by_class.values():
        total = sum(len(unit.rows) for unit in units)
        wanted = max(1, round(share * total))
        taken = 0
        ranked = sorted(units, key=lambda unit: _rank(seed, unit.key))
        for unit in ranked[: len(units) - 1]:  # one always stays to be learned from
            if taken and taken + len(unit.rows) / 2 > wanted:
                break
            for row in unit.rows:
                splits[row] = "val"
            taken += len(unit.rows)
    kinds: dict[str, set[str]] = {"train": set(), "val": set()}
    for labels, split in zip(images.labels, splits, strict=True):
        kinds.get(split, set()).update(labels)
    whole = sorted(kinds["train"] - kinds["val"])
    if whole:
        kind = "image" if images.groups is None else "group of images"
        notes.append(f"Nothing is held out of classes with a single {kind}: {some(whole)}.")
    return replace(images, splits=splits)


class _Unit:
    """Images that stay together, and what ranks them."""

    def __init__(self, rows: list[int], key: bytes):
        self.rows, self.key = rows, key


def _units(images: Catalogue, digests: list[bytes], alike: np.ndarray | None, rows: list[int]) -> list[_Unit]:
    """Rows joined by equal content, equal group or equal look."""
    parent = {row: row for row in rows}

    def root(row: int) -> int:
        while parent[row] != row:
            parent[row] = row = parent[parent[row]]
        return row

    first: dict[object, int] = {}
    for row in rows:
        keys: list[object] = [digests[row]]
        if images.groups is not None and images.groups[row]:
            keys.append(images.groups[row])
        if alike is not None:
            keys.append(int(alike[row]))
        for key in keys:
            parent[root(row)] = root(first.setdefault(key, row))
    members: dict[int, list[int]] = {}
    for row in rows:
        members.setdefault(root(row), []).append(row)
    return [_Unit(together, _key(images, digests, together)) for together in members.values()]


def _key(images: Catalogue, digests: list[bytes], rows: list[int]) -> bytes:
    """What ranks a unit: its smallest group name, else its smallest content."""
    if images.groups is not None:
        named = [images.groups[row] for row in rows if images.groups[row]]
        if named:
            return min(named).encode("utf-8", "surrogateescape")
    return min(digests[row] for row in rows)


def _main_label(images: Catalogue, rows: list[int], frequent: Counter[str]) -> str:
    """The class a unit is held out for: that of most of its images; of several on one image, the rarest."""
    counts = Counter(min(images.labels[row], key=lambda name: (frequent[name], name), default="") for row in rows)
    return min(counts, key=lambda name: (-counts[name], name))


def _rank(seed: int, key: bytes) -> bytes:
    return hashlib.blake2b(f"{seed}/".encode() + key, digest_size=8).digest()


def note_leaks(images: Catalogue, digests: list[bytes], notes: list[str]) -> None:
    """Byte for byte the same image, or images of one group, on both sides make an accuracy better than it is."""
    training = {digest for digest, split in zip(digests, images.splits, strict=True) if split == "train"}
    rows = [row for row, split in enumerate(images.splits) if split != "train" and digests[row] in training]
    if rows:
        copies = [images.entries[row].name for row in rows]
        notes.append(f"Exact copies of training images lie in other splits ({len(rows):,}): {some(copies)}.")
    if images.groups is None:
        return
    sides: dict[str, set[str]] = {}
    for group, split in zip(images.groups, images.splits, strict=True):
        if group:
            sides.setdefault(group, set()).add(split)
    torn = sorted(group for group, splits in sides.items() if "train" in splits and len(splits) > 1)
    if torn:
        notes.append(f"{count(len(torn), 'group')} of training images also lie in other splits: {some(torn)}.")
