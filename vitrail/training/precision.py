"""Number formats of training."""

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
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

# A processor may list bfloat16 instructions that a virtual machine then refuses: the process dies of an illegal
# instruction. So a process of its own tries them first, and compares what they give with float32.
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
TRIAL_SECONDS = 600.0  # it takes a few; so much longer says nothing about the processor


def choose_precision(asked: str, device: torch.device) -> tuple[Precision, str]:
    """The precision of a run and the reason in a few words."""
    if asked == "fp32":
        return "fp32", "as asked"
    if asked == "bf16":
        if device.type == "cpu" and not bf16_works_on_cpu():
            raise UserError("this processor cannot compute in bfloat16: use --set precision.compute=fp32, or auto")
        return "bf16", "as asked"
    if device.type == "cuda":
        there = torch.cuda.is_bf16_supported(including_emulation=False)
        return ("bf16", "this GPU has it") if there else ("fp32", "this GPU has no bfloat16")
    if device.type != "cpu":
        return "fp32", f"bfloat16 is untested on {device.type}"
    if not has_matrix_units():
        return "fp32", "this processor has no matrix units for bfloat16 (AMX)"
    if not bf16_works_on_cpu():
        return "fp32", "this processor lists bfloat16 (AMX), and a trial of it failed"
    return "bf16", "this processor has matrix units for it (AMX)"


def has_matrix_units() -> bool:
    """Whether the CPU lists AMX. Other bfloat16 instructions (AVX512-BF16) are slower than float32."""
    return bool(torch.cpu._is_amx_tile_supported())


@functools.cache
def bf16_works_on_cpu() -> bool:
    """Whether bfloat16 gives what float32 gives, tried in a process of its own."""
    try:
        code = subprocess.run([sys.executable, "-c", TRIAL], capture_output=True, timeout=TRIAL_SECONDS).returncode
    except (OSError, subprocess.TimeoutExpired):
        code = KILLED
    if code == KILLED:  # by a machine short of memory or time: this must not decide the numbers of a run
        raise UserError(
            "a trial of bfloat16 did not end on this machine, for want of memory or time: "
            "run the command again, or with --set precision.compute=fp32"
        )
    return code == 0


def has_triton() -> bool:
    """Whether torch.compile finds the compiler it needs for a GPU."""
    return importlib.util.find_spec("triton") is not None


def set_dtypes(net: nn.Module, config: PrecisionConfig) -> None:
    """The formats of a network's weights, and of the stream that its blocks add to."""
    if config.parameters != "fp32":
        net.to(TYPES[config.parameters])
    if config.residual != "fp32" and hasattr(net, "set_residual_dtype"):  # a network without blocks has no stream
        net.set_residual_dtype(TYPES[config.residual])  # type: ignore[operator]


def validates_in_float32(config: PrecisionConfig) -> bool:
    """Whether a network can be measured in float32 while it is trained: its own weights and stream have to be."""
    return config.parameters == config.residual == "fp32"
