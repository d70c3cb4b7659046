"""The cost of a network, computed from its config: parameters, multiply-adds, memory and memory traffic of training.

Parameters and multiply-adds are exact; `estimate` derives memory and time from the rest. Bytes are per image under
bfloat16 autocast: residual stream and norms in float32, matrix products in bfloat16.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from vitrail.config import ModelConfig, NetworkConfig, ResNetConfig, StemConfig

TILE = 128  # tokens per tile of fused attention


@dataclass(frozen=True)
class Cost:
    """Cost per image. All fields but parameters and macs are for a training step, forward and backward."""

    parameters: int = 0
    macs: int = 0  # multiply-adds of the forward pass
    fused: int = 0  # the part of macs in fused attention
    attention_step_macs: int = 0  # `fused` in a training step, with padded tiles and recomputed scores
    matmul_bytes: float = 0  # bytes that matrix products and convolutions read and write
    elementwise_bytes: float = 0  # bytes that all other operations read and write
    saved: float = 0  # bytes stored from the forward to the backward pass
    transient_bytes: float = 0  # bytes of temporary tensors while all of these are stored
    kernels: float = 0  # kernel launches, independent of the batch

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    def __mul__(self, times: int) -> Cost:
        return Cost(*(getattr(self, field.name) * times for field in fields(self)))


def count_parameters(config: NetworkConfig) -> int:
    """Number of parameters (exact)."""
    return cost(config).parameters


def count_macs(config: NetworkConfig) -> int:
    """Multiply-adds of one image's forward pass, counted as in the paper; training needs three times as many."""
    return cost(config).macs


def cost(config: NetworkConfig, *, whole: bool = True) -> Cost:
    """The cost of a network. With `whole=False`, the last block computes only the pooled token, as vitrail does."""
    if isinstance(config, ResNetConfig):
        return _resnet(config)
    short = config.pool == "token" and not whole
    total = _tokens(config) + _block(config) * (config.blocks - int(short))
    if short:
        total += _block(config, read=1)
    return total + _pool(config) + _head(config)


def _linear(inputs: int, outputs: int, tokens: int) -> Cost:
    """A linear layer: its operands are read or written three times, two bytes each; the input is stored."""
    passed = 2 * 3 * tokens * (inputs + outputs)
    bias = 2 * tokens * outputs
    macs = tokens * inputs * outputs
    return Cost(
        inputs * outputs + outputs,
        macs,
        matmul_bytes=passed,
        elementwise_bytes=bias,
        saved=2 * tokens * inputs,
        kernels=7,
    )


def _layer_norm(width: int, tokens: int) -> Cost:
    """In float32, with a cast to bfloat16: 14 bytes per value forward, 26 backward; the input is stored."""
    return Cost(2 * width, elementwise_bytes=40 * tokens * width, saved=4 * tokens * width, kernels=5)


def _tokens(config: ModelConfig) -> Cost:
    """Stem, patch embedding, class token, registers and position embedding."""
    width, count = config.width, config.sequence
    patches = config.grid[0] * config.grid[1]
    image = config.channels * config.image_size[0] * config.image_size[1]
    inputs = config.stem.features if config.stem else config.channels
    total = _linear(inputs * config.patch[0] * config.patch[1], width, patches)
    transient_bytes = 8 * count * width  # gradients of the stream
    elementwise_bytes = 4 * image + 40 * count * width
    total += Cost(
        config.prefix * width,
        elementwise_bytes=elementwise_bytes,
        saved=4 * image,
        transient_bytes=transient_bytes,
        kernels=20,
    )
    if config.stem:
        total += _stem(config.stem, config)
    return total + _positions(config)


def _positions(config: ModelConfig) -> Cost:
    patches, width = config.grid[0] * config.grid[1], config.width
    rows = {
        "1d": patches + config.prefix * int(config.prefix_positions),
        "2d": (config.grid[0] + config.grid[1]) / 2,  # half of the width each
    }.get(config.positions, 0)
    tables = config.blocks if config.positions_at == "layers" else 1
    added = 0 if config.positions_at == "stem" else config.blocks
    return Cost(int(rows * width) * tables, elementwise_bytes=8 * config.sequence * width * added, kernels=4 * added)


def _block(config: ModelConfig, read: int | None = None) -> Cost:
    """Attention and MLP, each with norm and residual. `read`: number of output tokens that are computed."""
    width, hidden, count = config.width, config.mlp_dim, config.sequence
    out = count if read is None else read
    total = _layer_norm(width, count) + _linear(width, 3 * width, count) + _attention(config, out)
    total += _linear(width, width, out) + _residual(width, out)
    total += _layer_norm(width, out) + _mlp(width, hidden, out) + _residual(width, out)
    if config.layer_scale is not None:  # multiplication with a vector: 10 bytes per value forward, 22 backward
        total += Cost(2 * width, elementwise_bytes=64 * out * width, saved=4 * out * width, kernels=12)
    if config.drop_path:
        total += Cost(elementwise_bytes=16 * out * width, kernels=8)
    if config.dropout:
        dropped = out * (2 * width + hidden)
        total += Cost(elementwise_bytes=10 * dropped, saved=dropped, kernels=6)
    return total


def _residual(width: int, tokens: int) -> Cost:
    """The addition to the residual stream: 10 bytes per value forward, 18 backward."""
    return Cost(elementwise_bytes=28 * tokens * width, kernels=4)


def _mlp(width: int, hidden: int, tokens: int) -> Cost:
    gelu = Cost(elementwise_bytes=10 * tokens * hidden, saved=2 * tokens * hidden, kernels=2)
    return _linear(width, hidden, tokens) + gelu + _linear(hidden, width, tokens)


def _attention(config: ModelConfig, queries: int) -> Cost:
    """Scores, softmax and weighted sum. Fused attention recomputes scores: a step has 3.5 times the forward macs."""
    width, heads, count = config.width, config.heads, config.sequence
    kept = 6 * count * width + 4 * heads * queries  # q, k, v and one number per row of scores
    packed = 12 * count * width  # concatenation of the gradients of q, k and v
    if config.axial:
        side = sum(config.grid) / 2  # mean of both directions; unfused, so scores are stored
        scores = heads * count * side
        products = round(2 * count * width * side)
        copies = count * width  # scaled and contiguous q, k and v
        elementwise_bytes, saved = packed + 280 * copies + 40 * scores, kept + 6 * copies + 6 * scores
        return Cost(macs=products, elementwise_bytes=elementwise_bytes, saved=saved, kernels=30)
    products = 2 * queries * count * width
    tiles = (-(-queries // TILE) * TILE) * (-(-count // TILE) * TILE)
    total = Cost(
        macs=products,
        fused=products,
        attention_step_macs=7 * tiles * width,
        elementwise_bytes=packed,
        saved=kept,
        kernels=12,
    )
    if config.positions == "relative":
        offsets, outside = 2 * config.grid[0] * config.grid[1] - 1, 3 if config.prefix else 0
        inside = max(queries - config.prefix, 0)
        products = (inside * offsets + queries * outside) * width
        made, scores = heads * inside * offsets, heads * queries * count
        table = (offsets + outside) * (width // heads)
        elementwise_bytes, saved = 48 * (made + scores), 2 * count * width + 2.6 * scores
        total += Cost(table, products, elementwise_bytes=elementwise_bytes, saved=saved, kernels=40)
    return total


def _pool(config: ModelConfig) -> Cost:
    """The last norm and the pooling."""
    width, count = config.width, config.sequence
    if config.pool == "token" or config.norm == "after_pool":
        norm = _layer_norm(width, 1)
    else:
        norm = _layer_norm(width, count)
    if config.pool != "map":
        return norm + Cost(elementwise_bytes=8 * width * (1 if config.pool == "token" else count), kernels=4)
    attention = Cost(width, 2 * count * width, kernels=20) + _linear(width, width, 1) + _linear(width, 2 * width, count)
    return norm + attention + _linear(width, width, 1) + _layer_norm(width, 1) + _mlp(width, config.mlp_dim, 1)


def _head(config: ModelConfig) -> Cost:
    layers = _linear(config.width, config.representation, 1) if config.representation else Cost()
    features = config.representation or config.width
    return layers + _linear(features, config.num_classes, 1) if config.num_classes else layers


def _convolution(inputs: int, outputs: int, kernel: int, before: int, after: int) -> Cost:
    """A weight-standardized convolution from a map of `before` pixels to one of `after`."""
    weights = kernel**2 * inputs * outputs
    passed = 2 * 3 * (before * inputs + after * outputs)
    return Cost(weights, after * weights, matmul_bytes=passed, saved=2 * before * inputs, kernels=10)


def _group_norm(channels: int, values: int, relu: bool = True) -> Cost:
    """In float32, with casts of input and output. The input is stored, and the output of the ReLU."""
    return Cost(
        2 * channels, elementwise_bytes=(86 if relu else 68) * values, saved=(8 if relu else 4) * values, kernels=6
    )


def _stem(config: StemConfig, net: ModelConfig) -> Cost:
    height, width = net.image_size
    area = _area((height, width), 1)
    total = _convolution(net.channels, config.width, 7, height * width, area)
    total += _group_norm(config.width, area * config.width) + _pooling(area * config.width)
    return total + _stages(config, net.image_size, preactivated=False)


def _resnet(config: ResNetConfig) -> Cost:
    height, width = config.image_size
    pixels, area = config.channels * height * width, _area(config.image_size, 1)
    total = _convolution(config.channels, config.width, 7, height * width, area) + _pooling(area * config.width)
    total += Cost(elementwise_bytes=8 * pixels, saved=4 * pixels) + _stages(
        config, config.image_size, preactivated=True
    )
    last = _area(config.image_size, len(config.blocks) + 1) * config.features
    total += _group_norm(config.features, last) + Cost(elementwise_bytes=8 * last, kernels=4)
    return total + _linear(config.features, config.num_classes, 1) if config.num_classes else total


def _pooling(values: int) -> Cost:
    """Max pooling of a map of `values` numbers; indices are stored as 64-bit integers."""
    return Cost(elementwise_bytes=16 * values, saved=values // 4 * 8, kernels=4)


def _area(size: tuple[int, int], halvings: int) -> int:
    """Pixels of a map after halving its sides this many times, rounding up."""
    return math.prod(-(-side // 2**halvings) for side in size)


def _stages(config: StemConfig | ResNetConfig, size: tuple[int, int], *, preactivated: bool) -> Cost:
    total, inputs = Cost(), config.width
    for stage, count in enumerate(config.blocks):
        inner, area = config.width * 2**stage, _area(size, stage + 2)
        for unit in range(count):
            before = _area(size, stage + 1) if stage and not unit else area
            total += _bottleneck(inputs, inner, before, area, preactivated)
            inputs = 4 * inner
    return total


def _bottleneck(inputs: int, inner: int, before: int, area: int, preactivated: bool) -> Cost:
    outputs = 4 * inner
    total = _convolution(inputs, inner, 1, before, before) + _convolution(inner, inner, 3, before, area)
    total += _convolution(inner, outputs, 1, area, area)
    total += _group_norm(inner, before * inner) + _group_norm(inner, area * inner)
    changed = inputs != outputs
    if changed:
        total += _convolution(inputs, outputs, 1, before, area)
    if preactivated:
        norms = _group_norm(inputs, before * inputs)
        return total + norms + Cost(elementwise_bytes=12 * area * outputs, kernels=3)
    norms = _group_norm(outputs, area * outputs) + Cost(elementwise_bytes=24 * area * outputs, kernels=4)
    return total + norms + (_group_norm(outputs, area * outputs, relu=False) if changed else Cost())
