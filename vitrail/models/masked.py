"""Masked patch prediction (section 4.6 and appendix B.1.2 of the paper)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from vitrail.config import ModelConfig
from vitrail.errors import UserError
from vitrail.models.build import Network
from vitrail.models.layers import normal_
from vitrail.models.vit import Block, VisionTransformer

Target = Literal["color", "grid", "pixels"]
COLORS = 512  # three bits for each of red, green and blue
GRID = 4  # the "grid" target has the mean colors of 4x4 cells of a patch
# What the embedding of a patch to predict is replaced by: the learned [mask] embedding, another patch, or nothing
MASK, OTHER, KEPT = 1, 2, 3


class Corruption(NamedTuple):
    """The patches to predict, M per image. All int64 (B, M); patch indices are in raster order.

    A tuple of tensors, so that torch.compile and DistributedDataParallel can pass it on.
    """

    where: Tensor  # patch indices, no duplicates
    kind: Tensor  # MASK, OTHER or KEPT
    source: Tensor  # the patch whose embedding replaces one of kind OTHER


class PredictionHead(nn.Linear):
    """A linear layer with zero initial weights: all colors are equally likely at first."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)


class MaskedPatchNetwork(nn.Module):
    """A Vision Transformer whose encoder predicts corrupted patches.

    Patch embeddings are replaced before position embeddings are added. Class token and registers stay and have no loss.
    In a hybrid, a patch is the area of one token; the stem's receptive field extends beyond it.
    """

    def __init__(self, net: Network, target: Target):
        super().__init__()
        if not isinstance(net, VisionTransformer):
            raise UserError("a ResNet has no patches to mask; choose a Vision Transformer, such as --model S/16")
        if net.config.axial:
            raise UserError(
                "masked patch prediction needs full attention; choose a network without Axial-, such as --model S/16"
            )
        if net.config.num_classes:
            raise ValueError("net must have no classifier: create it with num_classes=0")
        self.net = net
        self.mask = nn.Parameter(torch.empty(net.config.width))
        self.head = PredictionHead(net.config.width, output_size(net.config, target))
        # These get no gradients here, and DistributedDataParallel would wait for them.
        net.pre_logits.requires_grad_(False)
        if net.attn_pool is not None:
            net.attn_pool.requires_grad_(False)
        net.compute_all_tokens()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        normal_(self.mask, std=0.02)  # as in BERT

    @property
    def blocks(self) -> Sequence[Block]:
        return self.net.blocks

    def param_depth(self, name: str) -> int:
        if name.startswith("net."):
            return self.net.param_depth(name.removeprefix("net."))
        return 0 if name == "mask" else len(self.blocks) + 1

    def hidden_matrices(self, name: str) -> int:
        return self.net.hidden_matrices(name.removeprefix("net.")) if name.startswith("net.") else 0

    def set_grad_checkpointing(self, enable: bool) -> None:
        self.net.set_grad_checkpointing(enable)

    def set_residual_dtype(self, dtype: torch.dtype | None) -> None:
        self.net.set_residual_dtype(dtype)

    def forward(self, pixels: Tensor, corruption: Corruption) -> Tensor:
        """(B, C, H, W) normalised pixels -> predictions for the corrupted patches, (B, M, outputs)."""
        net = self.net
        x = self.corrupt(net.patch_embed(pixels), corruption)  # (B, N, D)
        x = net.add_positions(net.add_prefix_tokens(x))  # (B, T, D)
        for block in net.blocks:
            x = block(x)
        corrupted = _rows(net.norm(x), corruption.where + net.config.prefix)  # (B, M, D)
        return self.head(net.fc_norm(corrupted))  # either norm or fc_norm is the identity

    def corrupt(self, patches: Tensor, corruption: Corruption) -> Tensor:
        """Replace the embeddings of corrupted patches: (B, N, D) -> (B, N, D)."""
        where, kind, source = corruption
        indices = torch.arange(patches.shape[1], device=patches.device).expand(len(patches), -1)  # (B, N)
        sources = indices.scatter(1, where, torch.where(kind == OTHER, source, where))
        masked = torch.zeros_like(indices, dtype=torch.bool).scatter(1, where, kind == MASK)
        return torch.where(masked[..., None], self.mask.to(patches.dtype), _rows(patches, sources))


def output_size(config: ModelConfig, target: Target) -> int:
    """Number of outputs per patch; pixels are ordered (C, height, width)."""
    if target == "pixels":
        return config.cell[0] * config.cell[1] * config.channels
    return COLORS if target == "color" else GRID * GRID * COLORS


def _rows(tokens: Tensor, index: Tensor) -> Tensor:
    """Select tokens by index: (B, T, D) and (B, M) -> (B, M, D).

    Row indexing instead of torch.gather, whose backward pass is slow in deterministic mode.
    """
    first = torch.arange(len(tokens), device=tokens.device)[:, None] * tokens.shape[1]
    return tokens.flatten(0, 1)[(first + index).flatten()].unflatten(0, index.shape)
