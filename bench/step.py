"""What a training step really costs on this device - seconds and peak memory - beside what `vitrail plan` says.

    python -m bench.step B/16@256 L/16@128 H/14@64 S/16@256,positions=relative,pool=gap

Each argument is a model, a batch size and settings of the network. The step is the one of a run: the same update,
optimizer, precision and deterministic kernels, on random pixels that lie on the device already.
"""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import asdict, dataclass
from typing import Any

import torch

from vitrail.config import (
    ObjectiveConfig,
    OptimizerConfig,
    PrecisionConfig,
    RunConfig,
    ScheduleConfig,
    parse_overrides,
)
from vitrail.inference.device import deterministic
from vitrail.models.build import build_model
from vitrail.models.variants import config_from_name
from vitrail.tasks.classification import Classification
from vitrail.tasks.task import Batch
from vitrail.training.optimizer import build_optimizer
from vitrail.training.state import TrainState
from vitrail.training.step import TrainStep

CLASSES = 1000
WARMUP, STEPS = 4, 10


@dataclass(frozen=True)
class Measured:
    seconds: float  # median of a step
    memory: int  # bytes that tensors took at their peak


def measure_step(name: str, batch: int, image_size: int = 224, **settings: Any) -> Measured:
    """Train a few steps on the GPU."""
    device = torch.device("cuda")
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    net = build_model(config_from_name(name, CLASSES, image_size, **settings)).to(device).train()
    config = RunConfig(
        optimizer=OptimizerConfig(lr=1e-4, weight_decay=0.1, clip_grad_norm=1.0),
        schedule=ScheduleConfig(shape="constant"),
        precision=PrecisionConfig(compute="bf16"),
    )
    state = TrainState(net, build_optimizer(net, config.optimizer))
    objective = Classification(ObjectiveConfig(), CLASSES)
    step = TrainStep(objective.loss, config, device)
    pixels = torch.randn(batch, 3, image_size, image_size, device=device)
    targets = objective.targets(torch.arange(batch, device=device) % CLASSES)
    prepared = Batch(pixels, targets, torch.ones(batch, device=device))
    with deterministic(device):
        for _ in range(WARMUP):
            step(state, prepared)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        seconds = [_timed(step, state, prepared) for _ in range(STEPS)]
    return Measured(statistics.median(seconds), torch.cuda.max_memory_allocated())


def _timed(step: TrainStep, state: TrainState, batch: Batch) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    step(state, batch)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1000


def main() -> None:
    for argument in sys.argv[1:]:
        network, *pairs = argument.split(",")
        name, _, batch = network.partition("@")
        settings = parse_overrides(pairs)
        row = {"model": name, "batch": int(batch), "settings": settings}
        print(json.dumps(row | asdict(measure_step(name, int(batch), **settings))), flush=True)


if __name__ == "__main__":
    main()
