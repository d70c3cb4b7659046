"""Arrays to where they are used, without waiting for a GPU: while it works, it copies by itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

SMALL = 1 << 16  # bytes that CUDA takes along with the command to copy them, from any memory and without waiting


def on_device(values: np.ndarray, device: torch.device) -> Tensor:
    """To a GPU from memory that it reads by itself: of other memory, large pieces would wait for all it has to do. But
    such memory takes long to get, and small pieces go without it."""
    tensor = torch.from_numpy(values)
    if device.type == "cuda" and values.nbytes > SMALL:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=device.type == "cuda")


@contextmanager
def pinned(memory: np.ndarray, device: torch.device) -> Iterator[None]:
    """Keep `memory` where a GPU can read it by itself, so that copies from it need not be waited for."""
    if device.type != "cuda":
        yield
        return
    runtime = torch.cuda.cudart()
    # Not allowed everywhere (a container may limit locked memory); copies are then slower, and as right.
    locked = int(runtime.cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)) == 0
    try:
        yield
    finally:
        if locked:
            runtime.cudaHostUnregister(memory.ctypes.data)
