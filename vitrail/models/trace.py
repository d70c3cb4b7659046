"""Recording attention weights and tokens of blocks. The attention is recomputed from the inputs of each block, so the
fused forward pass and its output do not change."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from vitrail.models.vit import VisionTransformer


@dataclass(frozen=True)
class Trace:
    """The result of `trace`. Token order is `[class token, registers,] patches`, patches in raster order."""

    logits: Tensor  # (B, num_classes), bit-identical to a plain call
    attention: dict[int, Tensor]  # block -> (B, heads, T, T); row i: the attention of token i to every token
    tokens: dict[int, Tensor]  # block -> output tokens (B, T, D)


def trace(net: VisionTransformer, pixels: Tensor, layers: Sequence[int] | None = None) -> Trace:
    """Record attention and tokens of the given blocks (all if None); the other blocks cost nothing extra."""
    count = len(net.blocks)
    if layers is not None and not all(isinstance(index, int) for index in layers):
        raise TypeError("layers must be block indices, such as [0, -1]")
    wrong = [index for index in layers or () if not -count <= index < count]
    if wrong:
        raise ValueError(f"layers has {wrong[0]}, but this network has blocks 0 to {count - 1}")
    chosen = set(range(count) if layers is None else (index % count for index in layers))
    recorded: dict[int, tuple[Tensor, Tensor]] = {}

    def record(index: int, x: Tensor, output: Tensor) -> None:
        recorded[index] = x, output

    with block_hooks(net, record, chosen):
        logits = net(pixels)
    attention, tokens = {}, {}
    for index, (x, output) in recorded.items():
        block = net.blocks[index]
        attention[index] = block.attn.weights(block.norm1(x))
        complete = output.shape[1] == x.shape[1]  # the last block may compute only the pooled token
        tokens[index] = output if complete else block.forward(x)
    return Trace(logits, attention, tokens)


@contextmanager
def block_hooks(
    net: VisionTransformer, hook: Callable[[int, Tensor, Tensor], None], chosen: Collection[int] | None = None
) -> Iterator[None]:
    """Call `hook(index, input, output)` after every block, or after the `chosen` ones, that this thread runs."""
    thread = threading.get_ident()

    def block_hook(index: int) -> Callable[[Tensor, Tensor], None]:
        return lambda x, output: hook(index, x, output) if threading.get_ident() == thread else None

    hooks = [(block, block_hook(index)) for index, block in enumerate(net.blocks) if chosen is None or index in chosen]
    for block, registered in hooks:
        block.hooks.append(registered)
    try:
        yield
    finally:
        for block, registered in hooks:
            block.hooks.remove(registered)
