"""The exponential moving average of the weights (Polyak averaging)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from vitrail.training.parallel import local_shard


class EMA:
    """Weights that trail the trained ones, in float32 (float64, where those are); where a process holds rows of these,
    it holds the same rows of the average.

    With `ramp` it follows faster early on, min(decay, (1 + t) / (10 + t)), so that a run of a few thousand steps is not
    held back by its random start: a decay of 0.9999 is only reached after 90,000 steps. The paper has none.
    """

    def __init__(self, model: nn.Module, decay: float, ramp: bool = True):
        self.decay, self.ramp = decay, ramp
        self.tensors: dict[str, Tensor] = {
            name: parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32), copy=True)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        self._found: tuple[nn.Module, list[Tensor], list[Tensor]] | None = None

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        decay = min(self.decay, (1 + step) / (10 + step)) if self.ramp else self.decay
        ours, theirs = self._pairs(model)
        if any(own.dtype != tensor.dtype for own, tensor in zip(ours, theirs, strict=True)):
            theirs = [tensor.to(own.dtype) for own, tensor in zip(ours, theirs, strict=True)]
        torch._foreach_lerp_(ours, theirs, 1 - decay)

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """The model with the averaged weights, for as long as the context lasts."""
        with torch.no_grad():
            ours, theirs = self._pairs(model)
            trained = [tensor.clone() for tensor in theirs]
            torch._foreach_copy_(theirs, ours)
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self._pairs(model)[1], trained)

    def _pairs(self, model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
        """Every tensor here with that of the model. To find them takes a host as long as the GPU works on a small
        network, so they are looked for once; those that are divided among processes may move."""
        if self._found is not None and self._found[0] is model:
            return self._found[1:]
        parameters = dict(model.named_parameters())
        ours = [local_shard(tensor) for tensor in self.tensors.values()]
        theirs = [local_shard(parameters[name].detach()) for name in self.tensors]
        if not any(hasattr(parameter, "to_local") for parameter in parameters.values()):
            self._found = model, ours, theirs
        return ours, theirs
