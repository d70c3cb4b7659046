"""Which images a step takes. The position in the stream of training images is one integer; all follows from it."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from vitrail.data.randomness import epoch_permutation as random_order
from vitrail.errors import UserError

PADDING = -1  # the position of a row that counts nothing


class BatchRows(NamedTuple):
    """What a batch is made of, int64 (B,) each."""

    epochs: np.ndarray
    samples: np.ndarray
    positions: np.ndarray


class Sampler(Protocol):
    """Which rows a step takes."""

    most: int  # rows in a step
    extra: int
    weighs: bool  # whether images count as much as the data says; else one as much as the other

    def __call__(self, step: int) -> BatchRows: ...


class TrainingSampler:
    """An endless stream: positions 0, 1, 2, ... run through epoch after epoch, each in its own order.

    A rank takes an even part of every batch, with `neighbour` the row before it too: mixing takes row i and row i-1.
    """

    weighs = True

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
                f"a batch of {batch_size} does not divide among {world} processes: "
                "start as many as do divide it, or change train.batch_size"
            )
        self.size, self.batch_size, self.seed, self.repeats = size, batch_size, seed, repeats
        part = batch_size // world
        self.extra = int(neighbour and world > 1)
        self.positions = np.arange(rank * part - self.extra, (rank + 1) * part) % batch_size
        self.most = len(self.positions)
        self.orders: dict[int, np.ndarray] = {}  # of the epochs that the current step touches

    def __call__(self, step: int) -> BatchRows:
        distinct = -(-self.batch_size // self.repeats)
        copies, numbers = np.divmod(self.positions, distinct)  # copies lie far apart: mixing takes neighbours
        epochs, places = np.divmod(step * distinct + numbers, self.size)
        touched = np.unique(epochs).tolist()
        known = {epoch: rows for epoch, rows in self.orders.items() if epoch in touched}
        self.orders = known | {
            epoch: random_order(self.seed, epoch, self.size) for epoch in touched if epoch not in known
        }
        samples = np.empty_like(places)
        for epoch in touched:
            here = epochs == epoch
            samples[here] = self.orders[epoch][places[here]]
        return BatchRows(epochs * self.repeats + copies, samples, self.positions)  # each copy is changed in its own way


class EvaluationSampler:
    """Every sample once, in order; of several ranks each takes every so manieth batch, and all the same number of
    batches, as networks that work together need it: where there is none left, one sample that counts nothing."""

    extra, weighs = 0, False

    def __init__(self, size: int, batch_size: int, rank: int = 0, world: int = 1) -> None:
        self.size, self.most, self.rank, self.world = size, batch_size, rank, world

    @property
    def steps(self) -> int:
        return -(-self.size // (self.most * self.world))

    def __call__(self, step: int) -> BatchRows:
        first = (step * self.world + self.rank) * self.most
        samples = np.arange(first, min(first + self.most, self.size))
        if not len(samples):
            return BatchRows(np.zeros(1, np.int64), np.zeros(1, np.int64), np.array([PADDING]))
        return BatchRows(np.zeros_like(samples), samples, samples - first)
