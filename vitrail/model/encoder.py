"""The Transformer encoder: pre-norm blocks of self-attention and MLP, each with a residual (Eq. 2 and 3)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import ModelConfig
from vitrail.model.tokens import normal_


class Attention(nn.Module):
    """Multi-head self-attention (Eq. 5-8); the three input projections are stored as one matrix."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        # Xavier for each D x D matrix: computed on the stacked 3D x D one, it would be 0.707 times too small.
        limit = (3.0 / self.out.in_features) ** 0.5
        nn.init.uniform_(self.qkv.weight, -limit, limit)
        nn.init.uniform_(self.out.weight, -limit, limit)
        nn.init.zeros_(self.qkv.bias)
        nn.init.zeros_(self.out.bias)

    def forward(self, x: Tensor, keep: int | None = None) -> Tensor:
        """New tokens, mixed from all of `x`; `keep`: only for that many leading ones."""
        batch, tokens, width = x.shape
        qkv = self.qkv(x).view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = qkv.transpose(1, 3).unbind(2)  # each (B, heads, T, D/heads)
        mixed = F.scaled_dot_product_attention(q[:, :, :keep], k, v)  # scaled by 1/sqrt(D/heads)
        return self.out(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, width: int, hidden: int, gelu: str, dropout: float):
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.approximate = {"tanh": "tanh", "erf": "none"}[gelu]
        self.dropout = nn.Dropout(dropout)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for layer in (self.up, self.down):
            nn.init.xavier_uniform_(layer.weight)
            normal_(layer.bias, std=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.dropout(F.gelu(self.up(x), approximate=self.approximate)))


class Block(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.attention = Attention(config.width, config.heads)
        self.norm2 = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.mlp = MLP(config.width, config.mlp_dim, config.gelu, config.dropout)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, keep: int | None = None) -> Tensor:
        x = x[:, :keep] + self.dropout(self.attention(self.norm1(x), keep))
        return x + self.dropout(self.mlp(self.norm2(x)))


class Encoder(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        before_pool = config.norm == "before_pool"
        self.norm = nn.LayerNorm(config.width, eps=config.norm_eps) if before_pool else nn.Identity()

    def forward(self, x: Tensor, keep: int | None = None) -> Tensor:
        """`keep`: how many leading tokens are read afterwards; the last block computes no others."""
        *blocks, last = self.blocks
        for block in blocks:
            x = block(x)
        return self.norm(last(x, keep))
