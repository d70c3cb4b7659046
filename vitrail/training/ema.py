"""Exponential moving average (EMA) of the weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from vitrail.training.parallel import local_shard


class EMA:
    """Exponential moving average of the trainable parameters, in float32 or better, sharded like the parameters.

    Parameters
    ----------
    model
        The model to average.
    decay
        Weight of the average in each update.
    warmup
        Use min(decay, (1 + t) / (10 + t)) at step t, so that the random start is forgotten early: without it, short
        runs keep much of it. A decay of 0.9999 is reached after 90,000 steps.
    """

    def __init__(self, model: nn.Module, decay: float, warmup: bool = True):
        self.decay, self.warmup = decay, warmup
        self.tensors: dict[str, Tensor] = {
            name: parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32), copy=True)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        self._cached: tuple[nn.Module, list[Tensor], list[Tensor]] | None = None

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """Move the average towards the weights after step `step`."""
        decay = min(self.decay, (1 + step) / (10 + step)) if self.warmup else self.decay
        averages, weights = self._pairs(model)
        if any(average.dtype != weight.dtype for average, weight in zip(averages, weights, strict=True)):
            weights = [weight.to(average.dtype) for average, weight in zip(averages, weights, strict=True)]
        torch._foreach_lerp_(averages, weights, 1 - decay)

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """Replace the weights of the model by their average inside the context."""
        with torch.no_grad():
            averages, weights = self._pairs(model)
            backup = [weight.clone() for weight in weights]
            torch._foreach_copy_(weights, averages)
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self._pairs(model)[1], backup)

    def _pairs(self, model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
        """The averages and the weights they belong to, in the same order.

        Cached, since building the lists takes the host as long as a small network takes the GPU. Not under FSDP, which
        may move the weights.
        """
        if self._cached is not None and self._cached[0] is model:
            return self._cached[1:]
        parameters = dict(model.named_parameters())
        averages = [local_shard(tensor) for tensor in self.tensors.values()]
        weights = [local_shard(parameters[name].detach()) for name in self.tensors]
        if not any(hasattr(parameter, "to_local") for parameter in parameters.values()):
            self._cached = model, averages, weights
        return averages, weights
