"""Pixels -> a sequence of tokens: cut the image into patches, project each, put the class token in front (Eq. 1)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import ModelConfig
from vitrail.models.initialise import lecun_normal_, normal_
from vitrail.models.resnet import HybridStem


class Tokens(nn.Module):
    """`class token | registers | patches`, each part where the network has it. A hybrid cuts up the feature map of a
    convolutional stem instead of the image."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.image_size = config.image_size
        self.stem = HybridStem(config.stem, config.channels) if config.stem else None
        channels = config.stem.features if config.stem else config.channels
        # The linear map E, applied to every patch in raster order. It is stored as the convolution that it also is, and
        # computed as a product, which is faster: on CPUs up to 2.4 times.
        self.projection = nn.Conv2d(channels, config.width, config.patch, stride=config.patch)
        self.class_token = nn.Parameter(torch.empty(1, 1, config.width)) if config.class_token else None
        self.registers = nn.Parameter(torch.empty(1, config.registers, config.width)) if config.registers else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        lecun_normal_(self.projection.weight, fan_in=self.projection.weight[0].numel())
        nn.init.zeros_(self.projection.bias)  # type: ignore[arg-type]
        if self.class_token is not None:
            nn.init.zeros_(self.class_token)
        if self.registers is not None:
            normal_(self.registers, std=0.02)  # registers that start equal would stay equal

    def forward(self, pixels: Tensor) -> Tensor:
        return self.join(self.patches(pixels))

    def patches(self, pixels: Tensor) -> Tensor:
        """The embedding of each patch, (B, h*w, D)."""
        if tuple(pixels.shape[-2:]) != self.image_size:
            raise ValueError(
                f"this network takes {self.image_size[0]}x{self.image_size[1]} images, "
                f"not {pixels.shape[-2]}x{pixels.shape[-1]}"
            )
        features = pixels if self.stem is None else self.stem(pixels)
        height, width = self.projection.kernel_size
        cut = features.unflatten(3, (-1, width)).unflatten(2, (-1, height))  # (B, C, h, height, w, width)
        flat = cut.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)  # (B, h*w, C*height*width)
        tokens = F.linear(flat, self.projection.weight.flatten(1), self.projection.bias)
        return tokens.to(self.projection.weight.dtype)  # under autocast, too, the stream of residuals is float32

    def join(self, patches: Tensor) -> Tensor:
        """The sequence of these patches, (B, prefix + h*w, D)."""
        count = patches.shape[0]
        prefix = [part.expand(count, -1, -1) for part in (self.class_token, self.registers) if part is not None]
        # In one piece: sums keep the layout of their first term, so the whole stream would stay transposed in memory.
        return torch.cat([*prefix, patches], dim=1) if prefix else patches.contiguous()
