"""What a network attends to, block by block, beside a fused path that never forms the matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from vitrail.config import ModelConfig
from vitrail.errors import UserError
from vitrail.models.trace import watched_blocks
from vitrail.models.vit import VisionTransformer

See = Callable[[int, Tensor], None]  # number of a block, its attention (B, heads, T, T)


def require_vit(net: nn.Module) -> VisionTransformer:
    if not isinstance(net, VisionTransformer):
        raise UserError("these weights are a ResNet's, which has no attention: explain takes a Vision Transformer")
    return net


def map_query(config: ModelConfig) -> str:
    """Whose view of the image a map of the whole network shows: what the classifier reads."""
    return {
        "token": "the class token",
        "gap": "the mean of the patch tokens",
        "map": "the learned query of the attention pool",
    }[config.pool]


def block_query(config: ModelConfig) -> str:
    """Whose view a map of one block shows."""
    return "the class token" if config.pool == "token" else "all patches, on average"


@contextmanager
def eval_mode(net: nn.Module) -> Iterator[None]:
    """Without dropout, whatever the network was doing."""
    training = net.training
    net.eval()
    try:
        yield
    finally:
        net.train(training)


@torch.no_grad()
def visit_attention(net: VisionTransformer, pixels: Tensor, see: See) -> Tensor:
    """Show `see` the attention of each block in turn, one at a time in memory; returns the tokens the pool reads."""

    def watch(index: int, x: Tensor, _: Tensor) -> None:
        block = net.blocks[index]
        see(index, block.attn.weights(block.norm1(x)))

    with eval_mode(net), watched_blocks(net, watch):
        return final_tokens(net, pixels)


def final_tokens(net: VisionTransformer, pixels: Tensor) -> Tensor:
    """What the pool is given: (B, T, D), or (B, 1, D) where it reads the class token alone."""
    found: list[Tensor] = []
    hook = net.norm.register_forward_hook(lambda _, __, output: found.append(output))
    try:
        net.forward_features(pixels)
    finally:
        hook.remove()
    return found[0]


def patch_map(net: VisionTransformer, shares: Tensor, tokens: Tensor) -> Tensor:
    """Of the shares of input tokens in the last ones, (B, T, T), those of the patches in what the classifier reads:
    (B, h, w). `tokens` are what the pool is given."""
    first = net.config.prefix
    if net.attn_pool is not None:
        read = (net.attn_pool.weights(tokens).float().mean(1) @ shares)[:, 0, first:]
    elif net.config.pool == "token":
        read = shares[:, 0, first:]
    else:
        read = shares[:, first:, first:].mean(1)
    return read.unflatten(1, net.config.grid)


def attention_maps(net: VisionTransformer, pixels: Tensor, layers: Sequence[int]) -> np.ndarray:
    """Where `block_query` looks in chosen blocks: (B, layers, heads, h, w), the shares of the patches."""
    first, grid = net.config.prefix, net.config.grid
    with torch.no_grad(), eval_mode(net):
        seen = net.trace(pixels, layers).attention
    count = net.config.blocks
    maps = []
    for index in layers:
        rows = seen[index % count]
        one = rows[:, :, 0, first:] if net.config.pool == "token" else rows[:, :, first:, first:].mean(2)
        maps.append(one.unflatten(2, grid))
    return torch.stack(maps, dim=1).float().cpu().numpy()
