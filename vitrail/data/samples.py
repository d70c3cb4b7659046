"""One split: labels, weights and names as arrays, and the bytes of an image by its index."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vitrail.data.files import Files


@dataclass(frozen=True, eq=False)
class Texts:
    """Many strings in one buffer, so that loader workers share the memory and stay small."""

    buffer: bytes
    starts: np.ndarray  # int64 (n + 1,)

    @classmethod
    def of(cls, texts: Iterable[str]) -> Texts:
        encoded = [os.fsencode(text) for text in texts]
        return cls(b"".join(encoded), np.cumsum([0, *map(len, encoded)], dtype=np.int64))

    def __getitem__(self, index: int) -> str:
        return os.fsdecode(self.buffer[self.starts[index] : self.starts[index + 1]])


@dataclass(frozen=True, eq=False)
class LabelSets:
    """Any number of labels per image, stored one after the other."""

    values: np.ndarray  # int64
    starts: np.ndarray  # int64 (n + 1,)

    @classmethod
    def of(cls, sets: Sequence[Sequence[int]]) -> LabelSets:
        values = np.array([label for labels in sets for label in labels], np.int64)
        return cls(values, np.cumsum([0, *map(len, sets)], dtype=np.int64))

    def __getitem__(self, index: int) -> np.ndarray:
        return self.values[self.starts[index] : self.starts[index + 1]]


@dataclass(frozen=True, eq=False)
class Samples:
    """The images of one split, with one array entry per image."""

    classes: tuple[str, ...]
    files: Files
    names: Texts
    labels: np.ndarray  # int64 (n,): index in `classes`; if there are `sets`, the first label or -1
    sets: LabelSets | None  # None: every image has exactly one label
    weights: np.ndarray  # float32 (n,)
    digests: np.ndarray  # uint64 (n,): of the file
    original_digests: np.ndarray  # uint64 (n,): the same, before `vitrail pack` resized the images
    pixel_digests: np.ndarray  # uint64 (n,): of the pixels, also before packing; 0: unknown
    areas: np.ndarray  # int64 (n,): height times width
    groups: Texts | None = None  # group names; None: the data has no groups
    descriptors: np.ndarray | None = None  # int8 (n, 64), see `similar.descriptor`; None: similarity is not used

    def __len__(self) -> int:
        return len(self.labels)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "descriptors": None}  # loader processes read images and do not compare them

    def __repr__(self) -> str:
        return f"<{len(self):,} images of {len(self.classes):,} classes>"

    def name(self, index: int) -> str:
        """Return the name of an image in the data, usually its path under the root."""
        return self.names[range(len(self))[index]]

    def read(self, index: int) -> bytes:
        """Return the encoded image; raise OSError if it cannot be read."""
        return self.files.read(self.name(index))

    def labels_of(self, indices: np.ndarray) -> np.ndarray:
        """Return the labels, int64 (B,); with `sets` a multi-hot matrix, uint8 (B, K)."""
        if self.sets is None:
            return self.labels[indices]
        multi_hot = np.zeros((len(indices), len(self.classes)), np.uint8)
        for row, index in enumerate(indices):
            multi_hot[row, self.sets[index]] = 1
        return multi_hot

    def weights_of(self, indices: np.ndarray) -> np.ndarray:
        """Return the training weights of images, float32 (B,)."""
        return self.weights[indices]

    def subset(self, indices: Iterable[int]) -> Samples:
        """Return the samples at these indices, in this order."""
        chosen = np.array([int(index) for index in indices], np.int64)
        columns = ("labels", "weights", "digests", "original_digests", "pixel_digests", "areas")
        return replace(
            self,
            names=Texts.of(self.name(i) for i in chosen),
            sets=None if self.sets is None else LabelSets.of([self.sets[i].tolist() for i in chosen]),
            groups=None if self.groups is None else Texts.of(self.groups[i] for i in chosen),
            descriptors=None if self.descriptors is None else self.descriptors[chosen],
            **{name: getattr(self, name)[chosen] for name in columns},
        )
