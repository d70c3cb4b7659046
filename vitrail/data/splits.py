"""Holding images out: by class, by content and by group, so that what belongs together stays on one side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from vitrail.data.samples import Samples
from vitrail.data.similar import connected_components, similar_groups
from vitrail.data.sources.image_list import UNSPLIT, ImageList, counted, quoted
from vitrail.errors import UserError
from vitrail.metrics.group_split import Unit, stratified_units

# A group of similar images with more than this fraction of a class is what the class looks like, not one scene.
MAX_GROUP_FRACTION = 0.5


@dataclass(frozen=True)
class SplitRule:
    """Which images are learned from, watched and measured on once. It follows from the content of the images, so
    weights that state it, with the fingerprint of their data, state their split."""

    test_fraction: float = 0.2  # of each class is "val", in data without a validation or test split
    # of each training class is "val", in data with a test split alone, so that nothing uses the test images before
    # the end; 0: none, and the images of a "val" split are training images, too
    val_fraction: float = 0.1
    val_as_test: bool = False  # whether a "val" split is the test split, in data without one
    split_seed: int = 0
    group_similar: bool = True  # images that look alike stay on one side

    def __post_init__(self) -> None:
        if not 0 < self.test_fraction < 1:
            raise UserError(f"test_fraction must be between 0 and 1, not {self.test_fraction}")
        if not 0 <= self.val_fraction < 1:
            raise UserError(f"val_fraction must be 0 or between 0 and 1, not {self.val_fraction}")

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> SplitRule:
        """The rule among other facts."""
        return cls(**{field.name: facts[field.name] for field in fields(cls) if field.name in facts})

    def apply(self, images: ImageList, digests: list[bytes], descriptors: np.ndarray, notes: list[str]) -> ImageList:
        """Give every image its split; `descriptors` describe the images (see `similar_groups`)."""
        if self.val_as_test and "test" not in images.splits:
            images = replace(images, splits=["test" if name == "val" else name for name in images.splits])
        if self.val_fraction == 0 and "test" in images.splits:
            return replace(images, splits=["train" if name == "val" else name for name in images.splits])
        if "val" in images.splits:
            return images
        share = self.val_fraction if "test" in images.splits else self.test_fraction
        together = similar_groups(descriptors) if self.group_similar else None
        return make_val_split(images, digests, together, share, self.split_seed, notes)


DEFAULT_SPLIT = SplitRule()


def make_val_split(
    images: ImageList, digests: list[bytes], alike: np.ndarray | None, share: float, seed: int, notes: list[str]
) -> ImageList:
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
    for place in stratified_units(units, labels, share, seed):
        splits[rows[place]] = "val"
    _note_uneven(images, splits, share, notes)
    return replace(images, splits=splits)


def group_ids(samples: Samples, rows: np.ndarray | None = None) -> np.ndarray:
    """What belongs together among some rows of a split, by the same rule as when images are held out: equal numbers,
    uint64 (n,), which hang on the content alone."""
    rows = np.arange(len(samples)) if rows is None else np.asarray(rows, np.int64)
    contents = [digest.tobytes() for digest in samples.original_digests[rows].astype(">u8")]
    names = None if samples.groups is None else [samples.groups[int(row)] for row in rows]
    labels = [(int(label),) for label in samples.labels[rows]]
    if samples.sets is not None:
        labels = [tuple(samples.sets[int(row)].tolist()) for row in rows]
    alike = None if samples.descriptors is None or names is not None else similar_groups(samples.descriptors[rows])
    found = np.zeros(len(rows), np.uint64)
    for unit in _units(contents, names, alike, labels, []):
        found[unit.rows] = min(int.from_bytes(contents[place], "big") for place in unit.rows)
    return found


def _scenes(labels: Sequence[Sequence[Any]], alike: np.ndarray, notes: list[str]) -> np.ndarray:
    """The groups that look alike, without those that are most of a class: kept together, they would leave nothing to
    learn from or nothing to measure on."""
    whole = Counter(name for own in labels for name in own)
    parts = Counter((group, name) for group, own in zip(alike.tolist(), labels, strict=True) for name in own)
    large = {group for (group, name), number in parts.items() if number > max(1, MAX_GROUP_FRACTION * whole[name])}
    if not large:
        return alike
    loose = [row for row, group in enumerate(alike.tolist()) if group in large]
    kept = alike.copy()
    kept[loose] = alike.max() + 1 + np.arange(len(loose))
    notes.append(
        f"{counted(len(loose), 'image')} look alike and are most of a class: they may stand on both sides of the split."
    )
    return kept


def _note_uneven(images: ImageList, splits: list[str], share: float, notes: list[str]) -> None:
    """What could not be held out as asked."""
    counts: dict[str, Counter[str]] = {"train": Counter(), "val": Counter()}
    for labels, split in zip(images.labels, splits, strict=True):
        counts.get(split, Counter[str]()).update(labels)
    whole = sorted(name for name in counts["train"] if not counts["val"][name])
    single = [name for name in whole if counts["train"][name] == 1]
    together = [name for name in whole if counts["train"][name] > 1]
    if single:
        notes.append(f"Nothing is held out of classes with a single image: {quoted(single)}.")
    if together:
        notes.append(f"Nothing is held out of classes whose images all belong together: {quoted(together)}.")
    held, total = splits.count("val"), splits.count("val") + splits.count("train")
    if not whole and total >= 20 and not 0.5 * share < held / total < 1.5 * share:
        notes.append(f"{held / total:.0%} of the images are held out, not {share:.0%}: groups are taken whole.")


def _units(
    contents: Sequence[bytes],
    names: Sequence[str] | None,
    alike: np.ndarray | None,
    labels: Sequence[Sequence[Any]],
    notes: list[str],
) -> list[Unit]:
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
    joined = connected_components(len(contents), *np.array(pairs, np.int64).reshape(-1, 2).T)
    members: dict[int, list[int]] = {}
    for row, group in enumerate(joined.tolist()):
        members.setdefault(group, []).append(row)
    return [Unit(rows, _key(contents, names, rows)) for rows in members.values()]


def _key(contents: Sequence[bytes], names: Sequence[str] | None, rows: list[int]) -> bytes:
    """What ranks a unit: its smallest group name, else its smallest content."""
    if names is not None:
        named = [names[row] for row in rows if names[row]]
        if named:
            return min(named).encode("utf-8", "surrogateescape")
    return min(contents[row] for row in rows)


def note_leaks(images: ImageList, digests: list[bytes], notes: list[str]) -> None:
    """Byte for byte the same image, or images of one group, on both sides make an accuracy better than it is."""
    training = {digest for digest, split in zip(digests, images.splits, strict=True) if split == "train"}
    rows = [row for row, split in enumerate(images.splits) if split != "train" and digests[row] in training]
    if rows:
        copies = [images.entries[row].name for row in rows]
        notes.append(f"Exact copies of training images lie in other splits ({len(rows):,}): {quoted(copies)}.")
    if images.groups is None:
        return
    sides: dict[str, set[str]] = {}
    for group, split in zip(images.groups, images.splits, strict=True):
        if group:
            sides.setdefault(group, set()).add(split)
    torn = sorted(group for group, splits in sides.items() if "train" in splits and len(splits) > 1)
    if torn:
        notes.append(f"{counted(len(torn), 'group')} of training images also lie in other splits: {quoted(torn)}.")
