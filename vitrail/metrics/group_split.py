"""Stratified split with groups: choose a fraction of each class, with every group of images on one side."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np


class Unit:
    """Rows that stay together, and the key that orders them."""

    def __init__(self, rows: list[int], key: bytes):
        self.rows, self.key = rows, key

    def __len__(self) -> int:
        return len(self.rows)


def stratified_group_mask(groups: np.ndarray, labels: np.ndarray | None, fraction: float, seed: int) -> np.ndarray:
    """Mask (n,) of the images to hold out: `fraction` of each class, with each group whole.

    Nothing is held out of a class that is a single group or image. Without `labels`, all images are one class.
    """
    classes = [(0,)] * len(groups) if labels is None else [(int(label),) for label in labels]
    members: dict[int, list[int]] = {}
    for row, group in enumerate(groups.tolist()):
        members.setdefault(group, []).append(row)
    units = [Unit(rows, str(group).encode()) for group, rows in members.items()]
    mask = np.zeros(len(groups), bool)
    mask[stratified_units(units, classes, fraction, seed)] = True
    return mask


def stratified_units(units: Sequence[Unit], labels: Sequence[Sequence[Any]], fraction: float, seed: int) -> list[int]:
    """Rows to hold out: `fraction` of each class, with each unit whole. `labels`: the classes of each row."""
    remaining = Counter(name for names in labels for name in names)  # training images of each class
    class_sizes = Counter(remaining)
    by_class: dict[Any, list[Unit]] = {}
    for unit in units:
        by_class.setdefault(_main_label(labels, unit.rows, class_sizes), []).append(unit)
    chosen = (unit for members in by_class.values() for unit in _choose(members, fraction, seed, labels, remaining))
    return [row for unit in chosen for row in unit.rows]


def _choose(
    units: list[Unit], fraction: float, seed: int, labels: Sequence[Sequence[Any]], remaining: Counter[Any]
) -> list[Unit]:
    """The units of a class to hold out: as close to `fraction` as their sizes allow, and never all of any class."""
    target = max(1, round(fraction * sum(map(len, units))))
    ranked = sorted(units, key=lambda unit: _rank(seed, unit.key))
    chosen: list[Unit] = []
    count = 0
    for unit in ranked:
        if abs(count + len(unit) - target) < abs(count - target) and _take(unit, labels, remaining):
            chosen.append(unit)
            count += len(unit)
    if not chosen:  # all units are too large: take the smallest possible one
        smallest = next((unit for unit in sorted(ranked, key=len) if _take(unit, labels, remaining)), None)
        return [] if smallest is None else [smallest]
    return chosen


def _take(unit: Unit, labels: Sequence[Sequence[Any]], remaining: Counter[Any]) -> bool:
    """Subtract a unit from `remaining` unless that would leave a class without images; return whether it was."""
    counts = Counter(name for row in unit.rows for name in labels[row])
    if any(remaining[name] <= number for name, number in counts.items()):
        return False
    remaining.subtract(counts)
    return True


def _main_label(labels: Sequence[Sequence[Any]], rows: list[int], class_sizes: Counter[Any]) -> Any:
    """The most frequent class of a unit. An image with several labels counts for its rarest one."""
    counts = Counter(min(labels[row], key=lambda name: (class_sizes[name], name), default="") for row in rows)
    return min(counts, key=lambda name: (-counts[name], name))


def _rank(seed: int, key: bytes) -> bytes:
    return hashlib.blake2b(f"{seed}/".encode() + key, digest_size=8).digest()
