"""Batches and losses of a user's own, as the trainer takes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vitrail.errors import UserError
from vitrail.tasks.task import Loss


@dataclass(frozen=True)
class CustomBatch:
    """Tensors in any nesting of tuples, lists and mappings, on the device of the network."""

    content: Any
    weights: Tensor  # (B,) ones

    @classmethod
    def of(cls, content: Any, device: torch.device) -> CustomBatch:
        moved = _each(content, lambda tensor: tensor.to(device, non_blocking=True))
        sizes = Counter(len(tensor) for tensor in _tensors(moved) if tensor.ndim)
        size = sizes.most_common(1)[0][0] if sizes else 0  # of equally many, the first
        if not size:
            raise UserError(
                "a batch must hold tensors with an entry for each sample, and at least one: "
                f"this one is {type(content).__name__}"
            )
        return cls(moved, torch.ones(size, device=device))

    def __len__(self) -> int:
        return len(self.weights)

    def micro_batch(self, first: int, last: int) -> CustomBatch:
        """Samples `first` to `last`; what does not have an entry for each sample stays whole."""

        def cut(value: Any) -> Any:
            scalar = isinstance(value, Tensor) and not value.ndim
            return value[first:last] if not scalar and len(value) == len(self) else value

        return CustomBatch(_each(self.content, cut, cut), self.weights[first:last])


def _each(value: Any, change: Callable[[Tensor], Tensor], words: Callable[[Any], Any] = lambda value: value) -> Any:
    """The same with every tensor changed, and every plain list of words or numbers."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, np.ndarray):
        return change(torch.from_numpy(value)) if value.dtype.kind in "biuf" else words(value)
    if isinstance(value, Mapping):
        parts = {key: _each(part, change, words) for key, part in value.items()}
        if not isinstance(value, MutableMapping):
            return parts
        same = copy(value)  # of its type, with whatever else it has
        same.update(parts)
        return same
    if not isinstance(value, tuple | list):
        return value
    if not any(isinstance(part, Tensor | np.ndarray | Mapping | tuple | list) for part in value):
        return words(value)
    changed = [_each(part, change, words) for part in value]
    return type(value)(*changed) if hasattr(value, "_fields") else type(value)(changed)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | tuple | list):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(part)


@dataclass(frozen=True)
class CustomLoss:
    """A task made of a function: it gets the network and a batch, and gives the mean loss over the batch, a scalar."""

    function: Callable[[nn.Module, Any], Tensor]
    graph_safe = False  # the function may do anything

    def loss(self, model: nn.Module, batch: CustomBatch) -> Loss:
        mean = self.function(model, batch.content)
        if not isinstance(mean, Tensor) or mean.numel() != 1:
            what = f"a tensor of shape {tuple(mean.shape)}" if isinstance(mean, Tensor) else type(mean).__name__
            raise UserError(f"the task must give one number, the mean loss of a batch: it gave {what}")
        if not mean.requires_grad:
            raise UserError("the loss of the task does not depend on the network: nothing would be learned")
        total = mean.reshape(()).float() * len(batch)
        return Loss(total, torch.full_like(total.detach(), torch.nan))  # nothing is right or wrong
