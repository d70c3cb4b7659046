"""Small arrays to where they are used, without waiting for the device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def on_device(values: np.ndarray, device: torch.device) -> Tensor:
    """To a GPU from memory that it reads by itself: of other memory, large pieces would wait for all it has to do."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
