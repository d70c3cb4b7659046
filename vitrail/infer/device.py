"""Where a network runs."""

from __future__ import annotations

import torch

from vitrail.errors import UserError


def choose_device(asked: str | torch.device) -> torch.device:
    """The device a user named, or for "auto" the best there is."""
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if asked == "auto":
        return torch.device("cuda" if there["cuda"] else "mps" if there["mps"] else "cpu")
    try:
        device = torch.device(asked)
    except (RuntimeError, TypeError):
        device = torch.device("meta")
    if device.type not in there:
        raise UserError(f"no device '{asked}': use cpu, cuda, mps or auto")
    if not there[device.type] or (device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count()):
        raise UserError(f"there is no device '{asked}' on this machine: use cpu or auto")
    return device
