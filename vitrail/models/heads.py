"""From the encoder's tokens to one vector, and from that vector to logits (Eq. 4)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import ModelConfig
from vitrail.models.encoder import MLP
from vitrail.models.initialise import lecun_normal_


class Pool(nn.Module):
    """One vector per image: the class token, or the mean of the patch tokens."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.kind = config.pool
        self.reads = 1 if config.pool == "token" else None  # how many leading tokens; none: all
        self.first_patch = config.prefix
        after_pool = config.norm == "after_pool"
        self.norm = nn.LayerNorm(config.width, eps=config.norm_eps) if after_pool else nn.Identity()

    def forward(self, tokens: Tensor) -> Tensor:
        pooled = tokens[:, 0] if self.kind == "token" else tokens[:, self.first_patch :].mean(dim=1)
        return self.norm(pooled)  # (B, D)


class AttentionPool(nn.Module):
    """big_vision's MAP head: one learned query attends to all tokens, and an MLP refines what it gathered."""

    reads = None

    def __init__(self, config: ModelConfig):
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.probe = nn.Parameter(torch.empty(1, 1, width))
        self.query = nn.Linear(width, width)
        self.keyvalue = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width, eps=config.norm_eps)
        self.mlp = MLP(config.model_copy(update={"dropout": 0.0}))  # no dropout in a head
        self.reset_parameters()

    def reset_parameters(self) -> None:
        # Xavier as flax has it: a (1, 1, D) tensor has one input and D outputs, where torch would count D of both.
        limit = (6.0 / (1 + self.probe.shape[-1])) ** 0.5
        nn.init.uniform_(self.probe, -limit, limit)
        limit = (3.0 / self.out.in_features) ** 0.5  # Xavier for each D x D matrix
        for layer in (self.query, self.keyvalue, self.out):
            nn.init.uniform_(layer.weight, -limit, limit)
            nn.init.zeros_(layer.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        mixed = F.scaled_dot_product_attention(*self.split(tokens))  # (B, heads, 1, D/heads)
        x = self.out(mixed.flatten(1))
        return x + self.mlp(self.mlp_norm(x))  # (B, D)

    def split(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The one query (B, heads, 1, D/heads), and keys and values of the tokens (B, heads, T, D/heads)."""
        batch, count, width = tokens.shape
        size = width // self.heads
        q = self.query(self.probe).view(1, 1, self.heads, size).transpose(1, 2)
        k, v = self.keyvalue(tokens).view(batch, count, 2, self.heads, size).transpose(1, 3).unbind(2)
        return q.expand(batch, -1, -1, -1), k, v

    def weights(self, tokens: Tensor) -> Tensor:
        """The share of each token in what the query gathers, (B, heads, 1, T)."""
        q, k, _ = self.split(tokens)
        return (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(-1)


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
        if vector.is_meta:  # where there is no autocast to leave
            return super().forward(vector)
        with torch.autocast(vector.device.type, enabled=False):
            return super().forward(vector.to(self.weight.dtype))
