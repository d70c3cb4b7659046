"""The initial distributions that several parts of a network share."""

from __future__ import annotations

from torch import Tensor, nn

# A standard normal cut at two deviations has this deviation; flax divides by it so that the cut keeps the variance.
TRUNCATED_NORMAL_STD = 0.87962566103423978


def lecun_normal_(weight: Tensor, fan_in: int) -> None:
    """flax's default kernel initialisation: normal, variance 1/fan_in, truncated at two deviations."""
    std = fan_in**-0.5 / TRUNCATED_NORMAL_STD
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)


def normal_(weight: Tensor, std: float) -> None:
    """A normal distribution. On the meta device there is nothing to fill, and torch would import its compiler first,
    which would double the time that loading weights takes."""
    if not weight.is_meta:
        nn.init.normal_(weight, std=std)
