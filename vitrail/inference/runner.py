"""Run a network on images, batch by batch and in order. All commands use this.

Worker processes decode the next images while the network runs. Images that cannot be read are reported and skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from vitrail.config import DataConfig, Preprocess
from vitrail.data.decode import MAX_PIXELS
from vitrail.data.loader.loader import ImageBatch, evaluation_loader
from vitrail.data.loader.reader import ImageSource, Reader
from vitrail.data.samples import Samples
from vitrail.data.transforms import normalise
from vitrail.distributed import SINGLE_PROCESS, Ranks
from vitrail.errors import UserError
from vitrail.interrupt import Interrupts

BATCH = 64
Forward = Callable[[Tensor], Tensor]  # a network, or its forward_features: normalised pixels -> (B, K)


@dataclass(frozen=True)
class Outputs:
    """The outputs of a network for the images that could be read, one row each."""

    values: Tensor  # (N, K) logits or (N, D) features, float32 on the CPU
    labels: Tensor  # (N,)
    sample: Tensor  # (N,): index in the split
    failures: list[tuple[str, str]]  # (name, reason) of the images that could not be read


def check_finite(values: Tensor, sample: Tensor, samples: Samples) -> None:
    """Raise an error that names an image if its outputs are NaN or Inf."""
    nonfinite = sample[~values.isfinite().all(dim=-1)]
    if len(nonfinite):
        raise UserError(
            f"the output of the network is NaN or Inf for {len(nonfinite):,} of {len(sample):,} images, first "
            f"'{samples.name(int(nonfinite[0]))}': the weights or their preprocessing are wrong"
        )


def network_outputs(
    forward: Forward,
    samples: Samples,
    spec: Preprocess,
    data: DataConfig,
    device: torch.device,
    interrupts: Interrupts,
    ranks: Ranks = SINGLE_PROCESS,
) -> Outputs:
    """Run a network on all images of a split.

    In a distributed run each process handles a part of the images, and all return all outputs. Batches, and so the
    outputs, are the same for any number of processes.
    """
    rows, failures = [], []
    for batch, out in forward_batches(forward, samples, spec, device, data=data, interrupts=interrupts, ranks=ranks):
        readable = batch.weights > 0
        rows.append((out[readable], batch.labels[readable], batch.sample[readable]))
        failures += batch.failures
    local = [torch.cat(column) for column in zip(*rows, strict=True)]
    parts, all_failures = zip(*ranks.all_gather((local, failures)), strict=True)
    values, labels, sample = (torch.cat(column) for column in zip(*parts, strict=True))
    failures = sorted(failure for rank_failures in all_failures for failure in rank_failures)
    if not len(sample):
        name, reason = failures[0] if failures else ("the data", "there are no images")
        raise UserError(f"no image could be read, first {name}: {reason}")
    order = sample.argsort()
    values, labels, sample = values[order], labels[order], sample[order]
    check_finite(values, sample, samples)
    return Outputs(values, labels, sample, failures)


@torch.no_grad()
def forward_batches(
    forward: Forward,
    images: ImageSource,
    spec: Preprocess,
    device: torch.device,
    *,
    batch_size: int = BATCH,
    data: DataConfig = DataConfig(),  # noqa: B008, immutable
    interrupts: Interrupts | None = None,
    ranks: Ranks = SINGLE_PROCESS,
    progress: Callable[[int], None] | None = None,
) -> Iterator[tuple[ImageBatch, Tensor]]:
    """Iterate over (batch, outputs of `forward`), float32 on the CPU, for the images of this process.

    Images that cannot be read have weight 0, and `batch.failures` has the reasons. `progress` is called with the number
    of images done. With `interrupts`, a signal stops the iteration after a batch.
    """
    reader = Reader(images, spec, data.max_pixels)
    loader = evaluation_loader(reader, batch_size, data.workers, device, ranks)
    done = 0
    for batch, out in _results(forward, loader, spec, device):
        yield batch, out
        done += len(batch)
        if progress is not None:
            progress(done)
        if interrupts is not None:
            interrupts.check(ranks)


def _results(
    forward: Forward, batches: Iterable[ImageBatch], spec: Preprocess, device: torch.device
) -> Iterator[tuple[ImageBatch, Tensor]]:
    """Yield outputs; on a GPU one batch late, so that it computes the next while outputs are copied and used."""
    pending: tuple[ImageBatch, Tensor, torch.cuda.Event] | None = None
    for batch in batches:
        out = forward(normalise(batch.pixels.to(device, non_blocking=True), spec)).float()
        if device.type != "cuda":
            yield batch, out.cpu()
            continue
        copy = torch.empty(out.shape, pin_memory=True).copy_(out, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(device))
        if pending is not None:
            pending[2].synchronize()
            yield pending[:2]
        pending = batch, copy, copied
    if pending is not None:
        pending[2].synchronize()
        yield pending[:2]


def row_errors(batch: ImageBatch) -> list[str | None]:
    """For each row of a batch, why the image could not be read, or None."""
    reasons = iter(batch.failures)
    return [None if weight else next(reasons)[1] for weight in batch.weights.tolist()]


def read_pixels(images: ImageSource, spec: Preprocess) -> list[Tensor | str]:
    """The resized uint8 pixels (C, H, W) of each image, or why it cannot be read."""
    loader = evaluation_loader(Reader(images, spec, MAX_PIXELS), BATCH, None, torch.device("cpu"))
    return [
        pixels.clone() if error is None else error
        for batch in loader
        for pixels, error in zip(batch.pixels, row_errors(batch), strict=True)
    ]
