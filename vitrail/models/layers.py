"""Layers and initializers that the networks share."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

# Standard deviation of a standard normal truncated at 2 sigma; flax divides by it to keep the variance.
TRUNCATED_NORMAL_STD = 0.87962566103423978
DROP_PATH_STEPS = 2**24  # resolution of keep probabilities, exact in float32


def lecun_normal_(weight: Tensor, fan_in: int) -> None:
    """flax's default initializer: normal with variance 1/fan_in, truncated at 2 sigma."""
    std = fan_in**-0.5 / TRUNCATED_NORMAL_STD
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)


def normal_(weight: Tensor, std: float) -> None:
    """nn.init.normal_ that skips meta tensors, for which torch imports its compiler (which doubles load time)."""
    if not weight.is_meta:
        nn.init.normal_(weight, std=std)


class ClassifierHead(nn.Linear):
    """A linear classifier with zero initial weights, so the first logits are the bias.

    It ignores autocast: near the sigmoid head's bias of -10, bfloat16 logits would be 1/16 apart.
    """

    def __init__(self, width: int, num_classes: int, bias_init: float):
        self.bias_init = bias_init
        super().__init__(width, num_classes)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.constant_(self.bias, self.bias_init)

    def forward(self, vector: Tensor) -> Tensor:
        if vector.is_meta:  # the meta device has no autocast
            return super().forward(vector)
        with torch.autocast(vector.device.type, enabled=False):
            return super().forward(vector.to(self.weight.dtype))


class LayerScale(nn.Module):
    """A learned scale per channel of a residual branch (Touvron et al. 2021)."""

    def __init__(self, width: int, init_value: float):
        super().__init__()
        self.init_value = init_value
        self.gamma = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.gamma, self.init_value)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class DropPath(nn.Module):
    """Stochastic depth: in training, drop the residual branch of random images and rescale the others."""

    keep_steps: Tensor

    def __init__(self, rate: float):
        super().__init__()
        # A tensor, since blocks that differ in a Python number would each be compiled. An integer, so that casting the
        # network to another dtype does not change the rate.
        self.register_buffer(
            "keep_steps", torch.from_numpy(np.array(round((1 - rate) * DROP_PATH_STEPS), np.int64)), persistent=False
        )

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        keep_prob = self.keep_steps / DROP_PATH_STEPS
        kept = torch.rand(x.shape[0], 1, 1, device=x.device) < keep_prob
        return x * (kept / keep_prob).to(x.dtype)
