"""Pixels -> a sequence of tokens: cut the image into patches, project each, put the class token in front (Eq. 1)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vitrail.config import ModelConfig

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


class Tokens(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        # A convolution whose stride is its kernel is the linear map E applied to every patch, in raster order.
        self.projection = nn.Conv2d(config.channels, config.width, config.patch, stride=config.patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, config.width)) if config.class_token else None
        self.image_size = config.image_size
        self.reset_parameters()

    def reset_parameters(self) -> None:
        lecun_normal_(self.projection.weight, fan_in=self.projection.weight[0].numel())
        nn.init.zeros_(self.projection.bias)  # type: ignore[arg-type]
        if self.class_token is not None:
            nn.init.zeros_(self.class_token)

    def forward(self, pixels: Tensor) -> Tensor:
        if tuple(pixels.shape[-2:]) != self.image_size:
            raise ValueError(
                f"this network takes {self.image_size[0]}x{self.image_size[1]} images, "
                f"not {pixels.shape[-2]}x{pixels.shape[-1]}"
            )
        patches = self.projection(pixels)  # (B, D, h, w)
        tokens = patches.flatten(2).transpose(1, 2)  # (B, h*w, D)
        if self.class_token is None:
            return tokens
        return torch.cat([self.class_token.expand(len(tokens), -1, -1), tokens], dim=1)  # (B, 1+h*w, D)
