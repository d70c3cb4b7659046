"""Streams of training batches: what the trainer needs, and custom batches from a loader, iterable or function."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import IterableDataset

from vitrail.config import TrainConfig
from vitrail.data.randomness import draw_seed
from vitrail.distributed import Ranks
from vitrail.errors import UserError
from vitrail.interrupt import Interrupts
from vitrail.tasks.custom_loss import CustomBatch
from vitrail.tasks.task import Batch

END = object()


class BatchStream(Protocol):
    """An endless, reproducible stream of batches."""

    def __call__(self, start: int, skipped: int) -> Iterable[Any]:
        """The batches from step `start` on, if `skipped` batches of the stream were skipped before it: the first one is
        batch start + skipped of the stream."""
        ...

    def example(self) -> Batch | None:
        """A batch with the shapes of all others, or None if they are unknown."""
        ...

    def waiting_advice(self, start: int) -> tuple[str, int] | None:
        """What to print if training spends much of its time waiting for data, and the step from which to check."""
        ...


@dataclass(frozen=True)
class SourceBatches:
    """A `BatchStream` of custom batches.

    Attributes
    ----------
    source
        A DataLoader, another iterable, or a function; see `batches_from`.
    sharded
        Whether the model is sharded, so that all processes must call it equally often.
    """

    source: Any
    train: TrainConfig
    device: torch.device
    ranks: Ranks
    interrupts: Interrupts
    sharded: bool

    def __call__(self, start: int, skipped: int) -> Iterator[CustomBatch]:
        steps = self.train.steps or 0
        stream = batches_from(self.source, start + skipped, self.train.seed, self.ranks.rank)
        for step in range(start, steps):
            try:
                content = next(stream, END)
            except Exception:
                if self.interrupts.caught and self.ranks.world_size == 1:  # the signal stopped the workers, too
                    return
                raise
            if content is END:
                raise UserError(f"the batches ended before step {step + 1} of {steps}: provide enough for all steps")
            batch = CustomBatch.from_content(content, self.device)
            self._check_micro_batches(batch)
            yield batch

    def example(self) -> None:
        return None

    def waiting_advice(self, start: int) -> None:
        return None

    def _check_micro_batches(self, batch: CustomBatch) -> None:
        if self.sharded and self.train.micro_batch_size:
            count = -(-len(batch) // self.train.micro_batch_size)
            most, minus_least = self.ranks.all_reduce_max(count, -count)
            if most != -minus_least:
                raise UserError(
                    "with train.parallel=fsdp and train.micro_batch_size, the batches of all processes must have the "
                    "same size"
                )


class ResumableIterator:
    """An iterator as a function of the batch to start at. It can only move forward."""

    def __init__(self, batches: Iterator[Any]):
        self.batches, self.position = batches, 0

    def __call__(self, start: int) -> Iterator[Any]:
        for batch in self.batches:
            self.position += 1
            if self.position > start:
                yield batch


def resumable_source(source: Any) -> Any:
    """The source itself; an iterator, which yields each batch once, as a `ResumableIterator`."""
    return ResumableIterator(source) if isinstance(source, Iterator) else source


def batches_from(source: Any, start: int, seed: int, rank: int = 0) -> Iterator[Any]:
    """Yield the batches of a source, starting at number `start`, reproducibly.

    Before each batch the random generators of this process and of the source are seeded by the number of the batch, so
    that a batch does not depend on the ones before it.

    Parameters
    ----------
    source
        A function, called with `start`, that returns an iterable; or an iterable, which is iterated again and again.
        Of the epoch with batch `start`, the earlier batches are loaded and discarded.
    """
    if not hasattr(source, "__iter__"):
        batches = iter(source(start))
        for number in count(start):
            _seed_generators(draw_seed(seed, 0, number, rank))
            batch = next(batches, END)
            if batch is END:
                return
            yield batch
    length = batches_per_epoch(source)
    epoch, to_discard = divmod(start, length) if length else (0, start)
    while True:
        _begin_epoch(source, epoch, draw_seed(seed, epoch, 0))  # the same order in all processes
        for number in count():
            _seed_generators(draw_seed(seed, epoch, number, rank))
            if number == 0:
                batches = iter(source)
            batch = next(batches, END)
            if batch is END:
                break
            if to_discard:
                to_discard -= 1
            else:
                yield batch
        if not number:
            raise UserError("the loader gave no batches" + (f" in epoch {epoch + 1}" if epoch else ""))
        if length is not None and number != length:
            raise UserError(
                f"len(batches) is {length}, but the loader gave {number} batches. Correct its length: a resumed run "
                "needs it to find its place"
            )
        epoch += 1


def _begin_epoch(source: Any, epoch: int, seed: int) -> None:
    """Set the epoch and seed of a source, and of the samplers of a DataLoader."""
    sampler, batch_sampler = getattr(source, "sampler", None), getattr(source, "batch_sampler", None)
    parts = {id(part): part for part in (source, sampler, batch_sampler, getattr(batch_sampler, "sampler", None))}
    for part in parts.values():
        set_epoch: Any = getattr(part, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
        generator = getattr(part, "generator", None)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(seed)


def _seed_generators(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def batches_per_epoch(source: Any) -> int | None:
    """Number of batches in one pass over a source; None if unknown."""
    if isinstance(getattr(source, "dataset", None), IterableDataset):
        return None  # the length of such a DataLoader is an estimate
    try:
        return len(source) or None
    except (TypeError, NotImplementedError):
        return None
