"""The one way images go through a network: decoded in worker processes, batch by batch, in order.

The network works while the workers decode what comes next. An image that cannot be read does not stop the others.
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
    """One row per image that could be read."""

    values: Tensor  # (N, K) logits or (N, D) features, float32 on the CPU
    labels: Tensor  # (N,)
    sample: Tensor  # (N,): index in the split
    failures: list[tuple[str, str]]  # (name, reason) of the images that could not be read


def check_finite(values: Tensor, sample: Tensor, samples: Samples) -> None:
    """Raise an error that names an image if outputs are not finite: a score of NaN is a score of nothing."""
    odd = sample[~values.isfinite().all(dim=-1)]
    if len(odd):
        raise UserError(
            f"the network's output is not finite for {len(odd):,} of {len(sample):,} images, first "
            f"'{samples.name(int(odd[0]))}': its weights, or its preprocessing, are unusable"
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
    """Of every image that can be read, in order. Of several processes each takes a part of the images, and all get all:
    what stands in a batch, and so every bit, does not depend on their number."""
    rows, failures = [], []
    for batch, out in forward_batches(forward, samples, spec, device, data=data, interrupts=interrupts, ranks=ranks):
        readable = batch.weights > 0
        rows.append((out[readable], batch.labels[readable], batch.sample[readable]))
        failures += batch.failures
    own = [torch.cat(column) for column in zip(*rows, strict=True)]
    parts, told = zip(*ranks.all_gather((own, failures)), strict=True)
    values, labels, sample = (torch.cat(column) for column in zip(*parts, strict=True))
    failures = sorted(failure for one in told for failure in one)
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
    data: DataConfig = DataConfig(),  # noqa: B008, it cannot be changed
    interrupts: Interrupts | None = None,
    ranks: Ranks = SINGLE_PROCESS,
    progress: Callable[[int], None] | None = None,
) -> Iterator[tuple[ImageBatch, Tensor]]:
    """Every image once (of several processes, this one's): batches, each with what `forward` gives for it, float32 on
    the CPU.

    Rows of images that could not be read have the weight 0, and the batch tells why. `progress` gets the number of
    rows done. After each batch the run stops if a signal came.
    """
    reader = Reader(images, spec, data.max_pixels)  # every image once: there is nothing to keep them for
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
    """On a GPU a batch late: it has the next one to work on while results are copied and used."""
    waiting: tuple[ImageBatch, Tensor, torch.cuda.Event] | None = None
    for batch in batches:
        out = forward(normalise(batch.pixels.to(device, non_blocking=True), spec)).float()
        if device.type != "cuda":
            yield batch, out.cpu()
            continue
        copy = torch.empty(out.shape, pin_memory=True).copy_(out, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(device))
        if waiting is not None:
            waiting[2].synchronize()
            yield waiting[:2]
        waiting = batch, copy, copied
    if waiting is not None:
        waiting[2].synchronize()
        yield waiting[:2]


def row_errors(batch: ImageBatch) -> list[str | None]:
    """Why an image could not be read, for each row of a batch."""
    reasons = iter(batch.failures)
    return [None if weight else next(reasons)[1] for weight in batch.weights.tolist()]


def read_pixels(images: ImageSource, spec: Preprocess) -> list[Tensor | str]:
    """Each image as a network's uint8 input (C, H, W), or why it cannot be read. Without a network: to look at."""
    loader = evaluation_loader(Reader(images, spec, MAX_PIXELS), BATCH, None, torch.device("cpu"))
    return [
        pixels.clone() if error is None else error
        for batch in loader
        for pixels, error in zip(batch.pixels, row_errors(batch), strict=True)
    ]
