"""Layers and initial distributions that networks share."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

# A standard normal cut at two deviations has this deviation; flax divides by it so that the cut keeps the variance.
TRUNCATED_NORMAL_STD = 0.87962566103423978
DROP_PATH_STEPS = 2**24  # the parts of 1 that a float32 tells apart


def lecun_normal_(weight: Tensor, fan_in: int) -> None:
    """flax's default kernel initialisation: normal, variance 1/fan_in, truncated at two deviations."""
    std = fan_in**-0.5 / TRUNCATED_NORMAL_STD
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)


def normal_(weight: Tensor, std: float) -> None:
    """A normal distribution. On the meta device there is nothing to fill, and torch would import its compiler first,
    which would double the time that loading weights takes."""
    if not weight.is_meta:
        nn.init.normal_(weight, std=std)


class ClassifierHead(nn.Linear):
    """Zero weights at the start: the first prediction is the bias alone.

    Runs in the precision of its weights even under autocast: near the sigmoid head's -10, bfloat16 logits would be
    1/16 apart.
    """

    def __init__(self, width: int, num_classes: int, initial_bias: float):
        self.initial_bias = initial_bias
        super().__init__(width, num_classes)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.constant_(self.bias, self.initial_bias)

    def forward(self, vector: Tensor) -> Tensor:
        if vector.is_meta:  # where there is no autocast to leave
            return super().forward(vector)
        with torch.autocast(vector.device.type, enabled=False):
            return super().forward(vector.to(self.weight.dtype))


class LayerScale(nn.Module):
    """A learned gain for each channel of a branch (Touvron et al. 2021)."""

    def __init__(self, width: int, initial: float):
        super().__init__()
        self.initial = initial
        self.gamma = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.gamma, self.initial)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class DropPath(nn.Module):
    """Stochastic depth: in training, leave the branch out for some images, and scale the others to make up for it."""

    kept: Tensor

    def __init__(self, rate: float):
        super().__init__()
        # A tensor: blocks that differ in a plain number would be compiled one by one. Of integers: no change of the
        # weights' type makes the rate another.
        self.register_buffer(
            "kept", torch.from_numpy(np.array(round((1 - rate) * DROP_PATH_STEPS), np.int64)), persistent=False
        )

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        chance = self.kept / DROP_PATH_STEPS
        kept = torch.rand(x.shape[0], 1, 1, device=x.device) < chance
        return x * (kept / chance).to(x.dtype)
