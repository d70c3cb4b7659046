"""Holding images out: by class, by content and by group, so that what belongs together stays on one side."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np

from vitrail.errors import UserError
from vitrail.images.samples import Samples
from vitrail.images.similar import join, near_groups
from vitrail.images.sources.catalogue import UNSPLIT, Catalogue, count, some

MOST_ALIKE = 0.5  # of a class: a larger part that looks alike is what the class looks like, and not one scene


@dataclass(frozen=True)
class SplitRule:
    """Which images are learned from, watched and measured on once. It follows from the content of the images, so
    weights that state it, with the fingerprint of their data, state their split."""

    holdout: float = 0.2  # of each class is "val", in data without a validation or test split
    # of each training class is "val", in data with a test split alone, so that nothing looks at the test images before
    # the end; 0: none, and the images of a "val" split are training images, too
    monitor: float = 0.1
    val: Literal["watch", "test"] = "watch"  # what a "val" split without a test split is
    split_seed: int = 0
    alike: bool = True  # images that look alike stay on one side

    def __post_init__(self) -> None:
        if not 0 < self.holdout < 1:
            raise UserError(f"the share to hold out must be between 0 and 1, not {self.holdout}")
        if not 0 <= self.monitor < 1:
            raise UserError(f"the share to watch must be 0 or between 0 and 1, not {self.monitor}")

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> SplitRule:
        """The rule among other facts."""
        return cls(**{field.name: facts[field.name] for field in fields(cls) if field.name in facts})

    def divide(self, images: Catalogue, digests: list[bytes], looks: np.ndarray, notes: list[str]) -> Catalogue:
        """Give every image its split; `looks` describe the images (see `near_groups`)."""
        if self.val == "test" and "test" not in images.splits:
            images = replace(images, splits=["test" if name == "val" else name for name in images.splits])
        if self.monitor == 0 and "test" in images.splits:
            return replace(images, splits=["train" if name == "val" else name for name in images.splits])
        if "val" in images.splits:
            return images
        share = self.monitor if "test" in images.splits else self.holdout
        together = near_groups(looks) if self.alike else None
        return hold_out(images, digests, together, share, self.split_seed, notes)


USUAL = SplitRule()


def hold_out(
    images: Catalogue, digests: list[bytes], alike: np.ndarray | None, share: float, seed: int, notes: list[str]
) -> Catalogue:
    """Part of each class becomes "val".

    The choice depends on the seed and on the content (or the names of groups) alone: an image that is added or removed
    moves hardly any other one across, and a new name moves none. Copies and images of one group stand on one side
    together; where the data names no groups, so do images that look `alike` (equal numbers).
    """
    splits = ["train" if split == UNSPLIT else split for split in images.splits]
    rows = [row for row, split in enumerate(splits) if split == "train"]
    labels, contents = [images.labels[row] for row in rows], [digests[row] for row in rows]
    names = None if images.groups is None else [images.groups[row] for row in rows]
    units = _units(contents, names, None if alike is None else alike[rows], labels, notes)
    for place in _whole_units(units, labels, share, seed):
        splits[rows[place]] = "val"
    _note_uneven(images, splits, share, notes)
    return replace(images, splits=splits)


def groups_of(samples: Samples, rows: np.ndarray | None = None) -> np.ndarray:
    """What belongs together among some rows of a split, by the same rule as when images are held out: equal numbers,
    uint64 (n,), which hang on the content alone."""
    rows = np.arange(len(samples)) if rows is None else np.asarray(rows, np.int64)
    contents = [digest.tobytes() for digest in samples.firsts[rows].astype(">u8")]
    names = None if samples.groups is None else [samples.groups[int(row)] for row in rows]
    labels = [(int(label),) for label in samples.labels[rows]]
    if samples.sets is not None:
        labels = [tuple(samples.sets[int(row)].tolist()) for row in rows]
    alike = None if samples.looks is None or names is not None else near_groups(samples.looks[rows])
    found = np.zeros(len(rows), np.uint64)
    for unit in _units(contents, names, alike, labels, []):
        found[unit.rows] = min(int.from_bytes(contents[place], "big") for place in unit.rows)
    return found


def hold_out_groups(groups: np.ndarray, labels: np.ndarray | None, share: float, seed: int) -> np.ndarray:
    """The split inside of a measurement, as one that chooses a penalty has: a share of each class, bool (n,), with
    each group whole. A class that is all one group, or one image, is left on the other side. Without `labels` all
    images are one class."""
    classes = [(0,)] * len(groups) if labels is None else [(int(label),) for label in labels]
    members: dict[int, list[int]] = {}
    for row, group in enumerate(groups.tolist()):
        members.setdefault(group, []).append(row)
    units = [_Unit(rows, str(group).encode()) for group, rows in members.items()]
    mask = np.zeros(len(groups), bool)
    mask[_whole_units(units, classes, share, seed)] = True
    return mask


def _whole_units(units: Sequence[_Unit], labels: Sequence[Sequence[Any]], share: float, seed: int) -> list[int]:
    """The rows of a share of each class."""
    left = Counter(name for own in labels for name in own)  # images of each class to learn from
    frequent = Counter(left)
    by_class: dict[Any, list[_Unit]] = {}
    for unit in units:
        by_class.setdefault(_main_label(labels, unit.rows, frequent), []).append(unit)
    chosen = (unit for own in by_class.values() for unit in _chosen(own, share, seed, labels, left))
    return [row for unit in chosen for row in unit.rows]


def _chosen(
    units: list[_Unit], share: float, seed: int, labels: Sequence[Sequence[Any]], left: Counter[Any]
) -> list[_Unit]:
    """The units of a class to hold out: as near to its share as their sizes allow, and never the last of any class."""
    wanted = max(1, round(share * sum(map(len, units))))
    ranked = sorted(units, key=lambda unit: _rank(seed, unit.key))
    chosen: list[_Unit] = []
    taken = 0
    for unit in ranked:
        if abs(taken + len(unit) - wanted) < abs(taken - wanted) and _spare(unit, labels, left):
            chosen.append(unit)
            taken += len(unit)
    if not chosen:  # all are too large: the smallest is better than none
        smallest = next((unit for unit in sorted(ranked, key=len) if _spare(unit, labels, left)), None)
        return [] if smallest is None else [smallest]
    return chosen


def _spare(unit: _Unit, labels: Sequence[Sequence[Any]], left: Counter[Any]) -> bool:
    """Whether every class keeps images to learn from without this unit; if so, it is taken off."""
    own = Counter(name for row in unit.rows for name in labels[row])
    if any(left[name] <= number for name, number in own.items()):
        return False
    left.subtract(own)
    return True


def _scenes(labels: Sequence[Sequence[Any]], alike: np.ndarray, notes: list[str]) -> np.ndarray:
    """The groups that look alike, without those that are most of a class: kept together, they would leave nothing to
    learn from or nothing to measure on."""
    whole = Counter(name for own in labels for name in own)
    parts = Counter((group, name) for group, own in zip(alike.tolist(), labels, strict=True) for name in own)
    large = {group for (group, name), number in parts.items() if number > max(1, MOST_ALIKE * whole[name])}
    if not large:
        return alike
    loose = [row for row, group in enumerate(alike.tolist()) if group in large]
    kept = alike.copy()
    kept[loose] = alike.max() + 1 + np.arange(len(loose))
    notes.append(
        f"{count(len(loose), 'image')} look alike and are most of a class: they may stand on both sides of the split."
    )
    return kept


def _note_uneven(images: Catalogue, splits: list[str], share: float, notes: list[str]) -> None:
    """What could not be held out as asked."""
    counts: dict[str, Counter[str]] = {"train": Counter(), "val": Counter()}
    for labels, split in zip(images.labels, splits, strict=True):
        counts.get(split, Counter[str]()).update(labels)
    whole = sorted(name for name in counts["train"] if not counts["val"][name])
    single = [name for name in whole if counts["train"][name] == 1]
    together = [name for name in whole if counts["train"][name] > 1]
    if single:
        notes.append(f"Nothing is held out of classes with a single image: {some(single)}.")
    if together:
        notes.append(f"Nothing is held out of classes whose images all belong together: {some(together)}.")
    held, total = splits.count("val"), splits.count("val") + splits.count("train")
    if not whole and total >= 20 and not 0.5 * share < held / total < 1.5 * share:
        notes.append(f"{held / total:.0%} of the images are held out, not {share:.0%}: groups are taken whole.")


class _Unit:
    """Images that stay together, and what ranks them."""

    def __init__(self, rows: list[int], key: bytes):
        self.rows, self.key = rows, key

    def __len__(self) -> int:
        return len(self.rows)


def _units(
    contents: Sequence[bytes],
    names: Sequence[str] | None,
    alike: np.ndarray | None,
    labels: Sequence[Sequence[Any]],
    notes: list[str],
) -> list[_Unit]:
    """Images joined by equal content and equal group; or, where the data names no groups, by equal look."""
    alike = None if alike is None or names is not None else _scenes(labels, alike, notes)
    first: dict[object, int] = {}
    pairs: list[tuple[int, int]] = []
    for row, content in enumerate(contents):
        keys: list[object] = [content]
        if names is not None and names[row]:
            keys.append(names[row])
        if alike is not None:
            keys.append(int(alike[row]))
        pairs += [(first.setdefault(key, row), row) for key in keys]
    joined = join(len(contents), *np.array(pairs, np.int64).reshape(-1, 2).T)
    members: dict[int, list[int]] = {}
    for row, group in enumerate(joined.tolist()):
        members.setdefault(group, []).append(row)
    return [_Unit(rows, _key(contents, names, rows)) for rows in members.values()]


def _key(contents: Sequence[bytes], names: Sequence[str] | None, rows: list[int]) -> bytes:
    """What ranks a unit: its smallest group name, else its smallest content."""
    if names is not None:
        named = [names[row] for row in rows if names[row]]
        if named:
            return min(named).encode("utf-8", "surrogateescape")
    return min(contents[row] for row in rows)


def _main_label(labels: Sequence[Sequence[Any]], rows: list[int], frequent: Counter[Any]) -> Any:
    """The class a unit is held out for: that of most of its images; of several on one image, the rarest."""
    counts = Counter(min(labels[row], key=lambda name: (frequent[name], name), default="") for row in rows)
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
