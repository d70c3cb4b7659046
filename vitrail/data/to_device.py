"""Small arrays to where they are used, without waiting for the device."""

from __future__ import annotations

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
