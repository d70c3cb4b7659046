"""Where a network runs, in what number format, and with kernels that repeat themselves."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

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


def device_of(net: nn.Module) -> torch.device:
    return next(net.parameters()).device


def autocast(precision: str, device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    """A factory of contexts in which the network runs in a chosen precision."""
    if precision != "bf16":
        return contextlib.nullcontext
    return lambda: torch.autocast(device.type, dtype=torch.bfloat16)


@contextlib.contextmanager
def deterministic(device: torch.device, enabled: bool = True) -> Iterator[None]:
    """On a GPU: kernels that give the same bits every time, and float32 convolutions that are float32.

    A CPU repeats itself as it is. cuBLAS reads its variable when a process first uses it, hence the default.
    """
    if device.type != "cuda" or not enabled:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before, tf32 = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.allow_tf32
    memory: Any = torch.utils.deterministic
    filling = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False  # 7 % of a step; only reading such memory would need it
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        memory.fill_uninitialized_memory = filling
        torch.backends.cudnn.allow_tf32 = tf32
