"""Device, autocast and deterministic kernels."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from vitrail.errors import UserError


def choose_device(name: str | torch.device) -> torch.device:
    """The device with a name; for "auto", the best available one."""
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        return torch.device("cuda" if available["cuda"] else "mps" if available["mps"] else "cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        device = torch.device("meta")
    if device.type not in available:
        raise UserError(f"unknown device '{name}': use cpu, cuda, mps or auto")
    if not available[device.type] or (device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count()):
        raise UserError(f"this machine has no device '{name}': use cpu or auto")
    return device


def device_of(net: nn.Module) -> torch.device:
    return next(net.parameters()).device


def autocast(precision: str, device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    """A function that returns an autocast context for a precision ("bf16"; others give a null context)."""
    if precision != "bf16":
        return contextlib.nullcontext
    return lambda: torch.autocast(device.type, dtype=torch.bfloat16)


@contextlib.contextmanager
def deterministic(device: torch.device, enabled: bool = True) -> Iterator[None]:
    """Use deterministic kernels on a GPU, and no TF32 in convolutions. Kernels on a CPU are deterministic anyway.

    cuBLAS reads its environment variable when a process first uses it.
    """
    if device.type != "cuda" or not enabled:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before, tf32 = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.allow_tf32
    memory: Any = torch.utils.deterministic
    filling = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False  # saves 7 % of a step; nothing reads such memory
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        memory.fill_uninitialized_memory = filling
        torch.backends.cudnn.allow_tf32 = tf32
