"""Batches of a source that is not ours, from any number on, the same each time."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import count
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from vitrail.data.randomness import draw_seed
from vitrail.errors import UserError

END = object()


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


def drawn_from(source: Any, place: int, seed: int, rank: int = 0) -> Iterator[Any]:
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
    length = length_of(source)
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
            raise UserError("the source gave no batches" + (" when it was iterated again" if epoch else ""))
        if length is not None and number != length:
            raise UserError(
                f"the source says that it has {length} batches, and gave {number}: its length must be true, "
                "since a run that goes on counts by it"
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


def length_of(source: Any) -> int | None:
    """Batches in one pass over it; none: not known."""
    if isinstance(getattr(source, "dataset", None), IterableDataset):
        return None  # what a DataLoader says of one is a guess
    try:
        return len(source) or None
    except (TypeError, NotImplementedError):
        return None
