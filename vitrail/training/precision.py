"""Precision of training: float32 or bfloat16."""

from __future__ import annotations

import functools
import importlib.util
import subprocess
import sys
from typing import Literal

import torch
from torch import nn

from vitrail.config import PrecisionConfig
from vitrail.errors import UserError

Precision = Literal["fp32", "bf16"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

# Virtual machines can list bfloat16 instructions that crash with "illegal instruction". So a subprocess tries them
# first, and compares the results with float32.
TRIAL = """
import torch
torch.manual_seed(0)
layer, x = torch.nn.Linear(384, 1536), torch.randn(256, 384)
def run(enabled):
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
        out = layer(x)
        q, k, v = out.reshape(4, 64, 4, 6, 64).permute(3, 0, 2, 1, 4)[:3]
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v).float()
        return [out, *torch.autograd.grad(out.square().sum(), layer.parameters())]
close = all((a - b).norm() < 0.02 * b.norm() for a, b in zip(run(True), run(False)))
raise SystemExit(0 if close else 1)
"""
KILLED = -9
TRIAL_TIMEOUT = 600.0  # seconds; the trial takes a few


def choose_precision(setting: str, device: torch.device) -> tuple[Precision, str]:
    """The precision of a run, and the reason for it.

    Parameters
    ----------
    setting
        `precision.compute`: "fp32", "bf16" or "auto".
    device
        Where the run trains.
    """
    if setting == "fp32":
        return "fp32", "as configured"
    if setting == "bf16":
        if device.type == "cpu" and not bf16_works_on_cpu():
            raise UserError("this CPU cannot compute in bfloat16: use --set precision.compute=fp32 or auto")
        return "bf16", "as configured"
    if device.type == "cuda":
        supported = torch.cuda.is_bf16_supported(including_emulation=False)
        return ("bf16", "this GPU supports it") if supported else ("fp32", "this GPU does not support bfloat16")
    if device.type != "cpu":
        return "fp32", f"bfloat16 is untested on {device.type}"
    if not has_amx():
        return "fp32", "bf16 is slower on a CPU without AMX"
    if not bf16_works_on_cpu():
        return "fp32", "this CPU lists AMX, but bfloat16 failed a test"
    return "bf16", "this CPU has AMX"


def has_amx() -> bool:
    """Whether the CPU has AMX. With only AVX512-BF16, bfloat16 is slower than float32."""
    return bool(torch.cpu._is_amx_tile_supported())


@functools.cache
def bf16_works_on_cpu() -> bool:
    """Whether bfloat16 gives the results of float32, tested in a subprocess."""
    try:
        code = subprocess.run([sys.executable, "-c", TRIAL], capture_output=True, timeout=TRIAL_TIMEOUT).returncode
    except (OSError, subprocess.TimeoutExpired):
        code = KILLED
    if code == KILLED:  # out of memory or time, which must not decide the precision of a run
        raise UserError(
            "a test of bfloat16 was killed or timed out: this machine may be short of memory. "
            "Run the command again, or add --set precision.compute=fp32"
        )
    return code == 0


def has_triton() -> bool:
    """Whether Triton is installed, which torch.compile needs on a GPU."""
    return importlib.util.find_spec("triton") is not None


def set_dtypes(net: nn.Module, config: PrecisionConfig) -> None:
    """Set the dtypes of the weights and of the residual stream, as configured."""
    if config.parameters != "fp32":
        net.to(DTYPES[config.parameters])
    if config.residual != "fp32" and hasattr(net, "set_residual_dtype"):
        net.set_residual_dtype(DTYPES[config.residual])  # type: ignore[operator]


def validates_in_float32(config: PrecisionConfig) -> bool:
    """Whether final validation runs in float32: only if the weights and the residual stream are float32."""
    return config.parameters == config.residual == "fp32"
