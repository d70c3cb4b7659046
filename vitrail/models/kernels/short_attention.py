"""Attention over few tokens by kernels of its own (short_attention_triton.py), where those are known to be faster."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import cast

import torch
from torch import Tensor

TOKENS = 256
DEPTH = 64  # numbers in a head, as in the paper's networks up to L


def supports_short_attention(qkv: Tensor, heads: int) -> bool:
    """Whether the kernels take these projections (B, T, 3 D) of all tokens: half precision, on a GPU of a kind on which
    they were measured."""
    return (
        qkv.is_cuda
        and qkv.dtype in (torch.bfloat16, torch.float16)
        and qkv.shape[1] <= TOKENS
        and qkv.shape[2] // (3 * heads) == DEPTH
        and _there()
    )


def short_attention(qkv: Tensor, heads: int) -> Tensor:
    """(B, T, 3 D), queries, keys and values of all heads after one another, to (B, T, D)."""
    return cast(Tensor, torch.ops.vitrail.short_attention(qkv, heads))


def _there() -> bool:
    return _loaded()


# What torch.compiler.assume_constant_result sets, which would import the compiler for every user of a network.
_there._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _loaded() -> bool:
    """On GPUs other than Hopper the kernels would be right, too, but nobody has timed them."""
    if importlib.util.find_spec("triton") is None or torch.cuda.get_device_capability() != (9, 0):
        return False
    importlib.import_module("vitrail.models.kernels.short_attention_triton")
    return True
