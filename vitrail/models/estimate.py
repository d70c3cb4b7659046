"""Bytes and seconds of a training step on a named accelerator, from what a network costs.

The model of time: products run at the accelerator's peak while what they read and write passes by at its bandwidth,
one after the other; everything else is bound by bandwidth alone. The shares below say how near a real step comes to
that. They were measured on an H200 (docs/benchmarks.md); other accelerators are assumed to come as near.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from vitrail.config import NetworkConfig
from vitrail.errors import UserError, did_you_mean
from vitrail.models.flops import Cost, cost

PRODUCTS = 0.95  # share of peak that matrix products and convolutions reach
STREAM = 0.92  # share of bandwidth at which their operands pass
ELEMENTWISE = 0.5  # share of bandwidth that norms, activations, sums and casts reach
ATTENTION = 0.175  # share of peak that fused attention reaches
START, LAUNCH = 15e-3, 40e-6  # seconds of the host for a step and for each kernel: no step is faster than its launches

WORKSPACE = 100e6  # bytes that the libraries keep for themselves
UPDATE = 40  # bytes a parameter that clipping and AdamW read and write


@dataclass(frozen=True)
class Accelerator:
    """From the data sheets: dense rates, in SI units."""

    memory: float  # bytes
    bandwidth: float  # bytes a second
    flops: float  # of bfloat16 products, a second


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
# What drivers call them. Only exact names count: a letter more ("L40S", "RTX 4090 D", "H100 NVL") is another chip, and
# a slice of one ("... MIG 1g.10gb") has a slice of its peak.
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
    """An accelerator by name, whatever its capitals, with its proper name."""
    for known, spec in ACCELERATORS.items():
        if known.lower() == name.lower():
            return known, spec
    kinds = [known for known in ACCELERATORS if known.lower().startswith(f"{name.lower()}-")]
    hint = f"; did you mean '{kinds[0]}'?" if kinds else did_you_mean(name, ACCELERATORS) or "."
    raise UserError(f"no accelerator '{name}'{hint} Known: {', '.join(ACCELERATORS)}.")


def peak_flops(name: str) -> float | None:
    """FLOP/s of dense bfloat16 products at most, by the name that `torch.cuda.get_device_name` gives; none: unknown."""
    known = DRIVER_NAMES.get(name.removeprefix("NVIDIA ").removeprefix("GeForce "))
    return None if known is None else ACCELERATORS[known].flops


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes at the peak of a training step, by what they hold."""

    weights: float
    gradients: float
    optimizer: float
    activations: float  # with the images themselves and a copy of the weights in bfloat16

    @property
    def total(self) -> float:
        """Gradients come while activations go: the larger of the two counts."""
        return self.weights + self.optimizer + max(self.gradients, self.activations) + WORKSPACE


@dataclass(frozen=True)
class StepEstimate:
    """A training step with AdamW in bfloat16: what it takes, and the largest batch that the memory has room for."""

    batch: int
    memory: MemoryEstimate
    seconds: float
    largest_batch: int


def estimate_training_step(config: NetworkConfig, batch: int, device: Accelerator) -> StepEstimate:
    spent = cost(config, whole=False)
    empty = training_memory(spent, 0)
    room = device.memory - empty.weights - empty.optimizer - empty.activations - WORKSPACE
    largest = math.floor(room / (spent.saved + spent.passing)) if empty.total < device.memory else 0
    return StepEstimate(batch, training_memory(spent, batch), step_seconds(spent, batch, device), largest)


def training_memory(spent: Cost, batch: int) -> MemoryEstimate:
    numbers = 4 * spent.parameters
    return MemoryEstimate(numbers, numbers, 2 * numbers, numbers / 2 + (spent.saved + spent.passing) * batch)


def step_seconds(spent: Cost, batch: int, device: Accelerator) -> float:
    """Of one step: what the device takes, unless the host takes longer to launch it."""
    products = 3 * 2 * (spent.macs - spent.fused) * batch / (PRODUCTS * device.flops)
    attention = 2 * spent.tiled * batch / (ATTENTION * device.flops)
    streamed = spent.streamed * batch / (STREAM * device.bandwidth)
    moved = spent.moved * batch / (ELEMENTWISE * device.bandwidth)
    update = UPDATE * spent.parameters / (STREAM * device.bandwidth)
    return max(products + attention + streamed + moved + update, START + spent.kernels * LAUNCH)


def training_flops(config: NetworkConfig, images: float) -> float:
    """Multiplications and additions to train on so many images, as the paper's Table 6 counts them."""
    return 3 * 2 * cost(config).macs * images
