"""Attention weights block by block. The network's own forward uses fused attention, which never forms the matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from vitrail.config import ModelConfig
from vitrail.errors import UserError
from vitrail.models.trace import block_hooks
from vitrail.models.vit import VisionTransformer

Visitor = Callable[[int, Tensor], None]  # index of a block, its attention (B, heads, T, T)


def require_vit(net: nn.Module) -> VisionTransformer:
    """Return `net` if it is a Vision Transformer, else raise UserError."""
    if not isinstance(net, VisionTransformer):
        raise UserError("these weights are a ResNet, which has no attention; use the weights of a Vision Transformer")
    return net


def map_query(config: ModelConfig) -> str:
    """The query of a map of the whole network, in words: what the classifier reads."""
    return {
        "token": "the class token",
        "gap": "the mean of the patch tokens",
        "map": "the learned query of the attention pool",
    }[config.pool]


def block_query(config: ModelConfig) -> str:
    """The query of a map of one block, in words."""
    return "the class token" if config.pool == "token" else "all patches, on average"


@contextmanager
def eval_mode(net: nn.Module) -> Iterator[None]:
    """Switch to eval mode (no dropout), then back."""
    training = net.training
    net.eval()
    try:
        yield
    finally:
        net.train(training)


@torch.no_grad()
def visit_attention(net: VisionTransformer, pixels: Tensor, visit: Visitor) -> Tensor:
    """Call `visit` with the attention of each block, one in memory at once. Returns the tokens that the pool reads."""

    def on_block(index: int, x: Tensor, _: Tensor) -> None:
        block = net.blocks[index]
        visit(index, block.attn.weights(block.norm1(x)))

    with eval_mode(net), block_hooks(net, on_block):
        return final_tokens(net, pixels)


def final_tokens(net: VisionTransformer, pixels: Tensor) -> Tensor:
    """The input of the pool: (B, T, D), or (B, 1, D) if it reads only the class token."""
    tokens: list[Tensor] = []
    hook = net.norm.register_forward_hook(lambda _, __, output: tokens.append(output))
    try:
        net.forward_features(pixels)
    finally:
        hook.remove()
    return tokens[0]


def patch_map(net: VisionTransformer, attention: Tensor, tokens: Tensor) -> Tensor:
    """Map (B, h, w) of the patches in what the classifier reads, from attention (B, T, T) of last to input tokens.

    `tokens` is the input of the pool.
    """
    first = net.config.prefix
    if net.attn_pool is not None:
        read = (net.attn_pool.weights(tokens).float().mean(1) @ attention)[:, 0, first:]
    elif net.config.pool == "token":
        read = attention[:, 0, first:]
    else:
        read = attention[:, first:, first:].mean(1)
    return read.unflatten(1, net.config.grid)


def attention_maps(net: VisionTransformer, pixels: Tensor, layers: Sequence[int]) -> np.ndarray:
    """Attention of the `block_query` to the patches in the given blocks, (B, layers, heads, h, w)."""
    first, grid = net.config.prefix, net.config.grid
    with torch.no_grad(), eval_mode(net):
        attention = net.trace(pixels, layers).attention
    count = net.config.blocks
    maps = []
    for index in layers:
        rows = attention[index % count]
        block_map = rows[:, :, 0, first:] if net.config.pool == "token" else rows[:, :, first:, first:].mean(2)
        maps.append(block_map.unflatten(2, grid))
    return torch.stack(maps, dim=1).float().cpu().numpy()
