"""Estimated memory and time of a training step on an accelerator, from the cost of a network.

Time is the sum of matrix products at peak FLOP/s, their memory traffic at full bandwidth, and the traffic of all other
operations. The efficiencies below are fractions of these rates. They were measured on an H200 (docs/benchmarks.md) and
are assumed to hold for the other accelerators.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from vitrail.config import NetworkConfig
from vitrail.errors import UserError, did_you_mean
from vitrail.models.flops import Cost, cost

PRODUCTS = 0.95  # matrix products and convolutions, fraction of peak FLOP/s
STREAM = 0.92  # their operands, fraction of bandwidth
ELEMENTWISE = 0.5  # norms, activations, sums and casts, fraction of bandwidth
ATTENTION = 0.175  # fused attention, fraction of peak FLOP/s
START, LAUNCH = 15e-3, 40e-6  # host seconds per step and per kernel launch, a lower limit of step time

WORKSPACE = 100e6  # bytes that CUDA libraries allocate
UPDATE = 40  # bytes read and written per parameter by clipping and AdamW


@dataclass(frozen=True)
class Accelerator:
    """Data sheet values: dense rates, in SI units."""

    memory: float  # bytes
    bandwidth: float  # bytes per second
    flops: float  # bfloat16, per second


ACCELERATORS = {
    "H200": Accelerator(141e9, 4.8e12, 989e12),
    "H100": Accelerator(80e9, 3.35e12, 989e12),
    "H100-PCIe": Accelerator(80e9, 2.0e12, 756e12),
    "A100-80GB": Accelerator(80e9, 2.04e12, 312e12),
    "A100-40GB": Accelerator(40e9, 1.56e12, 312e12),
    "L40S": Accelerator(48e9, 0.864e12, 362e12),
    "L4": Accelerator(24e9, 0.3e12, 121e12),
    "A10": Accelerator(24e9, 0.6e12, 125e12),
    "RTX-5090": Accelerator(32e9, 1.79e12, 209e12),
    "RTX-4090": Accelerator(24e9, 1.01e12, 165e12),
    "RTX-3090": Accelerator(24e9, 0.936e12, 71e12),
}
CALIBRATED_ON = "H200"
# Driver names, matched exactly: a longer name ("RTX 4090 D", "H100 NVL") is another chip, and a MIG slice has only a
# fraction of the peak.
DRIVER_NAMES = {
    "H200": "H200",
    "H100 80GB HBM3": "H100",
    "H100 PCIe": "H100-PCIe",
    "A100-SXM4-80GB": "A100-80GB",
    "A100 80GB PCIe": "A100-80GB",
    "A100-SXM4-40GB": "A100-40GB",
    "A100-PCIE-40GB": "A100-40GB",
    "L40S": "L40S",
    "L4": "L4",
    "A10": "A10",
    "RTX 5090": "RTX-5090",
    "RTX 4090": "RTX-4090",
    "RTX 3090": "RTX-3090",
}


def find_accelerator(name: str) -> tuple[str, Accelerator]:
    """Return the canonical name and the data of an accelerator; the name is case-insensitive."""
    for known, spec in ACCELERATORS.items():
        if known.lower() == name.lower():
            return known, spec
    kinds = [known for known in ACCELERATORS if known.lower().startswith(f"{name.lower()}-")]
    hint = f"; did you mean '{kinds[0]}'?" if kinds else did_you_mean(name, ACCELERATORS) or "."
    raise UserError(f"unknown accelerator '{name}'{hint} Choose from {', '.join(ACCELERATORS)}.")


def peak_flops(name: str) -> float | None:
    """Peak dense bfloat16 FLOP/s of a GPU by the name from `torch.cuda.get_device_name`; None if unknown."""
    known = DRIVER_NAMES.get(name.removeprefix("NVIDIA ").removeprefix("GeForce "))
    return None if known is None else ACCELERATORS[known].flops


@dataclass(frozen=True)
class MemoryEstimate:
    """Peak memory of a training step in bytes, by use."""

    weights: float
    gradients: float
    optimizer: float
    activations: float  # including the input images and the bfloat16 copy of the weights

    @property
    def total(self) -> float:
        """Gradients replace activations during the backward pass, so only the larger of the two counts."""
        return self.weights + self.optimizer + max(self.gradients, self.activations) + WORKSPACE


@dataclass(frozen=True)
class StepEstimate:
    """Cost of a training step with AdamW in bfloat16, and the largest batch that fits in memory."""

    batch: int
    memory: MemoryEstimate
    seconds: float
    largest_batch: int


def estimate_training_step(config: NetworkConfig, batch: int, device: Accelerator) -> StepEstimate:
    """Estimate memory and time of a training step with `batch` images."""
    spent = cost(config, whole=False)
    empty = training_memory(spent, 0)
    free = device.memory - empty.weights - empty.optimizer - empty.activations - WORKSPACE
    largest = math.floor(free / (spent.saved + spent.transient_bytes)) if empty.total < device.memory else 0
    return StepEstimate(batch, training_memory(spent, batch), step_seconds(spent, batch, device), largest)


def training_memory(spent: Cost, batch: int) -> MemoryEstimate:
    """Peak memory of a training step with `batch` images."""
    weights = 4 * spent.parameters
    return MemoryEstimate(weights, weights, 2 * weights, weights / 2 + (spent.saved + spent.transient_bytes) * batch)


def step_seconds(spent: Cost, batch: int, device: Accelerator) -> float:
    """Seconds of a training step: those of the device, or of the host's kernel launches if they take longer."""
    products = 3 * 2 * (spent.macs - spent.fused) * batch / (PRODUCTS * device.flops)
    attention = 2 * spent.attention_step_macs * batch / (ATTENTION * device.flops)
    matmul_bytes = spent.matmul_bytes * batch / (STREAM * device.bandwidth)
    elementwise_bytes = spent.elementwise_bytes * batch / (ELEMENTWISE * device.bandwidth)
    update = UPDATE * spent.parameters / (STREAM * device.bandwidth)
    return max(products + attention + matmul_bytes + elementwise_bytes + update, START + spent.kernels * LAUNCH)


def training_flops(config: NetworkConfig, images: float) -> float:
    """FLOPs to train on this number of images, counted as in the paper's Table 6."""
    return 3 * 2 * cost(config).macs * images
