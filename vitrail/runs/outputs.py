"""A split of a dataset through a network: the reading and batching that every command shares."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vitrail.config import DataConfig, Preprocess
from vitrail.images.loader import Reader, evaluation_loader
from vitrail.images.sources import Samples
from vitrail.infer.forward import Outputs, run_network
from vitrail.training.interrupt import Interrupts

IN_MEMORY = 1 << 30  # decoded bytes up to which images are kept, so that small sets are decoded once


def reader_of(samples: Samples, spec: Preprocess, data: DataConfig) -> Reader:
    keep = int(samples.areas.sum()) * spec.channels <= IN_MEMORY
    return Reader(samples, spec, data.max_pixels, keep)


def outputs_of(
    forward: Callable[[Tensor], Tensor],
    samples: Samples,
    spec: Preprocess,
    data: DataConfig,
    device: torch.device,
    interrupts: Interrupts,
) -> Outputs:
    loader = evaluation_loader(reader_of(samples, spec, data), 64, data.workers, device)
    return run_network(forward, loader, spec, device, between=lambda _: interrupts.check())
