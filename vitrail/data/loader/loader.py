"""Data loader: batches of samples, each a function of the step alone."""

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

FULL_IMAGE_CROPS = ("none", "shift", "zoom")  # values of augment.crop that resize the full image, as evaluation does
# Evaluation images per worker process, without and with a cache: starting one takes as long as decoding 10 to 20 images
IMAGES_PER_WORKER, IMAGES_PER_WORKER_CACHED = 32, 256


@dataclass
class ImageBatch:
    """One batch of images and labels."""

    pixels: Tensor  # uint8 (B, C, H, W), on the device
    labels: Tensor  # int64 (B,), or uint8 (B, K) for multilabel
    weights: Tensor  # float32 (B,): sample weights; 0 if the image could not be read
    epoch: Tensor  # int64 (B,)
    sample: Tensor  # int64 (B,): index in the split
    position: Tensor  # int64 (B,): position in the global batch of the step
    failures: list[tuple[str, str]] = field(default_factory=list)  # (name, reason) of images that could not be read
    overlap: int = 0  # rows at the front that belong to the previous rank: used for mixing, then dropped

    def __len__(self) -> int:
        return len(self.labels)


def concat_batches(batches: Sequence[ImageBatch]) -> ImageBatch:
    """Concatenate batches."""
    return ImageBatch(
        torch.cat([batch.pixels for batch in batches]),
        torch.cat([batch.labels for batch in batches]),
        torch.cat([batch.weights for batch in batches]),
        torch.cat([batch.epoch for batch in batches]),
        torch.cat([batch.sample for batch in batches]),
        torch.cat([batch.position for batch in batches]),
        [failure for batch in batches for failure in batch.failures],
        batches[0].overlap,
    )


class BatchDecoder:
    """Decodes the pixels of a batch; runs in the workers."""

    def __init__(self, reader: Reader, augment: AugmentConfig | None = None, seed: int = 0) -> None:
        self.reader, self.seed = reader, seed
        self.augment = augment if augment is not None and augment.crop not in FULL_IMAGE_CROPS else None

    def __call__(self, pixels: np.ndarray, epochs: np.ndarray, samples: np.ndarray) -> Failures:
        """Write uint8 (n, C, H, W). An image that cannot be read becomes black and is returned as a failure."""
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
    """Batches for training or evaluation, decoded in the main process or in workers."""

    def __init__(self, decoder: BatchDecoder, sampler: Sampler, workers: int, device: torch.device) -> None:
        self.decoder, self.sampler, self.workers, self.device = decoder, sampler, workers, device

    @property
    def reader(self) -> Reader:
        return self.decoder.reader

    def from_step(self, start: int, stop: int, merge: int = 1) -> Iterator[ImageBatch]:
        """Yield the batches of steps start, ..., stop-1, with `merge` steps concatenated into one batch.

        Copies to a GPU overlap with the work on the previous batch.
        """
        batches = self._from_workers(start, stop) if self.workers else self._from_main_process(start, stop)
        epoch = -1
        try:
            on_device = _copied_ahead(batches, self.device) if self.device.type == "cuda" else iter(batches)
            for first in range(start, stop, merge):
                merged = list(islice(on_device, min(merge, stop - first)))
                if epoch < (epoch := int(merged[-1].epoch[-1])):
                    self.reader.save()
                yield merged[0] if len(merged) == 1 else concat_batches(merged)
        finally:
            batches.close()
            self.reader.save()

    @property
    def shape(self) -> tuple[int, int, int]:
        spec = self.reader.spec
        return spec.channels, *spec.size

    def _from_main_process(self, start: int, stop: int) -> Generator[ImageBatch]:
        for step in range(start, stop):
            rows = self.sampler(step)
            pixels = torch.empty(
                len(rows.samples), *self.shape, dtype=torch.uint8, pin_memory=self.device.type == "cuda"
            )
            yield self._batch(pixels, rows, self.decoder(pixels.numpy(), rows.epochs, rows.samples))

    def _from_workers(self, start: int, stop: int) -> Generator[ImageBatch]:
        slots = Slots(self.sampler.max_rows, self.shape)
        pool = WorkerPool(self.decoder, self.workers, slots)
        steps, pending = iter(range(start, stop)), deque[tuple[int, BatchRows]]()
        try:
            with pinned(slots.pixels, self.device):
                while True:
                    while slots.free and (step := next(steps, None)) is not None:
                        slot, rows = slots.free.popleft(), self.sampler(step)
                        pool.start(slot, rows.epochs, rows.samples)
                        pending.append((slot, rows))
                    if not pending:
                        return
                    slot, rows = pending.popleft()
                    failures = pool.finish(slot)
                    yield self._batch(slots.lend(slot, len(rows.samples)), rows, failures)
        finally:
            pool.close()

    def _batch(self, pixels: Tensor, rows: BatchRows, failures: Failures) -> ImageBatch:
        source, overlap = self.reader.source, self.sampler.overlap
        sample_weights = source.weights_of(rows.samples) if self.sampler.weighted else np.ones(len(rows.samples))
        weights = np.array(sample_weights, np.float32)
        weights[[row for row, _ in failures]] = 0
        weights[rows.positions == PADDING] = 0
        return ImageBatch(
            pixels,
            torch.from_numpy(np.ascontiguousarray(source.labels_of(rows.samples))),
            torch.from_numpy(weights),
            torch.from_numpy(rows.epochs),
            torch.from_numpy(rows.samples),
            torch.from_numpy(rows.positions),
            # The previous rank reports the failures of its own rows.
            [(source.name(int(rows.samples[row])), reason) for row, reason in failures if row >= overlap],
            overlap,
        )


def _copied_ahead(batches: Iterable[ImageBatch], device: torch.device) -> Iterator[ImageBatch]:
    """Copy the pixels to a GPU, one batch ahead of the one in use."""
    stream = torch.cuda.Stream(device)
    ahead: ImageBatch | None = None
    try:
        for batch in batches:
            with torch.cuda.stream(stream):
                copy = batch.pixels.to(device, non_blocking=True)
            if ahead is not None:
                yield ahead
            # The copy had the time of a whole step, so this does not wait. Afterwards its source can be reused.
            stream.synchronize()
            copy.record_stream(torch.cuda.current_stream(device))
            ahead = replace(batch, pixels=copy)
        if ahead is not None:
            yield ahead
    finally:
        stream.synchronize()


class EvaluationLoader(Loader):
    """All images of a split once, or the part of one rank."""

    sampler: EvaluationSampler

    def __len__(self) -> int:
        return self.sampler.steps

    def __iter__(self) -> Iterator[ImageBatch]:
        return self.from_step(0, len(self))


def training_sampler(
    reader: Reader, batch_size: int, augment: AugmentConfig, seed: int, ranks: Ranks = SINGLE_PROCESS
) -> TrainingSampler:
    """Sampler of a training split. `batch_size` is the global one; a batch depends only on the seed and the step."""
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
    """Loader of a training split. `workers`: None chooses the number automatically."""
    sampler = training_sampler(reader, batch_size, augment, seed, ranks)
    return Loader(BatchDecoder(reader, augment, seed), sampler, workers_for(reader, workers, device, ranks), device)


def evaluation_loader(
    reader: Reader, batch_size: int, workers: int | None, device: torch.device, ranks: Ranks = SINGLE_PROCESS
) -> EvaluationLoader:
    """Loader of all images of a split, in order. `workers`: None chooses the number automatically."""
    sampler = EvaluationSampler(len(reader.source), batch_size, ranks.rank, ranks.world_size)
    processes = workers_for(reader, workers, device, ranks)
    if workers is None:
        images = IMAGES_PER_WORKER if reader.cache is None else IMAGES_PER_WORKER_CACHED
        processes = min(processes, len(reader.source) // (images * ranks.world_size))
    return EvaluationLoader(BatchDecoder(reader), sampler, processes, device)


def workers_for(reader: Reader, workers: int | None, device: torch.device, ranks: Ranks = SINGLE_PROCESS) -> int:
    """Number of worker processes: `workers`, or an automatic choice. Cached images need only be cropped and resized."""
    if workers is not None:
        return workers
    cached, cores_per_rank = reader.cache is not None, max(1, cores() // ranks.local_world_size)
    if device.type == "cuda":
        return min(8 if cached else 16, cores_per_rank)
    return min(1, cores_per_rank - 1) if cached else min(8, cores_per_rank)
