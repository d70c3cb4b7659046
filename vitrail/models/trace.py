"""What blocks attend to, computed beside the fused path from the inputs that they had: the output does not change."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from vitrail.models.vit import VisionTransformer


@dataclass(frozen=True)
class Trace:
    """What `trace` saw. Tokens are those that come out of a block: `[class token, registers,] patches` in raster
    order."""

    logits: Tensor  # (B, num_classes), bit for bit those of the plain call
    attention: dict[int, Tensor]  # block: (B, heads, T, T); row i says where token i looked
    tokens: dict[int, Tensor]  # block: (B, T, D)


def trace(net: VisionTransformer, pixels: Tensor, layers: Sequence[int] | None = None) -> Trace:
    """Attention and tokens of chosen blocks; only these cost more."""
    count = len(net.blocks)
    if layers is not None and not all(isinstance(index, int) for index in layers):
        raise TypeError("layers are numbers of blocks, such as [0, -1]")
    wrong = [index for index in layers or () if not -count <= index < count]
    if wrong:
        raise ValueError(f"there is no block {wrong[0]}: this network has blocks 0 to {count - 1}")
    chosen = set(range(count) if layers is None else (index % count for index in layers))
    seen: dict[int, tuple[Tensor, Tensor]] = {}

    def see(index: int, x: Tensor, output: Tensor) -> None:
        seen[index] = x, output

    with block_hooks(net, see, chosen):
        logits = net(pixels)
    attention, tokens = {}, {}
    for index, (x, output) in seen.items():
        block = net.blocks[index]
        attention[index] = block.attn.weights(block.norm1(x))
        whole = output.shape[1] == x.shape[1]  # the last block may have computed only what is read
        tokens[index] = output if whole else block.forward(x)
    return Trace(logits, attention, tokens)


@contextmanager
def block_hooks(
    net: VisionTransformer, see: Callable[[int, Tensor, Tensor], None], chosen: Collection[int] | None = None
) -> Iterator[None]:
    """Show `see` the number, input and output of every block, or of those chosen, as this thread computes them."""
    thread = threading.get_ident()

    def watcher(index: int) -> Callable[[Tensor, Tensor], None]:
        return lambda x, output: see(index, x, output) if threading.get_ident() == thread else None

    watched = [(block, watcher(index)) for index, block in enumerate(net.blocks) if chosen is None or index in chosen]
    for block, watch in watched:
        block.watchers.append(watch)
    try:
        yield
    finally:
        for block, watch in watched:
            block.watchers.remove(watch)
