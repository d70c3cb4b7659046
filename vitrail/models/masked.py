"""A Vision Transformer that predicts patches it does not see (section 4.6 and appendix B.1.2 of the paper)."""

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
GRID = 4  # the "grid" target tells the colours of 4x4 parts of a patch
# What a patch that is to be predicted looks like: the learned [mask] embedding, another patch, or itself
MASK, OTHER, KEPT = 1, 2, 3


class Corruption(NamedTuple):
    """The patches that are to be predicted, as many of each image: all int64 (B, M), numbered in raster order.

    A tuple of tensors, which whatever wraps a network (compiler, processes) knows how to pass on.
    """

    where: Tensor  # which patches, none twice
    kind: Tensor  # MASK, OTHER or KEPT
    source: Tensor  # the patch whose embedding one of kind OTHER has


class PredictionHead(nn.Linear):
    """Zero weights at the start, as the classifier has them: every colour is as likely as any other."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)


class MaskedPatchNetwork(nn.Module):
    """Embeddings of some patches are replaced before positions are added; what the encoder makes of each is read.

    Class token and registers stay, and nothing reads them. In a hybrid a patch is what one token stands for, and the
    convolutions before it have seen beyond its border.
    """

    def __init__(self, net: Network, target: Target):
        super().__init__()
        if not isinstance(net, VisionTransformer):
            raise UserError("a ResNet has no patches to mask: choose a Vision Transformer for masked-patch prediction")
        if net.config.axial:
            raise UserError("an axial network cannot predict masked patches: choose one with full attention")
        if net.config.num_classes:
            raise ValueError("masked patches are predicted by a network without classifier: num_classes is 0")
        self.net = net
        self.mask = nn.Parameter(torch.empty(net.config.width))
        self.head = PredictionHead(net.config.width, output_size(net.config, target))
        # What only a whole image needs learns nothing here; processes that wait for its gradients would wait for ever.
        net.pre_logits.requires_grad_(False)
        if net.attn_pool is not None:
            net.attn_pool.requires_grad_(False)
        net.read_every_token()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        normal_(self.mask, std=0.02)  # as BERT's

    @property
    def blocks(self) -> Sequence[Block]:
        return self.net.blocks

    def param_depth(self, name: str) -> int:
        if name.startswith("net."):
            return self.net.param_depth(name.removeprefix("net."))
        return 0 if name == "mask" else len(self.blocks) + 1

    def hidden_matrices(self, name: str) -> int:
        return self.net.hidden_matrices(name.removeprefix("net.")) if name.startswith("net.") else 0

    def set_grad_checkpointing(self, recompute: bool) -> None:
        self.net.set_grad_checkpointing(recompute)

    def set_residual_dtype(self, dtype: torch.dtype | None) -> None:
        self.net.set_residual_dtype(dtype)

    def forward(self, pixels: Tensor, corruption: Corruption) -> Tensor:
        """(B, C, H, W) normalised pixels -> predictions for the corrupted patches, (B, M, outputs)."""
        net = self.net
        x = self.corrupt(net.patch_embed(pixels), corruption)  # (B, N, D)
        x = net.add_positions(net.add_prefix_tokens(x))  # (B, T, D)
        for block in net.blocks:
            x = block(x)
        read = _rows(net.norm(x), corruption.where + net.config.prefix)  # (B, M, D)
        return self.head(net.fc_norm(read))  # the last norm, wherever the network has it

    def corrupt(self, patches: Tensor, corruption: Corruption) -> Tensor:
        """Patch embeddings (B, N, D) with those of the corruption replaced."""
        where, kind, source = corruption
        own = torch.arange(patches.shape[1], device=patches.device).expand(len(patches), -1)  # (B, N)
        taken = own.scatter(1, where, torch.where(kind == OTHER, source, where))
        masked = torch.zeros_like(own, dtype=torch.bool).scatter(1, where, kind == MASK)
        return torch.where(masked[..., None], self.mask.to(patches.dtype), _rows(patches, taken))


def output_size(config: ModelConfig, target: Target) -> int:
    """How many numbers tell of one patch; pixels are in the order (C, height, width)."""
    if target == "pixels":
        return config.cell[0] * config.cell[1] * config.channels
    return COLORS if target == "color" else GRID * GRID * COLORS


def _rows(tokens: Tensor, index: Tensor) -> Tensor:
    """Of tokens (B, T, D) those that `index` (B, M) names. By whole rows: gathered number by number, their gradients
    would be sorted number by number wherever they have to repeat bit for bit."""
    first = torch.arange(len(tokens), device=tokens.device)[:, None] * tokens.shape[1]
    return tokens.flatten(0, 1)[(first + index).flatten()].unflatten(0, index.shape)
