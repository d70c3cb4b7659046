"""Train, validation and test splits: stratified by class, with copies, groups and similar images in one split."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from vitrail.data.samples import Samples
from vitrail.data.similar import connected_components, similar_groups
from vitrail.data.sources.data_source import UNSPLIT, DataSource, counted, quoted
from vitrail.errors import UserError
from vitrail.metrics.group_split import Unit, stratified_units

# A group of similar images with more than this fraction of a class is what the class looks like, not one scene.
MAX_GROUP_FRACTION = 0.5


@dataclass(frozen=True)
class SplitRule:
    """How images are split into train, validation and test.

    The split depends on the content of the images alone. So a weights file that stores the rule and the fingerprint of
    its data defines the split.
    """

    holdout_fraction: float = 0.2  # of each class becomes "val", in data without a validation or test split
    # Fraction of each training class that becomes "val", in data with a test split only, so that nothing uses the test
    # images before the end. 0: no validation split, and the images of a "val" split are training images too.
    val_fraction: float = 0.1
    val_as_test: bool = False  # use a "val" split as the test split, in data without one
    split_seed: int = 0
    group_similar: bool = True  # similar images stay in one split

    def __post_init__(self) -> None:
        if not 0 < self.holdout_fraction < 1:
            raise UserError(f"holdout_fraction must be between 0 and 1, not {self.holdout_fraction}")
        if not 0 <= self.val_fraction < 1:
            raise UserError(f"val_fraction must be at least 0 and below 1, not {self.val_fraction}")

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> SplitRule:
        """Return the rule from a mapping that may have other keys too."""
        return cls(**{field.name: values[field.name] for field in fields(cls) if field.name in values})

    def apply(self, images: DataSource, digests: list[bytes], descriptors: np.ndarray, notes: list[str]) -> DataSource:
        """Return the images with a split each. `descriptors` are those of `similar.descriptor`, one per image."""
        if self.val_as_test and "test" not in images.splits:
            images = replace(images, splits=["test" if name == "val" else name for name in images.splits])
        if self.val_fraction == 0 and "test" in images.splits:
            return replace(images, splits=["train" if name == "val" else name for name in images.splits])
        if "val" in images.splits:
            return images
        fraction = self.val_fraction if "test" in images.splits else self.holdout_fraction
        similar = similar_groups(descriptors) if self.group_similar else None
        return make_val_split(images, digests, similar, fraction, self.split_seed, notes)


DEFAULT_SPLIT = SplitRule()


def make_val_split(
    images: DataSource, digests: list[bytes], similar: np.ndarray | None, fraction: float, seed: int, notes: list[str]
) -> DataSource:
    """Return the images with `fraction` of each training class moved to "val".

    The choice depends only on the seed and on the content (or on group names): adding or removing an image moves hardly
    any other image to another split, and renaming moves none. Copies and images of one group stay in one split; if the
    data has no groups, so do `similar` images (equal numbers).
    """
    splits = ["train" if split == UNSPLIT else split for split in images.splits]
    rows = [row for row, split in enumerate(splits) if split == "train"]
    labels, contents = [images.labels[row] for row in rows], [digests[row] for row in rows]
    groups = None if images.groups is None else [images.groups[row] for row in rows]
    units = _units(contents, groups, None if similar is None else similar[rows], labels, notes)
    for index in stratified_units(units, labels, fraction, seed):
        splits[rows[index]] = "val"
    _note_uneven(images, splits, fraction, notes)
    return replace(images, splits=splits)


def group_ids(samples: Samples, rows: np.ndarray | None = None) -> np.ndarray:
    """Return a group number for each of the rows, uint64 (n,), by the same rule that makes the splits.

    The numbers depend on the content of the images alone.
    """
    rows = np.arange(len(samples)) if rows is None else np.asarray(rows, np.int64)
    contents = [digest.tobytes() for digest in samples.original_digests[rows].astype(">u8")]
    groups = None if samples.groups is None else [samples.groups[int(row)] for row in rows]
    labels = [(int(label),) for label in samples.labels[rows]]
    if samples.sets is not None:
        labels = [tuple(samples.sets[int(row)].tolist()) for row in rows]
    similar = None if samples.descriptors is None or groups is not None else similar_groups(samples.descriptors[rows])
    ids = np.zeros(len(rows), np.uint64)
    for unit in _units(contents, groups, similar, labels, []):
        ids[unit.rows] = min(int.from_bytes(contents[row], "big") for row in unit.rows)
    return ids


def _split_large_groups(labels: Sequence[Sequence[Any]], similar: np.ndarray, notes: list[str]) -> np.ndarray:
    """Dissolve groups of similar images that are most of a class.

    Kept together, they would leave nothing of the class to train on, or nothing to measure on.
    """
    class_sizes = Counter(name for names in labels for name in names)
    parts = Counter((group, name) for group, names in zip(similar.tolist(), labels, strict=True) for name in names)
    large = {
        group for (group, name), number in parts.items() if number > max(1, MAX_GROUP_FRACTION * class_sizes[name])
    }
    if not large:
        return similar
    loose = [row for row, group in enumerate(similar.tolist()) if group in large]
    groups = similar.copy()
    groups[loose] = similar.max() + 1 + np.arange(len(loose))
    notes.append(f"{counted(len(loose), 'similar image')} are most of a class: they may be in both splits.")
    return groups


def _note_uneven(images: DataSource, splits: list[str], fraction: float, notes: list[str]) -> None:
    """Note classes without validation images, and a validation fraction that differs from the requested one."""
    counts: dict[str, Counter[str]] = {"train": Counter(), "val": Counter()}
    for labels, split in zip(images.labels, splits, strict=True):
        counts.get(split, Counter[str]()).update(labels)
    without = sorted(name for name in counts["train"] if not counts["val"][name])
    single = [name for name in without if counts["train"][name] == 1]
    one_group = [name for name in without if counts["train"][name] > 1]
    if single:
        notes.append(f"No validation image for classes with a single image: {quoted(single)}.")
    if one_group:
        notes.append(f"No validation image for classes whose images are all in one group: {quoted(one_group)}.")
    val, total = splits.count("val"), splits.count("val") + splits.count("train")
    if not without and total >= 20 and not 0.5 * fraction < val / total < 1.5 * fraction:
        notes.append(
            f"The validation split has {val / total:.0%} of the images, not {fraction:.0%}, because groups stay whole."
        )


def _units(
    contents: Sequence[bytes],
    groups: Sequence[str] | None,
    similar: np.ndarray | None,
    labels: Sequence[Sequence[Any]],
    notes: list[str],
) -> list[Unit]:
    """Return sets of images that stay together: equal content and equal group; without groups, similar images."""
    similar = None if similar is None or groups is not None else _split_large_groups(labels, similar, notes)
    first: dict[object, int] = {}
    pairs: list[tuple[int, int]] = []
    for row, content in enumerate(contents):
        keys: list[object] = [content]
        if groups is not None and groups[row]:
            keys.append(groups[row])
        if similar is not None:
            keys.append(int(similar[row]))
        pairs += [(first.setdefault(key, row), row) for key in keys]
    components = connected_components(len(contents), *np.array(pairs, np.int64).reshape(-1, 2).T)
    members: dict[int, list[int]] = {}
    for row, component in enumerate(components.tolist()):
        members.setdefault(component, []).append(row)
    return [Unit(rows, _rank_key(contents, groups, rows)) for rows in members.values()]


def _rank_key(contents: Sequence[bytes], groups: Sequence[str] | None, rows: list[int]) -> bytes:
    """Return what ranks a unit: its smallest group name, else its smallest content digest."""
    if groups is not None:
        names = [groups[row] for row in rows if groups[row]]
        if names:
            return min(names).encode("utf-8", "surrogateescape")
    return min(contents[row] for row in rows)


def note_leaks(images: DataSource, digests: list[bytes], notes: list[str]) -> None:
    """Note exact copies and groups in several splits: they make the measured accuracy too high."""
    training = {digest for digest, split in zip(digests, images.splits, strict=True) if split == "train"}
    rows = [row for row, split in enumerate(images.splits) if split != "train" and digests[row] in training]
    if rows:
        copies = [images.entries[row].name for row in rows]
        notes.append(f"{counted(len(rows), 'exact duplicate')} of training images in other splits: {quoted(copies)}.")
    if images.groups is None:
        return
    splits_of: dict[str, set[str]] = {}
    for group, split in zip(images.groups, images.splits, strict=True):
        if group:
            splits_of.setdefault(group, set()).add(split)
    leaking = sorted(group for group, splits in splits_of.items() if "train" in splits and len(splits) > 1)
    if leaking:
        notes.append(f"{counted(len(leaking), 'group')} of training images also in other splits: {quoted(leaking)}.")
