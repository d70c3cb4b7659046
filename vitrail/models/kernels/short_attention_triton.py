"""Attention over at most 256 tokens: one Triton kernel for the forward and one for the backward pass.

A head of this size fits into one streaming multiprocessor. So softmax needs no tiling, sums have a fixed order, and the
gradients of query, key and value are written as one matrix, the layout of the qkv projection.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

LOG2E = tl.constexpr(1.4426950408889634)  # the hardware computes exp2


@triton.jit
def _forward(
    qkv,
    mixed,
    tokens: tl.constexpr,
    scale: tl.constexpr,
    heads: tl.constexpr,
    depth: tl.constexpr,
    columns: tl.constexpr,
    rows: tl.constexpr,
):
    pieces = tl.cdiv(tokens, rows)
    head = (tl.program_id(0) // pieces).to(tl.int64)
    image, head = head // heads, head % heads
    width: tl.constexpr = heads * depth
    inside = tl.arange(0, depth)[None, :]
    row = (tl.program_id(0) % pieces) * rows + tl.arange(0, rows)
    column = tl.arange(0, columns)
    here = qkv + image * tokens * 3 * width + head * depth
    q = tl.load(here + row[:, None] * 3 * width + inside, mask=row[:, None] < tokens, other=0.0)
    there = here + column[:, None] * 3 * width + inside
    k = tl.load(there + width, mask=column[:, None] < tokens, other=0.0)
    v = tl.load(there + 2 * width, mask=column[:, None] < tokens, other=0.0)
    scores = tl.dot(q, tl.trans(k)) * (scale * LOG2E)
    scores = tl.where(column[None, :] < tokens, scores, float("-inf"))
    shares = tl.exp2(scores - tl.max(scores, 1)[:, None])
    new = tl.dot(shares.to(v.dtype), v) / tl.sum(shares, 1)[:, None]
    to = mixed + image * tokens * width + head * depth + row[:, None] * width + inside
    tl.store(to, new.to(v.dtype), mask=row[:, None] < tokens)


@triton.jit
def _backward(
    qkv,
    gradient,
    dqkv,
    tokens: tl.constexpr,
    scale: tl.constexpr,
    heads: tl.constexpr,
    depth: tl.constexpr,
    columns: tl.constexpr,
    rows: tl.constexpr,
):
    """One head per program: keys and values stay loaded, queries are processed in chunks of `rows`.

    Attention matrices are transposed: keys along the first axis.
    """
    head = tl.program_id(0).to(tl.int64)
    image, head = head // heads, head % heads
    width: tl.constexpr = heads * depth
    inside = tl.arange(0, depth)[None, :]
    column = tl.arange(0, columns)
    here = qkv + image * tokens * 3 * width + head * depth
    to = dqkv + image * tokens * 3 * width + head * depth
    coming = gradient + image * tokens * width + head * depth
    there = column[:, None] * 3 * width + inside
    k = tl.load(here + width + there, mask=column[:, None] < tokens, other=0.0)
    v = tl.load(here + 2 * width + there, mask=column[:, None] < tokens, other=0.0)
    dk = tl.zeros([columns, depth], dtype=tl.float32)
    dv = tl.zeros([columns, depth], dtype=tl.float32)
    for start in range(0, tokens, rows):
        row = start + tl.arange(0, rows)
        q = tl.load(here + row[:, None] * 3 * width + inside, mask=row[:, None] < tokens, other=0.0)
        do = tl.load(coming + row[:, None] * width + inside, mask=row[:, None] < tokens, other=0.0)
        scores = tl.dot(k, tl.trans(q)) * (scale * LOG2E)
        scores = tl.where(column[:, None] < tokens, scores, float("-inf"))
        shares = tl.exp2(scores - tl.max(scores, 0)[None, :])
        shares = shares / tl.sum(shares, 0)[None, :]
        dv += tl.dot(shares.to(v.dtype), do)
        dshares = tl.dot(v, tl.trans(do))
        dscores = (shares * (dshares - tl.sum(shares * dshares, 0)[None, :])).to(v.dtype)
        dk += tl.dot(dscores, q)
        dq = tl.dot(tl.trans(dscores), k) * scale
        tl.store(to + row[:, None] * 3 * width + inside, dq.to(v.dtype), mask=row[:, None] < tokens)
    tl.store(to + width + there, (dk * scale).to(v.dtype), mask=column[:, None] < tokens)
    tl.store(to + 2 * width + there, dv.to(v.dtype), mask=column[:, None] < tokens)


class _Launch(NamedTuple):
    """Queries per chunk, warps and pipeline stages."""

    rows: int
    warps: int
    stages: int


# By padded number of keys. For 64 and 256 the fastest of several on an H200; for 128 the only one tried.
FORWARD = {64: _Launch(64, 4, 1), 128: _Launch(64, 4, 1), 256: _Launch(64, 4, 1)}
BACKWARD = {64: _Launch(64, 4, 1), 128: _Launch(32, 4, 3), 256: _Launch(32, 8, 3)}


@triton_op("vitrail::short_attention", mutates_args={})
def short_attention_forward(qkv: Tensor, heads: int) -> Tensor:
    """Attention of a qkv projection: (B, T, 3 D) -> (B, T, D)."""
    batch, tokens, width = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
    depth, columns = width // heads, _padded(tokens)
    rows, warps, stages = FORWARD[columns]
    mixed = torch.empty(batch, tokens, width, dtype=qkv.dtype, device=qkv.device)
    wrap_triton(_forward)[(batch * heads * -(-tokens // rows),)](
        qkv.contiguous(),
        mixed,
        tokens,
        depth**-0.5,
        heads,
        depth,
        columns,
        rows,
        num_warps=warps,
        num_stages=stages,
    )
    return mixed


@triton_op("vitrail::short_attention_backward", mutates_args={})
def short_attention_backward(qkv: Tensor, gradient: Tensor, heads: int) -> Tensor:
    batch, tokens, width = gradient.shape
    depth, columns = width // heads, _padded(tokens)
    rows, warps, stages = BACKWARD[columns]
    dqkv = torch.empty(batch, tokens, 3 * width, dtype=qkv.dtype, device=qkv.device)
    wrap_triton(_backward)[(batch * heads,)](
        qkv.contiguous(),
        gradient.contiguous(),
        dqkv,
        tokens,
        depth**-0.5,
        heads,
        depth,
        columns,
        rows,
        num_warps=warps,
        num_stages=stages,
    )
    return dqkv


def _padded(tokens: int) -> int:
    return next(size for size in FORWARD if size >= tokens)


def _setup_context(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.heads = inputs[1]


def _backward_pass(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return short_attention_backward(ctx.saved_tensors[0], gradient, ctx.heads), None


short_attention_forward.register_autograd(_backward_pass, setup_context=_setup_context)
