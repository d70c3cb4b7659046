"""Time and peak memory of a training step on this GPU, to compare with the estimates of `vitrail plan`.

    python -m bench.step B/16@256 L/16@128 H/14@64 S/16@256,positions=relative,pool=gap

Each argument is MODEL@BATCH, followed by network settings. The step is that of `vitrail train` (update, optimizer,
precision, deterministic kernels) on random pixels that are already on the device.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
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
from vitrail.errors import UserError
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
    memory: int  # peak bytes of tensors


def measure_step(name: str, batch: int, image_size: int = 224, **settings: Any) -> Measured:
    """Time a few training steps on the GPU."""
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


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.step", description="Time and memory of training steps.")
    parser.add_argument("cases", nargs="+", metavar="MODEL@BATCH[,KEY=VALUE...]", help="such as S/16@256,pool=gap")
    options = parser.parse_args(arguments)
    cases = [_parse_case(parser, text) for text in options.cases]
    if not torch.cuda.is_available():
        raise SystemExit("bench.step needs a CUDA device, and torch finds none")
    for name, batch, settings in cases:
        row = {"model": name, "batch": batch, "settings": settings}
        print(json.dumps(row | asdict(measure_step(name, batch, **settings))), flush=True)


def _parse_case(parser: argparse.ArgumentParser, text: str) -> tuple[str, int, dict[str, Any]]:
    network, *pairs = text.split(",")
    name, _, batch = network.partition("@")
    if not batch.isdecimal() or int(batch) < 1:
        parser.error(f"'{text}' has no batch size: write MODEL@BATCH, such as B/16@256")
    try:
        return name, int(batch), parse_overrides(pairs)
    except UserError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
