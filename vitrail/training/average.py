"""The exponential moving average of the weights (Polyak averaging)."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn


class Average:
    """A second copy of the network whose weights trail the trained ones.

    Early on the average follows faster, min(decay, (1 + t) / (10 + t)), so that a short run is not held back by its
    random start; for the paper's long runs this changes nothing after the first steps.
    """

    def __init__(self, model: nn.Module, decay: float):
        self.decay = decay
        self.model = copy.deepcopy(model).requires_grad_(False).eval()

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        decay = min(self.decay, (1 + step) / (10 + step))
        theirs: list[Tensor] = [p.detach() for p in model.parameters()]
        torch._foreach_lerp_(list(self.model.parameters()), theirs, 1 - decay)
