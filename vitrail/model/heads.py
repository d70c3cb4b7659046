"""From the encoder's tokens to one vector, and from that vector to logits (Eq. 4)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vitrail.config import ModelConfig
from vitrail.model.tokens import lecun_normal_


class Pool(nn.Module):
    """One vector per image: the class token, or the mean of the patch tokens."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.kind = config.pool
        self.reads = 1 if config.pool == "token" else None  # how many leading tokens; none: all
        self.first_patch = int(config.class_token)
        after_pool = config.norm == "after_pool"
        self.norm = nn.LayerNorm(config.width, eps=config.norm_eps) if after_pool else nn.Identity()

    def forward(self, tokens: Tensor) -> Tensor:
        pooled = tokens[:, 0] if self.kind == "token" else tokens[:, self.first_patch :].mean(dim=1)
        return self.norm(pooled)  # (B, D)


class Representation(nn.Module):
    """The hidden tanh layer that the paper's head has in pre-training and drops in fine-tuning."""

    def __init__(self, width: int, size: int):
        super().__init__()
        self.layer = nn.Linear(width, size)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        lecun_normal_(self.layer.weight, fan_in=self.layer.in_features)
        nn.init.zeros_(self.layer.bias)

    def forward(self, vector: Tensor) -> Tensor:
        return torch.tanh(self.layer(vector))


class Classifier(nn.Linear):
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
        with torch.autocast(vector.device.type, enabled=False):
            return super().forward(vector.to(self.weight.dtype))
