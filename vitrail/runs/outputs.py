"""A split of a dataset through a network: the reading and batching that every command shares."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vitrail.config import DataConfig, Preprocess
from vitrail.images.loader import Reader, evaluation_loader, fits_in_memory
from vitrail.images.sources import Dataset, Samples
from vitrail.infer.forward import Outputs, run_network
from vitrail.train.interrupt import Interrupts


def reader_of(samples: Samples, dataset: Dataset, spec: Preprocess, data: DataConfig) -> Reader:
    height, width = dataset.median_size
    keep = fits_in_memory(len(samples), height, width, spec.channels)
    return Reader(samples, spec, data.max_pixels, keep)


def outputs_of(
    forward: Callable[[Tensor], Tensor],
    samples: Samples,
    dataset: Dataset,
    spec: Preprocess,
    data: DataConfig,
    device: torch.device,
    interrupts: Interrupts,
) -> Outputs:
    loader = evaluation_loader(reader_of(samples, dataset, spec, data), 64, data.workers)
    return run_network(forward, loader, spec, device, between=lambda _: interrupts.check())
