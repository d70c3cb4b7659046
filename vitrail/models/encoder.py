"""The Transformer encoder: pre-norm blocks of self-attention and MLP, each with a residual (Eq. 2 and 3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vitrail.config import ModelConfig
from vitrail.models.initialise import normal_
from vitrail.models.kernels.short_attention import is_short, short_attention
from vitrail.models.pos_embed import RelativePositions

WHOLE = 2**24  # the parts of 1 that a float32 tells apart
Watch = Callable[[int, Tensor, Tensor], None]  # number of a block, what it gets and what it gives


class Attention(nn.Module):
    """Multi-head self-attention (Eq. 5-8); the three input projections are stored as one matrix."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.relative = RelativePositions(config) if config.positions == "relative" else None
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
        qkv = self.qkv(x)
        if keep is None and self.relative is None and is_short(qkv, self.heads):
            return self.out(short_attention(qkv, self.heads))
        q, k, v = self.apart(qkv)
        q = q[:, :, :keep]
        bias = None if self.relative is None else self.relative(q)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)  # scaled by 1/sqrt(D/heads)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values, each (B, heads, T, D/heads)."""
        return self.apart(self.qkv(x))

    def apart(self, qkv: Tensor) -> tuple[Tensor, ...]:
        batch, tokens, width = qkv.shape
        qkv = qkv.view(batch, tokens, 3, self.heads, width // (3 * self.heads))
        # Apart first, then transposed: their gradients then come together as the projection wants them, uncopied.
        return tuple(part.transpose(1, 2) for part in qkv.unbind(2))

    def weights(self, x: Tensor) -> Tensor:
        """The share of each token (last axis) in each new token, (B, heads, T, T): what the fused path never forms."""
        q, k, _ = self.split(x)
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        return (scores if self.relative is None else scores + self.relative(q)).softmax(-1)


class MLP(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.up = nn.Linear(config.width, config.mlp_dim)
        self.down = nn.Linear(config.mlp_dim, config.width)
        self.approximate = {"tanh": "tanh", "erf": "none"}[config.gelu]
        self.dropout = nn.Dropout(config.dropout)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for layer in (self.up, self.down):
            nn.init.xavier_uniform_(layer.weight)
            normal_(layer.bias, std=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.dropout(F.gelu(self.up(x), approximate=self.approximate)))


class LayerScale(nn.Module):
    """A learned gain for each channel of a branch (Touvron et al. 2021)."""

    def __init__(self, width: int, initial: float):
        super().__init__()
        self.initial = initial
        self.gain = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.gain, self.initial)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


class DropPath(nn.Module):
    """Stochastic depth: in training, leave the branch out for some images, and scale the others to make up for it."""

    kept: Tensor

    def __init__(self, rate: float):
        super().__init__()
        # A tensor: blocks that differ in a plain number would be compiled one by one. Of integers: no change of the
        # weights' type makes the rate another.
        self.register_buffer("kept", torch.from_numpy(np.array(round((1 - rate) * WHOLE), np.int64)), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        chance = self.kept / WHOLE
        kept = torch.rand(x.shape[0], 1, 1, device=x.device) < chance
        return x * (kept / chance).to(x.dtype)


class Block(nn.Module):
    """`rate` is the chance that a branch is left out in training."""

    def __init__(self, config: ModelConfig, rate: float = 0.0, attention: type[Attention] = Attention):
        super().__init__()
        width, gain = config.width, config.layer_scale
        self.norm1 = nn.LayerNorm(width, eps=config.norm_eps)
        self.attention = attention(config)
        self.scale1 = nn.Identity() if gain is None else LayerScale(width, gain)
        self.norm2 = nn.LayerNorm(width, eps=config.norm_eps)
        self.mlp = MLP(config)
        self.scale2 = nn.Identity() if gain is None else LayerScale(width, gain)
        self.dropout = nn.Dropout(config.dropout)
        self.drop_path = DropPath(rate) if rate else nn.Identity()

    def forward(self, x: Tensor, keep: int | None = None) -> Tensor:
        x = x[:, :keep] + self.drop_path(self.scale1(self.dropout(self.attention(self.norm1(x), keep))))
        return x + self.drop_path(self.scale2(self.dropout(self.mlp(self.norm2(x)))))


class Encoder(nn.Module):
    def __init__(self, config: ModelConfig, attentions: Sequence[type[Attention]] = (Attention,)):
        """`attentions`: the kinds that follow one another in each of the config's blocks."""
        super().__init__()
        count = config.blocks
        rates = [config.drop_path * index / max(count - 1, 1) for index in range(count)]
        self.blocks = nn.ModuleList(
            Block(config, rate, attentions[index % len(attentions)]) for index, rate in enumerate(rates)
        )
        before_pool = config.norm == "before_pool"
        self.norm = nn.LayerNorm(config.width, eps=config.norm_eps) if before_pool else nn.Identity()
        # How a run may have it; the network is the same.
        self.residual: torch.dtype | None = None  # type of the stream between blocks; none: as it comes
        self.recompute = False  # in training, blocks compute again what the backward pass needs

    def forward(
        self,
        x: Tensor,
        keep: int | None = None,
        positions: Sequence[nn.Module] | None = None,
        watch: Watch | None = None,
    ) -> Tensor:
        """`keep`: how many leading tokens are read afterwards; the last block computes no others.

        `positions` are added to the input of each block; `watch` is shown what each block then gets and gives.
        """
        last = len(self.blocks) - 1
        for index, block in enumerate(self.blocks):
            if positions is not None:
                x = positions[index](x)
            if self.residual is not None:
                x = x.to(self.residual)
            kept = keep if index == last else None
            if self.recompute and self.training:
                given = checkpoint(block, x, kept, use_reentrant=False)
            else:
                given = block(x, kept)
            if watch is not None:
                watch(index, x, given)
            x = given
        return self.norm(x)
