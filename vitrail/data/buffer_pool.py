"""Memory for large tensors that come and go at every step."""

from __future__ import annotations

import math
import weakref

import numpy as np
import torch
from torch import Tensor

MAX_FREE = 2  # blocks that wait for their next use
_ALIGNED = 64  # bytes, as torch's own memory


class BufferPool:
    """Float tensors in memory that is used again when nothing holds the last tensor in it any more.

    What the system gives anew it clears first, page by page; for a batch of floats that takes longer than the
    arithmetic on them.
    """

    def __init__(self) -> None:
        self.free: list[np.ndarray] = []

    def empty(self, shape: tuple[int, ...]) -> Tensor:
        """float32, on the CPU."""
        size = math.prod(shape)
        block = next((block for block in self.free if len(block) >= size), None)
        if block is None:
            self.free.clear()
            block = _aligned(size)
        else:
            self.free = [other for other in self.free if other is not block]
        view = block[:size].reshape(shape)
        weakref.finalize(view, self._back, block).atexit = False  # torch holds the view as long as any tensor on it
        return torch.from_numpy(view)

    def _back(self, block: np.ndarray) -> None:
        if len(self.free) < MAX_FREE:
            self.free.append(block)


def _aligned(size: int) -> np.ndarray:
    raw = np.empty(size * 4 + _ALIGNED, np.uint8)
    start = -raw.ctypes.data % _ALIGNED
    return raw[start : start + size * 4].view(np.float32)
