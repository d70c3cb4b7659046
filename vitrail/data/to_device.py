"""Copy arrays to a device without synchronising with the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

MAX_UNPINNED = 1 << 16  # bytes that CUDA copies asynchronously even from pageable memory


def on_device(values: np.ndarray, device: torch.device) -> Tensor:
    """Copy to `device` asynchronously. Arrays above MAX_UNPINNED bytes are pinned first; smaller ones
    need no pinning, which is slow."""
    tensor = torch.from_numpy(values)
    if device.type == "cuda" and values.nbytes > MAX_UNPINNED:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=device.type == "cuda")


@contextmanager
def pinned(memory: np.ndarray, device: torch.device) -> Iterator[None]:
    """Pin `memory` in this context, so that copies to a GPU are asynchronous."""
    if device.type != "cuda":
        yield
        return
    runtime = torch.cuda.cudart()
    # Pinning may fail (a container can limit locked memory): copies are then slower but correct.
    registered = int(runtime.cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)) == 0
    try:
        yield
    finally:
        if registered:
            runtime.cudaHostUnregister(memory.ctypes.data)
