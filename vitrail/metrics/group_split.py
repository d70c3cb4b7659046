"""Choosing a share of each class with every unit (images that belong together) on one side."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np


class Unit:
    """Images that stay together, and what ranks them."""

    def __init__(self, rows: list[int], key: bytes):
        self.rows, self.key = rows, key

    def __len__(self) -> int:
        return len(self.rows)


def stratified_group_mask(groups: np.ndarray, labels: np.ndarray | None, share: float, seed: int) -> np.ndarray:
    """The split inside of a measurement, as one that chooses a penalty has: a share of each class, bool (n,), with
    each group whole. A class that is all one group, or one image, is left on the other side. Without `labels` all
    images are one class."""
    classes = [(0,)] * len(groups) if labels is None else [(int(label),) for label in labels]
    members: dict[int, list[int]] = {}
    for row, group in enumerate(groups.tolist()):
        members.setdefault(group, []).append(row)
    units = [Unit(rows, str(group).encode()) for group, rows in members.items()]
    mask = np.zeros(len(groups), bool)
    mask[stratified_units(units, classes, share, seed)] = True
    return mask


def stratified_units(units: Sequence[Unit], labels: Sequence[Sequence[Any]], share: float, seed: int) -> list[int]:
    """The rows of a share of each class."""
    left = Counter(name for own in labels for name in own)  # images of each class to learn from
    frequent = Counter(left)
    by_class: dict[Any, list[Unit]] = {}
    for unit in units:
        by_class.setdefault(_main_label(labels, unit.rows, frequent), []).append(unit)
    chosen = (unit for own in by_class.values() for unit in _chosen(own, share, seed, labels, left))
    return [row for unit in chosen for row in unit.rows]


def _chosen(
    units: list[Unit], share: float, seed: int, labels: Sequence[Sequence[Any]], left: Counter[Any]
) -> list[Unit]:
    """The units of a class to hold out: as near to its share as their sizes allow, and never the last of any class."""
    wanted = max(1, round(share * sum(map(len, units))))
    ranked = sorted(units, key=lambda unit: _rank(seed, unit.key))
    chosen: list[Unit] = []
    taken = 0
    for unit in ranked:
        if abs(taken + len(unit) - wanted) < abs(taken - wanted) and _spare(unit, labels, left):
            chosen.append(unit)
            taken += len(unit)
    if not chosen:  # all are too large: the smallest is better than none
        smallest = next((unit for unit in sorted(ranked, key=len) if _spare(unit, labels, left)), None)
        return [] if smallest is None else [smallest]
    return chosen


def _spare(unit: Unit, labels: Sequence[Sequence[Any]], left: Counter[Any]) -> bool:
    """Whether every class keeps images to learn from without this unit; if so, it is taken off."""
    own = Counter(name for row in unit.rows for name in labels[row])
    if any(left[name] <= number for name, number in own.items()):
        return False
    left.subtract(own)
    return True


def _main_label(labels: Sequence[Sequence[Any]], rows: list[int], frequent: Counter[Any]) -> Any:
    """The class a unit is held out for: that of most of its images; of several on one image, the rarest."""
    counts = Counter(min(labels[row], key=lambda name: (frequent[name], name), default="") for row in rows)
    return min(counts, key=lambda name: (-counts[name], name))


def _rank(seed: int, key: bytes) -> bytes:
    return hashlib.blake2b(f"{seed}/".encode() + key, digest_size=8).digest()
