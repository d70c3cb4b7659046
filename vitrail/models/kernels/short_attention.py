"""Attention over at most 256 tokens, with custom Triton kernels where they are known to be faster."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import cast

import torch
from torch import Tensor

TOKENS = 256
DEPTH = 64  # head dimension, as in the paper's networks up to L


def supports_short_attention(qkv: Tensor, heads: int) -> bool:
    """Whether the kernels support this qkv projection (B, T, 3 D): shape, half precision, and a Hopper GPU."""
    return (
        qkv.is_cuda
        and qkv.dtype in (torch.bfloat16, torch.float16)
        and qkv.shape[1] <= TOKENS
        and qkv.shape[2] // (3 * heads) == DEPTH
        and _available()
    )


def short_attention(qkv: Tensor, heads: int) -> Tensor:
    """Attention of a qkv projection: (B, T, 3 D) -> (B, T, D)."""
    return cast(Tensor, torch.ops.vitrail.short_attention(qkv, heads))


def _available() -> bool:
    return _loaded()


# Equivalent to torch.compiler.assume_constant_result, which would import the compiler.
_available._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _loaded() -> bool:
    """Load the kernels if they can be used. They are limited to Hopper, the only GPUs that they were timed on."""
    if importlib.util.find_spec("triton") is None or torch.cuda.get_device_capability() != (9, 0):
        return False
    importlib.import_module("vitrail.models.kernels.short_attention_triton")
    return True
