"""Attention over few tokens, as one Triton kernel each way.

A head of up to 256 tokens fits into one multiprocessor of a GPU: no softmax in pieces, no sums in changing order, and
the gradients of queries, keys and values come as the one matrix that the projection before them wants.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

LOG2E = tl.constexpr(1.4426950408889634)  # powers of two are what the hardware computes


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
    given,
    tokens: tl.constexpr,
    scale: tl.constexpr,
    heads: tl.constexpr,
    depth: tl.constexpr,
    columns: tl.constexpr,
    rows: tl.constexpr,
):
    """All of one head; keys and values stay, queries come `rows` at a time. Matrices of shares are transposed: keys
    along the first axis."""
    head = tl.program_id(0).to(tl.int64)
    image, head = head // heads, head % heads
    width: tl.constexpr = heads * depth
    inside = tl.arange(0, depth)[None, :]
    column = tl.arange(0, columns)
    here = qkv + image * tokens * 3 * width + head * depth
    to = given + image * tokens * 3 * width + head * depth
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
    """Queries at a time, warps and stages of the pipeline."""

    rows: int
    warps: int
    stages: int


# By the number of keys with padding: of 64 and 256 the fastest of those tried on an H200, of 128 the only one.
FORWARD = {64: _Launch(64, 4, 1), 128: _Launch(64, 4, 1), 256: _Launch(64, 4, 1)}
BACKWARD = {64: _Launch(64, 4, 1), 128: _Launch(32, 4, 3), 256: _Launch(32, 8, 3)}


@triton_op("vitrail::short_attention", mutates_args={})
def short_attention(qkv: Tensor, heads: int) -> Tensor:
    """(B, T, 3 D), queries, keys and values of all heads after one another, to (B, T, D)."""
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
    given = torch.empty(batch, tokens, 3 * width, dtype=qkv.dtype, device=qkv.device)
    wrap_triton(_backward)[(batch * heads,)](
        qkv.contiguous(),
        gradient.contiguous(),
        given,
        tokens,
        depth**-0.5,
        heads,
        depth,
        columns,
        rows,
        num_warps=warps,
        num_stages=stages,
    )
    return given


def _padded(tokens: int) -> int:
    return next(size for size in FORWARD if size >= tokens)


def _remember(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.heads = inputs[1]


def _give_back(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return short_attention_backward(ctx.saved_tensors[0], gradient, ctx.heads), None


short_attention.register_autograd(_give_back, setup_context=_remember)
