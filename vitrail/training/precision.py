"""Number formats of training, and kernels that repeat themselves."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import nn

from vitrail.config import PrecisionConfig
from vitrail.errors import UserError
from vitrail.model.encoder import Encoder

Precision = Literal["fp32", "bf16"]
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

# A processor may list bfloat16 instructions that a virtual machine then refuses (the process dies of an illegal
# instruction), or have them and still be slower: only a trial in a process of its own tells.
TRIAL = """
import time, torch
torch.manual_seed(0)
layer, x = torch.nn.Linear(384, 1536), torch.randn(2048, 384, requires_grad=True)
def once(dtype):
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        layer(x).float().sum().backward()
def seconds(dtype):
    once(dtype)
    best = 1e9
    for _ in range(5):
        start = time.perf_counter(); once(dtype); best = min(best, time.perf_counter() - start)
    return best
print(seconds(None) / seconds(torch.bfloat16))
"""
WORTH_IT = 1.2  # a smaller gain does not pay for the coarser numbers


def choose_precision(asked: str, device: torch.device) -> tuple[Precision, str]:
    """The precision of a run and the reason in a few words."""
    if asked == "fp32":
        return "fp32", "as asked"
    if asked == "bf16":
        if device.type == "cpu" and bf16_gain_on_cpu() is None:
            raise UserError("this processor cannot compute in bfloat16: use --set precision.compute=fp32, or auto")
        return "bf16", "as asked"
    if device.type == "cuda":
        there = torch.cuda.is_bf16_supported(including_emulation=False)
        return ("bf16", "this GPU has it") if there else ("fp32", "this GPU has no bfloat16")
    if device.type != "cpu":
        return "fp32", f"bfloat16 is untested on {device.type}"
    gain = bf16_gain_on_cpu()
    if gain is None:
        return "fp32", "a trial of bfloat16 failed on this processor"
    if gain < WORTH_IT:
        return "fp32", f"bfloat16 gives only {gain:.1f} times the speed on this processor"
    return "bf16", f"bfloat16 gives {gain:.1f} times the speed on this processor"


@functools.cache
def bf16_gain_on_cpu() -> float | None:
    """How many times faster bfloat16 is here, measured in a process of its own; none if that process fails."""
    listed = platform.machine().lower() not in ("x86_64", "amd64") or torch.backends.cpu.get_cpu_capability() in (
        "AVX512",
        "AVX512_BF16",
        "AMX",
    )
    if not listed:
        return 0.0
    try:
        trial = subprocess.run([sys.executable, "-c", TRIAL], capture_output=True, text=True, timeout=60)
        return float(trial.stdout) if trial.returncode == 0 else None
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None


def autocast(precision: str, device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    """A factory of contexts in which the network runs in a chosen precision."""
    if precision != "bf16":
        return contextlib.nullcontext
    return lambda: torch.autocast(device.type, dtype=torch.bfloat16)


def can_compile() -> bool:
    """Whether torch.compile finds the compiler it needs for a GPU."""
    return importlib.util.find_spec("triton") is not None


def set_types(net: nn.Module, config: PrecisionConfig) -> None:
    """The formats of a network's weights, and of the stream that its blocks add to."""
    if config.parameters != "fp32":
        net.to(TYPES[config.parameters])
    if config.residual != "fp32":
        for module in net.modules():
            if isinstance(module, Encoder):
                module.residual = TYPES[config.residual]


@contextlib.contextmanager
def repeatable(device: torch.device, enabled: bool = True) -> Iterator[None]:
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
