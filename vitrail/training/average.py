"""The exponential moving average of the weights (Polyak averaging)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from vitrail.training.parallel import local_part


class Average:
    """Weights that trail the trained ones; where a process holds rows of these, it holds the same rows of the average.

    Early on the average follows faster, min(decay, (1 + t) / (10 + t)), so that a short run is not held back by its
    random start; for the paper's long runs this changes nothing after the first steps.
    """

    def __init__(self, model: nn.Module, decay: float):
        self.decay = decay
        self.tensors: dict[str, Tensor] = {
            name: parameter.detach().clone() for name, parameter in model.named_parameters() if parameter.requires_grad
        }

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        decay = min(self.decay, (1 + step) / (10 + step))
        ours, theirs = self._pairs(model)
        torch._foreach_lerp_(ours, theirs, 1 - decay)

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """The model with the averaged weights, for as long as the context lasts."""
        self._exchange(model)
        try:
            yield
        finally:
            self._exchange(model)

    @torch.no_grad()
    def _exchange(self, model: nn.Module) -> None:
        for ours, theirs in zip(*self._pairs(model), strict=True):
            kept = theirs.clone()
            theirs.copy_(ours)
            ours.copy_(kept)

    def _pairs(self, model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
        parameters = dict(model.named_parameters())
        ours = [local_part(tensor) for tensor in self.tensors.values()]
        return ours, [local_part(parameters[name].detach()) for name in self.tensors]
