"""The Vision Transformer of the paper's Figure 1. Start reading at `VisionTransformer.forward`.

Shapes in comments: B images, N patches, T tokens (class token, registers, patches), D embedding width. Parameters have
timm's names where timm has the same part.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vitrail.config import ModelConfig
from vitrail.models.kernels.short_attention import short_attention, supports_short_attention
from vitrail.models.layers import ClassifierHead, DropPath, LayerScale, lecun_normal_, normal_
from vitrail.models.pos_embed import RelativePositions, build_pos_embed
from vitrail.models.resnet import HybridStem

if TYPE_CHECKING:
    from vitrail.models.trace import Trace


class VisionTransformer(nn.Module):
    """A Vision Transformer, also with the convolutional stem or the axial attention of the paper's variants."""

    blocks: Sequence[Block]  # a ModuleList; annotated for type checkers

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        width, attention = config.width, _attention_types(config)
        rates = [config.drop_path * index / max(config.blocks - 1, 1) for index in range(config.blocks)]
        after_pool = config.norm == "after_pool"

        self.patch_embed = PatchEmbed(config)
        self.cls_token = nn.Parameter(torch.empty(1, 1, width)) if config.class_token else None
        self.reg_token = nn.Parameter(torch.empty(1, config.registers, width)) if config.registers else None
        self.reset_parameters()
        self.pos_embed = build_pos_embed(config)
        self.pos_drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(  # type: ignore[assignment]
            Block(config, rate, attention[index % len(attention)]) for index, rate in enumerate(rates)
        )
        self.norm = nn.Identity() if after_pool else nn.LayerNorm(width, eps=config.norm_eps)
        self.fc_norm = nn.LayerNorm(width, eps=config.norm_eps) if after_pool else nn.Identity()
        self.attn_pool = AttentionPool(config) if config.pool == "map" else None
        self.pre_logits = PreLogits(width, config.representation) if config.representation else nn.Identity()
        features = config.representation or width
        self.head = (
            ClassifierHead(features, config.num_classes, config.head_bias) if config.num_classes else nn.Identity()
        )

        self.num_prefix_tokens = config.prefix
        self.pools_class_token = config.pool == "token"
        self.positions_at_blocks = config.positions_at != "stem"
        if self.pools_class_token:
            self.blocks[-1].keep = 1  # the head needs no other token of the last block
        if self.positions_at_blocks:
            shared = [self.pos_embed] * len(self.blocks)
            modules = self.pos_embed if isinstance(self.pos_embed, nn.ModuleList) else shared
            for block, positions in zip(self.blocks, modules, strict=True):
                block.positions = [positions]

    def reset_parameters(self) -> None:
        """Initialize class token and registers; submodules initialize themselves."""
        if self.cls_token is not None:
            nn.init.zeros_(self.cls_token)
        if self.reg_token is not None:
            normal_(self.reg_token, std=0.02)  # equal registers would get equal gradients and stay equal

    def forward(self, pixels: Tensor) -> Tensor:
        """(B, C, H, W) normalised pixels -> (B, num_classes) logits."""
        return self.head(self.forward_features(pixels))

    def forward_features(self, pixels: Tensor) -> Tensor:
        """Compute the features that the classifier takes as input.

        Parameters
        ----------
        pixels
            Normalised pixels (B, C, H, W).

        Returns
        -------
        Tensor
            (B, D), where D is the width of the network or of its representation layer.

        Examples
        --------
        >>> features = net.forward_features(torch.zeros(1, 3, 224, 224))
        """
        x = self.patch_embed(pixels)  # (B, N, D)
        x = self.add_prefix_tokens(x)  # (B, T, D)
        x = self.add_positions(x)
        for block in self.blocks:
            x = block(x)  # Block.forward; Block.__call__ adds positions of its own, checkpointing and hooks, if set
        return self.pre_logits(self.pool(self.norm(x)))

    def add_prefix_tokens(self, patches: Tensor) -> Tensor:
        """Prepend class token and registers, if any: (B, N, D) -> (B, T, D)."""
        count = patches.shape[0]
        prefix = [part.expand(count, -1, -1) for part in (self.cls_token, self.reg_token) if part is not None]
        # Contiguous: sums keep the memory layout of their first term, so all later activations would be transposed.
        return torch.cat([*prefix, patches], dim=1) if prefix else patches.contiguous()

    def add_positions(self, x: Tensor) -> Tensor:
        """Add the position embedding, unless every block adds it."""
        if not self.positions_at_blocks:
            x = self.pos_embed(x)
        return self.pos_drop(x)

    def pool(self, x: Tensor) -> Tensor:
        """Pool tokens (B, T, D) to one vector per image, (B, D) (Eq. 4)."""
        if self.attn_pool is not None:
            x = self.attn_pool(x)
        else:
            x = x[:, 0] if self.pools_class_token else x[:, self.num_prefix_tokens :].mean(dim=1)
        return self.fc_norm(x)

    def trace(self, pixels: Tensor, layers: Sequence[int] | None = None) -> Trace:
        """Run the network and record attention weights and output tokens of blocks.

        Parameters
        ----------
        pixels
            Normalised pixels (B, C, H, W).
        layers
            Block indices from 0; -1 is the last block. None means all blocks.

        Returns
        -------
        Trace
            `logits`, bit-identical to a plain call; `attention`, block -> (B, heads, T, T), where row i has the weights
            with which token i attends to every token; `tokens`, block -> (B, T, D). The order of tokens is class
            token, registers, patches in raster order.

        Examples
        --------
        >>> last = net.trace(pixels, layers=[-1]).attention[len(net.blocks) - 1]
        """
        from vitrail.models.trace import trace

        return trace(self, pixels, layers)

    def compute_all_tokens(self) -> None:
        """Let the last block compute all tokens, not only those that `pool` needs."""
        self.blocks[-1].keep = None

    # Methods that training calls on any network that has them.

    def param_depth(self, name: str) -> int:
        """Depth of a parameter, for layer decay: 0 before the blocks, i + 1 in block i, blocks + 1 after them."""
        if match := re.match(r"(?:blocks|pos_embed)\.(\d+)\.", name):
            return int(match[1]) + 1
        is_embedding = name.startswith(("patch_embed.", "cls_token", "reg_token", "pos_embed."))
        return 0 if is_embedding else len(self.blocks) + 1

    def hidden_matrices(self, name: str) -> int:
        """Number of hidden matrices stacked in a parameter (for Muon); 0 if it is not a hidden matrix."""
        match = re.match(r"(?:blocks\.\d+|attn_pool)\.(?:\w+\.)*(qkv|kv|q|proj|fc1|fc2)\.weight$", name)
        return {"qkv": 3, "kv": 2}.get(match[1], 1) if match else 0

    def set_grad_checkpointing(self, enable: bool) -> None:
        """Recompute the activations of blocks in the backward pass instead of storing them."""
        for block in self.blocks:
            block.grad_checkpointing = enable

    def set_residual_dtype(self, dtype: torch.dtype | None) -> None:
        """Set the dtype of the residual stream; None keeps that of the input."""
        for block in self.blocks:
            block.residual_dtype = dtype


def _attention_types(config: ModelConfig) -> Sequence[type[Attention]]:
    """The attention classes that the blocks alternate between."""
    if not config.axial:
        return (Attention,)
    from vitrail.models.axial import ColumnAttention, RowAttention

    return (RowAttention, ColumnAttention)


class PatchEmbed(nn.Module):
    """Cut images into patches and project each to a token (Eq. 1). A hybrid cuts the feature map of its stem."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.image_size = config.image_size
        self.stem = HybridStem(config.stem, config.channels) if config.stem else None
        channels = config.stem.features if config.stem else config.channels
        # The linear map E of Eq. 1. Stored as a convolution, as in timm, but computed as a matrix product, which is up
        # to 2.4 times faster on CPUs.
        self.proj = nn.Conv2d(channels, config.width, config.patch, stride=config.patch)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        lecun_normal_(self.proj.weight, fan_in=self.proj.weight[0].numel())
        nn.init.zeros_(self.proj.bias)  # type: ignore[arg-type]

    def forward(self, pixels: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, N, D)."""
        if tuple(pixels.shape[-2:]) != self.image_size:
            raise ValueError(
                f"the network takes {self.image_size[0]}x{self.image_size[1]} images, "
                f"not {pixels.shape[-2]}x{pixels.shape[-1]}"
            )
        features = pixels if self.stem is None else self.stem(pixels)
        height, width = self.proj.kernel_size
        patches = features.unflatten(3, (-1, width)).unflatten(2, (-1, height))  # (B, C, h, height, w, width)
        flat = patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)  # (B, N = h*w, C*height*width)
        tokens = F.linear(flat, self.proj.weight.flatten(1), self.proj.bias)
        return tokens.to(self.proj.weight.dtype)  # keeps the residual stream in float32 under autocast


class Block(nn.Module):
    """Pre-norm self-attention and MLP, each with a residual connection (Eq. 2 and 3).

    `rate` is the probability of dropping a residual branch in training (stochastic depth).
    """

    def __init__(self, config: ModelConfig, rate: float, attention: type[Attention]):
        super().__init__()
        width, gamma = config.width, config.layer_scale
        self.norm1 = nn.LayerNorm(width, eps=config.norm_eps)
        self.attn = attention(config)
        self.ls1 = nn.Identity() if gamma is None else LayerScale(width, gamma)
        self.norm2 = nn.LayerNorm(width, eps=config.norm_eps)
        self.mlp = MLP(config)
        self.ls2 = nn.Identity() if gamma is None else LayerScale(width, gamma)
        self.dropout = nn.Dropout(config.dropout)
        self.drop_path = DropPath(rate) if rate else nn.Identity()
        # Used in __call__.
        self.keep: int | None = None  # number of leading tokens to compute; None: all
        self.positions: list[nn.Module] = []  # a list, so that it is not registered as a submodule
        self.residual_dtype: torch.dtype | None = None
        self.grad_checkpointing = False
        self.hooks: list[Callable[[Tensor, Tensor], None]] = []  # called with input and output

    def forward(self, x: Tensor, keep: int | None = None) -> Tensor:
        """(B, T, D) -> (B, T, D), or (B, keep, D): only the first `keep` tokens."""
        x = x[:, :keep] + self.drop_path(self.ls1(self.dropout(self.attn(self.norm1(x), keep))))
        return x + self.drop_path(self.ls2(self.dropout(self.mlp(self.norm2(x)))))

    def __call__(self, x: Tensor) -> Tensor:
        """Run `forward` with per-block positions, residual dtype, gradient checkpointing and hooks, if set.

        This wrapper is not part of what torch.compile compiles.
        """
        for positions in self.positions:
            x = positions(x)
        if self.residual_dtype is not None:
            x = x.to(self.residual_dtype)
        if self.grad_checkpointing and self.training:
            output: Tensor = checkpoint(super().__call__, x, self.keep, use_reentrant=False)
        else:
            output = super().__call__(x, self.keep)
        for hook in self.hooks:
            hook(x, output)
        return output


class Attention(nn.Module):
    """Multi-head self-attention (Eq. 5-8). Query, key and value projections are stored as one matrix."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.relative = RelativePositions(config) if config.positions == "relative" else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        # Xavier for each D x D matrix; for the stacked 3D x D matrix it would be smaller by a factor of 0.707.
        limit = (3.0 / self.proj.in_features) ** 0.5
        nn.init.uniform_(self.qkv.weight, -limit, limit)
        nn.init.uniform_(self.proj.weight, -limit, limit)
        nn.init.zeros_(self.qkv.bias)
        nn.init.zeros_(self.proj.bias)

    def forward(self, x: Tensor, keep: int | None = None) -> Tensor:
        """Attend to all tokens of `x`: (B, T, D) -> (B, T, D), or (B, keep, D)."""
        qkv = self.qkv(x)  # (B, T, 3 D)
        if keep is None and self.relative is None and supports_short_attention(qkv, self.heads):
            return self.proj(short_attention(qkv, self.heads))
        q, k, v = self.split(qkv)
        q = q[:, :, :keep]
        bias = None if self.relative is None else self.relative(q)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)  # scaled by 1/sqrt(D/heads)
        return self.proj(mixed.transpose(1, 2).flatten(2))

    def split(self, qkv: Tensor) -> tuple[Tensor, ...]:
        """(B, T, 3 D) -> query, key, value, each (B, heads, T, D/heads)."""
        batch, tokens, width = qkv.shape
        qkv = qkv.view(batch, tokens, 3, self.heads, width // (3 * self.heads))
        # unbind before transpose: the gradients then have the layout of the projection and are not copied.
        return tuple(part.transpose(1, 2) for part in qkv.unbind(2))

    def weights(self, x: Tensor) -> Tensor:
        """The attention matrix (B, heads, T, T), which the fused path never materializes."""
        q, k, _ = self.split(self.qkv(x))
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        return (scores if self.relative is None else scores + self.relative(q)).softmax(-1)


class MLP(nn.Module):
    """Two linear layers with GELU between them."""

    def __init__(self, config: ModelConfig, dropout: float | None = None):
        super().__init__()
        self.fc1 = nn.Linear(config.width, config.mlp_dim)
        self.fc2 = nn.Linear(config.mlp_dim, config.width)
        self.approximate = {"tanh": "tanh", "erf": "none"}[config.gelu]
        self.dropout = nn.Dropout(config.dropout if dropout is None else dropout)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for layer in (self.fc1, self.fc2):
            nn.init.xavier_uniform_(layer.weight)
            normal_(layer.bias, std=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.dropout(F.gelu(self.fc1(x), approximate=self.approximate)))


class AttentionPool(nn.Module):
    """big_vision's MAP head: a learned query attends to all tokens, followed by a residual MLP."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.latent = nn.Parameter(torch.empty(1, 1, width))
        self.q = nn.Linear(width, width)
        self.kv = nn.Linear(width, 2 * width)
        self.proj = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width, eps=config.norm_eps)
        self.mlp = MLP(config, dropout=0.0)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        # Xavier as in flax, where a (1, 1, D) tensor has fan-in 1 and fan-out D; torch would use D for both.
        limit = (6.0 / (1 + self.latent.shape[-1])) ** 0.5
        nn.init.uniform_(self.latent, -limit, limit)
        limit = (3.0 / self.proj.in_features) ** 0.5  # Xavier for each D x D matrix
        for layer in (self.q, self.kv, self.proj):
            nn.init.uniform_(layer.weight, -limit, limit)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, D)."""
        mixed = F.scaled_dot_product_attention(*self.split(x))  # (B, heads, 1, D/heads)
        pooled = self.proj(mixed.flatten(1))
        return pooled + self.mlp(self.norm(pooled))

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query (B, heads, 1, D/heads), key and value (B, heads, T, D/heads)."""
        batch, count, width = x.shape
        size = width // self.heads
        q = self.q(self.latent).view(1, 1, self.heads, size).transpose(1, 2)
        k, v = self.kv(x).view(batch, count, 2, self.heads, size).transpose(1, 3).unbind(2)
        return q.expand(batch, -1, -1, -1), k, v

    def weights(self, x: Tensor) -> Tensor:
        """The attention weights of the query, (B, heads, 1, T)."""
        q, k, _ = self.split(x)
        return (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(-1)


class PreLogits(nn.Module):
    """The representation layer: a hidden tanh layer that the paper uses in pre-training and drops in fine-tuning."""

    def __init__(self, width: int, size: int):
        super().__init__()
        self.fc = nn.Linear(width, size)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        lecun_normal_(self.fc.weight, fan_in=self.fc.in_features)
        nn.init.zeros_(self.fc.bias)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.fc(x))
