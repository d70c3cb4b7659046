"""What the trainer asks of batches; and those of a user's own: from any loader, iterable or function, and from any
number on the same each time."""

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
    """An endless stream of batches, the same every time."""

    def __call__(self, start: int, skipped: int) -> Iterable[Any]:
        """The batches of step `start` and all after it, after `skipped` more batches of the stream were passed over."""
        ...

    def example(self) -> Batch | None:
        """A batch of the right shapes, or none if they are not known."""
        ...

    def waiting_advice(self, start: int) -> tuple[str, int] | None:
        """What to print if training waits for data much of its time, and from which step on to judge that."""
        ...


@dataclass(frozen=True)
class SourceBatches:
    """The batches of a source as a stream for the trainer."""

    source: Any
    train: TrainConfig
    device: torch.device
    ranks: Ranks
    interrupts: Interrupts
    sharded: bool  # the network, among processes that must call it equally often

    def __call__(self, start: int, skipped: int) -> Iterator[CustomBatch]:
        steps = self.train.steps or 0
        stream = batches_from(self.source, start + skipped, self.train.seed, self.ranks.rank)
        for step in range(start, steps):
            try:
                content = next(stream, END)
            except Exception:
                if self.interrupts.caught and self.ranks.world_size == 1:  # the workers got it too
                    return
                raise
            if content is END:
                raise UserError(f"the batches ended before step {step + 1} of {steps}: give enough for all steps")
            batch = CustomBatch.of(content, self.device)
            self._check_micro_batches(batch)
            yield batch

    def example(self) -> None:
        return None

    def waiting_advice(self, start: int) -> None:
        return None

    def _check_micro_batches(self, batch: CustomBatch) -> None:
        if self.sharded and self.train.micro_batch_size:
            parts = -(-len(batch) // self.train.micro_batch_size)
            most, least = self.ranks.all_reduce_max(parts, -parts)
            if most != -least:
                raise UserError("under fsdp with train.micro_batch_size, batches of all processes must have one size")


class OneShot:
    """An iterator, which gives each batch once, as a function of the batch to begin with."""

    def __init__(self, batches: Iterator[Any]):
        self.batches, self.drawn = batches, 0

    def __call__(self, place: int) -> Iterator[Any]:
        for batch in self.batches:
            self.drawn += 1
            if self.drawn > place:
                yield batch


def repeatable_source(source: Any) -> Any:
    """The same source; an iterator with its place remembered, for a run that goes back."""
    return OneShot(source) if isinstance(source, Iterator) else source


def batches_from(source: Any, place: int, seed: int, rank: int = 0) -> Iterator[Any]:
    """The batches of a source from number `place` on. A function is asked for them. Anything else is iterated, again
    and again, and those of an epoch before `place` are thrown away; before each batch the random generators of this
    process, and those of the source, are set to its number, so that it does not matter what was drawn before."""
    if not hasattr(source, "__iter__"):
        batches = iter(source(place))
        for number in count(place):
            _set_generators(draw_seed(seed, 0, number, rank))
            batch = next(batches, END)
            if batch is END:
                return
            yield batch
    length = batches_per_epoch(source)
    epoch, before = divmod(place, length) if length else (0, place)
    while True:
        _begin_epoch(source, epoch, draw_seed(seed, epoch, 0))  # in all processes the same order
        for number in count():
            _set_generators(draw_seed(seed, epoch, number, rank))
            if number == 0:
                batches = iter(source)
            batch = next(batches, END)
            if batch is END:
                break
            if before:
                before -= 1
            else:
                yield batch
        if not number:
            raise UserError("the loader gave no batches" + (" when it was iterated again" if epoch else ""))
        if length is not None and number != length:
            raise UserError(
                f"the loader says that it has {length} batches, and gave {number}: its length must be true, "
                "since a resumed run counts by it"
            )
        epoch += 1


def _begin_epoch(source: Any, epoch: int, seed: int) -> None:
    """Tell a source, and the samplers of a DataLoader, which pass over the data begins."""
    sampler, grouped = getattr(source, "sampler", None), getattr(source, "batch_sampler", None)
    parts = {id(part): part for part in (source, sampler, grouped, getattr(grouped, "sampler", None))}
    for part in parts.values():
        tell: Any = getattr(part, "set_epoch", None)
        if tell is not None:
            tell(epoch)
        generator = getattr(part, "generator", None)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(seed)


def _set_generators(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def batches_per_epoch(source: Any) -> int | None:
    """Batches in one pass over it; none: not known."""
    if isinstance(getattr(source, "dataset", None), IterableDataset):
        return None  # what a DataLoader says of one is a guess
    try:
        return len(source) or None
    except (TypeError, NotImplementedError):
        return None
