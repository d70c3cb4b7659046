"""Samples -> batches. The position in the stream of training images is one integer; everything follows from it."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from vitrail.config import AugmentConfig
from vitrail.data.augment.crop import crop_box, crop_draws
from vitrail.data.decode import BadImage
from vitrail.data.loader.reader import Reader
from vitrail.data.loader.sampler import PADDING, BatchRows, EvaluationSampler, Sampler, TrainingSampler
from vitrail.data.loader.workers import Failures, Slots, WorkerPool
from vitrail.data.scan import cores
from vitrail.data.to_device import pinned
from vitrail.data.transforms import eval_transform
from vitrail.distributed import SINGLE_PROCESS, Ranks

FULL_IMAGE_CROPS = ("none", "shift", "zoom")  # crops that take the image as evaluation does
# Images to evaluate for each process that is started, which takes as long as decoding ten to twenty of them; and where
# they are kept decoded.
PER_PROCESS, PER_PROCESS_KEPT = 32, 256


@dataclass
class ImageBatch:
    pixels: Tensor  # uint8 (B, C, H, W), on the device
    labels: Tensor  # int64 (B,), or uint8 (B, K) where an image has any number of labels
    weights: Tensor  # float32 (B,): how much an image counts; 0 if it could not be read
    epoch: Tensor  # int64 (B,)
    sample: Tensor  # int64 (B,): index in the split
    position: Tensor  # int64 (B,): place in the batch of the step, of which this may be one rank's part
    failures: list[tuple[str, str]] = field(default_factory=list)  # (name, reason) of the images that could not be read
    extra: int = 0  # rows at the front that belong to the rank before: to mix with, then to drop

    def __len__(self) -> int:
        return len(self.labels)


def concat_batches(batches: Sequence[ImageBatch]) -> ImageBatch:
    """One after the other, as one."""
    return ImageBatch(
        torch.cat([batch.pixels for batch in batches]),
        torch.cat([batch.labels for batch in batches]),
        torch.cat([batch.weights for batch in batches]),
        torch.cat([batch.epoch for batch in batches]),
        torch.cat([batch.sample for batch in batches]),
        torch.cat([batch.position for batch in batches]),
        [failure for batch in batches for failure in batch.failures],
        batches[0].extra,
    )


class BatchDecoder:
    """Pixels of the rows of a batch; runs in the workers."""

    def __init__(self, reader: Reader, augment: AugmentConfig | None = None, seed: int = 0) -> None:
        self.reader, self.seed = reader, seed
        self.augment = augment if augment is not None and augment.crop not in FULL_IMAGE_CROPS else None

    def __call__(self, pixels: np.ndarray, epochs: np.ndarray, samples: np.ndarray) -> Failures:
        """Write uint8 (n, C, H, W); an image that gives no pixels becomes black and is reported."""
        draws = crop_draws(self.seed, epochs, samples) if self.augment is not None else None  # (n, attempts, 4)
        failures = []
        for row, sample in enumerate(samples.tolist()):
            try:
                pixels[row] = self._pixels(sample, None if draws is None else draws[row]).numpy()
            except BadImage as error:
                pixels[row] = 0
                failures.append((row, str(error)))
        return failures

    def _pixels(self, sample: int, draws: np.ndarray | None) -> Tensor:
        augment = self.augment
        if augment is None or draws is None:
            return eval_transform(self.reader.image(sample), self.reader.spec)
        return self.reader.crop(sample, lambda height, width: crop_box(height, width, augment, draws))


class Loader:
    """Batches for training steps or for evaluation, from the main process or from workers."""

    def __init__(self, maker: BatchDecoder, order: Sampler, workers: int, device: torch.device) -> None:
        self.maker, self.order, self.workers, self.device = maker, order, workers, device

    @property
    def reader(self) -> Reader:
        return self.maker.reader

    def from_step(self, start: int, stop: int, together: int = 1) -> Iterator[ImageBatch]:
        """The batches of steps start, start+1, ..., stop-1. On a GPU, copies go on beside the work on the last one, and
        `together` of them may come as one."""
        made = self._from_workers(start, stop) if self.workers else self._from_here(start, stop)
        epoch = -1
        try:
            arrived = _copied_ahead(made, self.device) if self.device.type == "cuda" else iter(made)
            for first in range(start, stop, together):
                batches = list(islice(arrived, min(together, stop - first)))
                if epoch < (epoch := int(batches[-1].epoch[-1])):
                    self.reader.save()
                yield batches[0] if len(batches) == 1 else concat_batches(batches)
        finally:
            made.close()
            self.reader.save()

    @property
    def shape(self) -> tuple[int, int, int]:
        spec = self.reader.spec
        return spec.channels, *spec.size

    def _from_here(self, start: int, stop: int) -> Generator[ImageBatch]:
        for step in range(start, stop):
            rows = self.order(step)
            pixels = torch.empty(
                len(rows.samples), *self.shape, dtype=torch.uint8, pin_memory=self.device.type == "cuda"
            )
            yield self._batch(pixels, rows, self.maker(pixels.numpy(), rows.epochs, rows.samples))

    def _from_workers(self, start: int, stop: int) -> Generator[ImageBatch]:
        slots = Slots(self.order.most, self.shape)
        pool = WorkerPool(self.maker, self.workers, slots)
        steps, coming = iter(range(start, stop)), deque[tuple[int, BatchRows]]()
        try:
            with pinned(slots.pixels, self.device):
                while True:
                    while slots.free and (step := next(steps, None)) is not None:
                        slot, rows = slots.free.popleft(), self.order(step)
                        pool.start(slot, rows.epochs, rows.samples)
                        coming.append((slot, rows))
                    if not coming:
                        return
                    slot, rows = coming.popleft()
                    failures = pool.finish(slot)
                    yield self._batch(slots.lend(slot, len(rows.samples)), rows, failures)
        finally:
            pool.close()

    def _batch(self, pixels: Tensor, rows: BatchRows, failures: Failures) -> ImageBatch:
        source, extra = self.reader.source, self.order.extra
        known = source.weights_of(rows.samples) if self.order.weighs else np.ones(len(rows.samples))
        weights = np.array(known, np.float32)
        weights[[row for row, _ in failures]] = 0
        weights[rows.positions == PADDING] = 0
        return ImageBatch(
            pixels,
            torch.from_numpy(np.ascontiguousarray(source.labels_of(rows.samples))),
            torch.from_numpy(weights),
            torch.from_numpy(rows.epochs),
            torch.from_numpy(rows.samples),
            torch.from_numpy(rows.positions),
            # A neighbour's row is for its own rank to report.
            [(source.name(int(rows.samples[row])), reason) for row, reason in failures if row >= extra],
            extra,
        )


def _copied_ahead(batches: Iterable[ImageBatch], device: torch.device) -> Iterator[ImageBatch]:
    """The batches with their pixels on a GPU, one copied while the one before is worked on."""
    stream = torch.cuda.Stream(device)
    ahead: ImageBatch | None = None
    try:
        for batch in batches:
            with torch.cuda.stream(stream):
                copy = batch.pixels.to(device, non_blocking=True)
            if ahead is not None:
                yield ahead
            # The copy had the time of a step: to wait costs nothing, and its source may be used again after it.
            stream.synchronize()
            copy.record_stream(torch.cuda.current_stream(device))
            ahead = replace(batch, pixels=copy)
        if ahead is not None:
            yield ahead
    finally:
        stream.synchronize()


class EvaluationLoader(Loader):
    """Every image of a split, or a rank's part of them."""

    order: EvaluationSampler

    def __len__(self) -> int:
        return self.order.steps

    def __iter__(self) -> Iterator[ImageBatch]:
        return self.from_step(0, len(self))


def training_sampler(
    reader: Reader, batch_size: int, augment: AugmentConfig, seed: int, ranks: Ranks = SINGLE_PROCESS
) -> TrainingSampler:
    """`batch_size` is that of all ranks together. The batch of a step depends on nothing but the seed and the step."""
    mixes = bool(augment.mixup or augment.cutmix)
    return TrainingSampler(len(reader.source), batch_size, seed, ranks.rank, ranks.world_size, mixes, augment.repeats)


def training_loader(
    reader: Reader,
    batch_size: int,
    augment: AugmentConfig,
    seed: int,
    workers: int | None,
    device: torch.device,
    ranks: Ranks = SINGLE_PROCESS,
) -> Loader:
    order = training_sampler(reader, batch_size, augment, seed, ranks)
    return Loader(BatchDecoder(reader, augment, seed), order, workers_for(reader, workers, device, ranks), device)


def evaluation_loader(
    reader: Reader, batch_size: int, workers: int | None, device: torch.device, ranks: Ranks = SINGLE_PROCESS
) -> EvaluationLoader:
    order = EvaluationSampler(len(reader.source), batch_size, ranks.rank, ranks.world_size)
    processes = workers_for(reader, workers, device, ranks)
    if workers is None:
        images = PER_PROCESS if reader.cache is None else PER_PROCESS_KEPT
        processes = min(processes, len(reader.source) // (images * ranks.world_size))
    return EvaluationLoader(BatchDecoder(reader), order, processes, device)


def workers_for(reader: Reader, asked: int | None, device: torch.device, ranks: Ranks = SINGLE_PROCESS) -> int:
    """How many processes make batches. Images that are kept decoded only need to be cut out and resized."""
    if asked is not None:
        return asked
    kept, share = reader.cache is not None, max(1, cores() // ranks.local_world_size)
    if device.type == "cuda":
        return min(8 if kept else 16, share)
    return min(1, share - 1) if kept else min(8, share)
