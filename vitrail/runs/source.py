"""Batches of a source that is not ours, from any number on, the same each time."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import count
from typing import Any

import numpy as np
import torch

from vitrail.errors import UserError
from vitrail.images.randomness import draw_seed


def drawn_from(source: Any, place: int, seed: int, rank: int = 0) -> Iterator[Any]:
    """The batches of a source from number `place` on. A function is asked for them. Anything else is iterated, again
    and again, and those before `place` are thrown away; before each the random generators of this process are set to
    its number, so that it does not matter what was drawn before."""
    if isinstance(source, torch.utils.data.Dataset):
        raise UserError("the source must give batches, and a Dataset gives samples: wrap it in a DataLoader")
    if callable(source) and not hasattr(source, "__iter__"):
        yield from source(place)
        return
    length = length_of(source)
    epoch, before = divmod(place, length) if length else (0, place)
    while True:
        for part in (source, getattr(source, "sampler", None), getattr(source, "batch_sampler", None)):
            tell: Any = getattr(part, "set_epoch", None)
            if tell is not None:
                tell(epoch)
        for number in count():
            _set_generators(draw_seed(seed, epoch, number, rank))
            if number == 0:
                batches = iter(source)
            batch = next(batches, None)
            if batch is None:
                break
            if before:
                before -= 1
            else:
                yield batch
        if not number:
            raise UserError("the source gave no batches" + (" when it was iterated again" if epoch else ""))
        if length is not None and number != length:
            raise UserError(f"the source says that it has {length} batches, and gave {number}")
        epoch += 1


def _set_generators(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def length_of(source: Any) -> int | None:
    """Batches in one pass over it; none: not known."""
    try:
        return len(source) or None
    except TypeError:
        return None
