"""Custom batches and loss functions, for `vitrail.fit`."""

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
    """A batch of tensors in nested tuples, lists and mappings, on the device of the network."""

    content: Any
    weights: Tensor  # (B,) ones

    @classmethod
    def from_content(cls, content: Any, device: torch.device) -> CustomBatch:
        """Move the tensors of `content` to the device. The batch size is the most common length of its tensors."""
        moved = _map_nested(content, lambda tensor: tensor.to(device, non_blocking=True))
        sizes = Counter(len(tensor) for tensor in _tensors(moved) if tensor.ndim)
        size = sizes.most_common(1)[0][0] if sizes else 0
        if not size:
            raise UserError(
                "each batch must contain tensors with a row for each sample, but one is an object of type "
                f"{type(content).__name__} without such tensors"
            )
        return cls(moved, torch.ones(size, device=device))

    def __len__(self) -> int:
        return len(self.weights)

    def micro_batch(self, first: int, last: int) -> CustomBatch:
        """Samples `first` to `last`. Values without an entry for each sample are kept unchanged."""

        def cut(value: Any) -> Any:
            scalar = isinstance(value, Tensor) and not value.ndim
            return value[first:last] if not scalar and len(value) == len(self) else value

        return CustomBatch(_map_nested(self.content, cut, cut), self.weights[first:last])


def _map_nested(
    value: Any, map_tensor: Callable[[Tensor], Tensor], map_list: Callable[[Any], Any] = lambda value: value
) -> Any:
    """Apply `map_tensor` to every tensor in a nested structure, and `map_list` to every flat list of other values."""
    if isinstance(value, Tensor):
        return map_tensor(value)
    if isinstance(value, np.ndarray):
        return map_tensor(torch.from_numpy(value)) if value.dtype.kind in "biuf" else map_list(value)
    if isinstance(value, Mapping):
        items = {key: _map_nested(item, map_tensor, map_list) for key, item in value.items()}
        if not isinstance(value, MutableMapping):
            return items
        mapping = copy(value)  # keeps the type and other attributes, as of a tokenizer's BatchEncoding
        mapping.update(items)
        return mapping
    if not isinstance(value, tuple | list):
        return value
    if not any(isinstance(item, Tensor | np.ndarray | Mapping | tuple | list) for item in value):
        return map_list(value)
    mapped = [_map_nested(item, map_tensor, map_list) for item in value]
    return type(value)(*mapped) if hasattr(value, "_fields") else type(value)(mapped)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | tuple | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(item)


@dataclass(frozen=True)
class CustomLoss:
    """A task from a function `loss(model, batch)`, which returns the mean loss over the batch as a scalar tensor."""

    function: Callable[[nn.Module, Any], Tensor]
    graph_safe = False  # the function may use random numbers of the host

    def loss(self, model: nn.Module, batch: CustomBatch) -> Loss:
        mean = self.function(model, batch.content)
        if not isinstance(mean, Tensor) or mean.numel() != 1:
            returned = f"a tensor of shape {tuple(mean.shape)}" if isinstance(mean, Tensor) else type(mean).__name__
            raise UserError(f"task must return the mean loss of the batch as a scalar tensor, not {returned}")
        if not mean.requires_grad:
            raise UserError("task returned a loss that does not depend on the network, so nothing can be trained")
        total = mean.reshape(()).float() * len(batch)
        return Loss(total, torch.full_like(total.detach(), torch.nan))  # accuracy is undefined
