"""Reusable memory for large tensors that are created at every step."""

from __future__ import annotations

import math
import weakref

import numpy as np
import torch
from torch import Tensor

MAX_FREE = 2  # free blocks to keep
_ALIGNMENT = 64  # bytes, as torch


class BufferPool:
    """Allocates float tensors in blocks that are reused once no tensor refers to them.

    Fresh memory is zeroed by the system page by page, which takes longer than the arithmetic on a batch.
    """

    def __init__(self) -> None:
        self.free: list[np.ndarray] = []

    def empty(self, shape: tuple[int, ...]) -> Tensor:
        """An uninitialised float32 tensor on the CPU."""
        size = math.prod(shape)
        block = next((block for block in self.free if len(block) >= size), None)
        if block is None:
            self.free.clear()
            block = _aligned(size)
        else:
            self.free = [kept for kept in self.free if kept is not block]
        view = block[:size].reshape(shape)
        weakref.finalize(view, self._release, block).atexit = False  # torch keeps the view while any tensor uses it
        return torch.from_numpy(view)

    def _release(self, block: np.ndarray) -> None:
        if len(self.free) < MAX_FREE:
            self.free.append(block)


def _aligned(size: int) -> np.ndarray:
    raw = np.empty(size * 4 + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size * 4].view(np.float32)
