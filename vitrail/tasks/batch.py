"""What an objective gets and gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn


class Batch(Protocol):
    """What a step needs to know of its samples."""

    @property
    def weights(self) -> Tensor: ...  # (B,): how much each counts
    def __len__(self) -> int: ...
    def part(self, first: int, last: int) -> Batch: ...


@dataclass(frozen=True)
class Prepared:
    """A batch as the network takes it, on its device."""

    pixels: Tensor  # (B, C, H, W), normalised
    targets: Tensor  # (B, K)
    weights: Tensor  # (B,): how much an image counts
    epoch: Tensor | None = None  # int64 (B,) on the CPU: with the sample, the key of whatever is drawn for an image
    sample: Tensor | None = None
    waited: float | None = None  # seconds until its images were there; none: all the time it took to come

    def __len__(self) -> int:
        return len(self.pixels)

    def part(self, first: int, last: int) -> Prepared:
        """Rows `first` to `last`."""
        rows = slice(first, last)
        epoch, sample = (None if key is None else key[rows] for key in (self.epoch, self.sample))
        return Prepared(self.pixels[rows], self.targets[rows], self.weights[rows], epoch, sample)


@dataclass(frozen=True)
class Loss:
    """Sums over a batch, scalars on its device; whoever trains divides by the sum of the weights of the whole step."""

    total: Tensor  # each image's loss times its weight
    # The weights of the images that the network got right, or the mean share of an image's parts that it did; not a
    # number where nothing is right or wrong
    right: Tensor


Objective = Callable[[nn.Module, Any], Loss]  # it runs the network itself, on the batches of its kind
