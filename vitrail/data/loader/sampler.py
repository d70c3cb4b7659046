"""Samplers: which images each step takes, as a function of the step."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from vitrail.data.randomness import epoch_permutation
from vitrail.errors import UserError

PADDING = -1  # position of a padding row, which has weight 0


class BatchRows(NamedTuple):
    """Epoch, sample and position of each row of a batch, int64 (B,) each."""

    epochs: np.ndarray
    samples: np.ndarray
    positions: np.ndarray


class Sampler(Protocol):
    """Maps a step to the rows of its batch."""

    max_rows: int  # per step
    overlap: int  # rows at the front that belong to the previous rank
    weighted: bool  # whether the sample weights of the data apply

    def __call__(self, step: int) -> BatchRows: ...


class TrainingSampler:
    """Endless stream of samples, epoch after epoch, each in a new random order.

    Each rank takes an equal part of every batch. With `neighbour` it also takes the row before: mixup and cutmix mix
    row i with row i-1.
    """

    weighted = True

    def __init__(
        self,
        size: int,
        batch_size: int,
        seed: int,
        rank: int = 0,
        world: int = 1,
        neighbour: bool = False,
        repeats: int = 1,
    ) -> None:
        if batch_size % world:
            raise UserError(
                f"train.batch_size={batch_size} is not a multiple of the {world} processes; "
                "change train.batch_size or the number of processes"
            )
        self.size, self.batch_size, self.seed, self.repeats = size, batch_size, seed, repeats
        part = batch_size // world
        self.overlap = int(neighbour and world > 1)
        self.positions = np.arange(rank * part - self.overlap, (rank + 1) * part) % batch_size
        self.max_rows = len(self.positions)
        self.orders: dict[int, np.ndarray] = {}  # permutations of the epochs in the current step

    def __call__(self, step: int) -> BatchRows:
        distinct = -(-self.batch_size // self.repeats)
        copies, numbers = np.divmod(self.positions, distinct)  # copies are not neighbours, which mixup would mix
        epochs, offsets = np.divmod(step * distinct + numbers, self.size)
        needed = np.unique(epochs).tolist()
        cached = {epoch: order for epoch, order in self.orders.items() if epoch in needed}
        self.orders = cached | {
            epoch: epoch_permutation(self.seed, epoch, self.size) for epoch in needed if epoch not in cached
        }
        samples = np.empty_like(offsets)
        for epoch in needed:
            rows = epochs == epoch
            samples[rows] = self.orders[epoch][offsets[rows]]
        return BatchRows(epochs * self.repeats + copies, samples, self.positions)  # each copy is augmented differently


class EvaluationSampler:
    """Every sample once, in order. Ranks take batches in turn.

    All ranks get the same number of batches, as collective operations need; a missing batch is one padding row.
    """

    overlap, weighted = 0, False

    def __init__(self, size: int, batch_size: int, rank: int = 0, world: int = 1) -> None:
        self.size, self.max_rows, self.rank, self.world = size, batch_size, rank, world

    @property
    def steps(self) -> int:
        return -(-self.size // (self.max_rows * self.world))

    def __call__(self, step: int) -> BatchRows:
        first = (step * self.world + self.rank) * self.max_rows
        samples = np.arange(first, min(first + self.max_rows, self.size))
        if not len(samples):
            return BatchRows(np.zeros(1, np.int64), np.zeros(1, np.int64), np.array([PADDING]))
        return BatchRows(np.zeros_like(samples), samples, samples - first)
