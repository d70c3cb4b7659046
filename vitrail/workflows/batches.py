"""The images of a run as batches for the trainer, and the validation during training.

In: a `Plan` and the targets of its task. Out: `ImageBatches`, a `BatchStream`; and a `Validate` function.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn

from vitrail.data.augment.batch import augment_batch, erase
from vitrail.data.augment.mix import mix
from vitrail.data.loader.loader import (
    FULL_IMAGE_CROPS,
    ImageBatch,
    Loader,
    evaluation_loader,
    training_loader,
    training_sampler,
)
from vitrail.data.loader.memory import data_wait_advice, make_reader
from vitrail.data.loader.reader import Reader
from vitrail.data.loader.resident import ResidentLoader
from vitrail.data.to_device import on_device
from vitrail.data.transforms import normalise
from vitrail.distributed import Ranks
from vitrail.errors import UserError
from vitrail.inference.device import autocast, deterministic
from vitrail.tasks.task import Batch, Task
from vitrail.terminal import escape
from vitrail.training.precision import validates_in_float32
from vitrail.training.run_context import RunContext
from vitrail.training.trainer import Validate
from vitrail.workflows.resolve import Plan

Targets = Callable[[Tensor], Tensor]  # labels -> (B, K)
RESIDENT = 8 << 30  # keep all images on the GPU up to this many bytes
TOGETHER = 1 << 26  # augment several batches at once, up to this many pixel values
RESIDENT_FRACTION = 0.25  # and up to this fraction of its free memory


def example_batch(plan: Plan, targets: Targets, ranks: Ranks) -> Batch:
    """A batch of zeros with the shapes of a training batch."""
    size = plan.config.train.batch_size // ranks.world_size
    pixels = torch.zeros(size, plan.preprocess.channels, *plan.preprocess.size, device=plan.device)
    key = torch.zeros(size, dtype=torch.int64)
    return Batch(pixels, targets(key.to(plan.device)), torch.ones(size, device=plan.device), key, key)


class ImageBatches:
    """The training images of a run as a stream of batches. Each unreadable image is reported once."""

    def __init__(self, plan: Plan, targets: Targets, run: RunContext):
        self.plan, self.targets, self.run = plan, targets, run
        self.loader = _training_loader(plan, run.ranks)
        self.reported: set[str] = set()

    def __call__(self, start: int, skipped: int) -> Iterator[Batch]:
        """The batches from step `start` on; `skipped` batches of the stream were skipped before it."""
        position, stop, together = start + skipped, self.plan.steps + skipped, self._together()
        upcoming = self.loader.from_step(position, stop, together)
        while position < stop:
            since = time.monotonic()
            batch = next(upcoming)
            waited = time.monotonic() - since  # without the augmentation that follows
            if isinstance(self.loader, ResidentLoader) and position > start + skipped:
                waited = 0.0  # the images are on the GPU, so this time was spent on its earlier work
            self._report(batch, position - skipped)
            positions = range(position, min(position + together, stop))
            for prepared in augmented_batches(batch, positions, self.plan, self.targets):
                yield replace(prepared, waited=waited / len(positions))
            position = positions.stop

    def _together(self) -> int:
        """The number of batches to augment at once: for small batches on a GPU, kernel launches are the bottleneck."""
        if self.plan.device.type != "cuda":
            return 1
        values = min(TOGETHER, torch.cuda.get_device_properties(self.plan.device).total_memory >> 10)
        spec, rows = self.plan.preprocess, self.plan.config.train.batch_size
        return max(1, min(16, values // (rows * spec.channels * spec.size[0] * spec.size[1])))

    def example(self) -> Batch:
        return example_batch(self.plan, self.targets, self.run.ranks)

    def waiting_advice(self, start: int) -> tuple[str, int] | None:
        if not isinstance(self.loader, Loader):
            return None
        samples, batch_size = self.plan.dataset.splits["train"], self.plan.config.train.batch_size
        # With a cache, images are decoded in the first epoch only, so its waiting time is not typical.
        settled = start + (len(samples) // batch_size + 1 if self.loader.reader.cache is not None else 0)
        return data_wait_advice(self.loader, samples, self.plan.preprocess, self.plan.config.data), settled

    def _report(self, batch: ImageBatch, step: int) -> None:
        for name, reason in batch.failures:
            if name not in self.reported:
                self.run.console.print(escape(f"{name} can no longer be read and is skipped: {reason}"))
                self.reported.add(name)
        if 2 * len(batch.failures) > len(batch):
            raise UserError(
                f"{len(batch.failures)} of the {len(batch)} images of step {step} can no longer be read, first "
                f"{batch.failures[0][0]}: {batch.failures[0][1]}; restore the images and continue with --resume"
            )


def _training_loader(plan: Plan, ranks: Ranks) -> Loader | ResidentLoader:
    config, samples, device = plan.config, plan.dataset.splits["train"], plan.device
    settings = config.train.batch_size, config.augment, config.train.seed
    size = len(samples) * plan.preprocess.channels * plan.preprocess.size[0] * plan.preprocess.size[1]
    if config.augment.crop in FULL_IMAGE_CROPS and device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        if size <= min(RESIDENT, RESIDENT_FRACTION * free):
            reader = Reader(samples, plan.preprocess, config.data.max_pixels)
            single = replace(ranks, rank=0, world_size=1)  # each process may need any image
            images = evaluation_loader(reader, 512, config.data.workers, device, single)
            return ResidentLoader(images, training_sampler(reader, *settings, ranks))
    reader = make_reader(samples, plan.preprocess, config.data, ranks.local_world_size)
    return training_loader(reader, *settings, config.data.workers, device, ranks)


def augmented_batches(batch: ImageBatch, positions: Sequence[int], plan: Plan, targets_of: Targets) -> Iterator[Batch]:
    """Split `batch`, which holds the images of several `positions` of the stream, into one batch for each.

    They are augmented, normalised and mixed on the device. An image that could not be read has weight 0."""
    augment, seed = plan.config.augment, plan.config.train.seed
    pixels = batch.pixels.to(plan.device, non_blocking=True)
    pixels = augment_batch(pixels, augment, seed, batch.epoch, batch.sample)
    pixels = normalise(pixels, plan.preprocess)
    if augment.erasing:
        pixels = erase(pixels, augment, seed, batch.epoch, batch.sample)
    targets = targets_of(on_device(batch.labels.numpy(), plan.device))
    weights = on_device(batch.weights.numpy(), plan.device)
    if augment.mixup or augment.cutmix:
        pixels, targets, weights = mix(pixels, targets, weights, augment, seed, positions, batch.position.numpy())
    size = len(batch) // len(positions)
    for first in range(0, len(batch), size):
        rows = slice(first + batch.overlap, first + size)
        yield Batch(pixels[rows], targets[rows], weights[rows], batch.epoch[rows], batch.sample[rows])


def make_validation(plan: Plan, task: Task, run: RunContext) -> Validate:
    """A function that measures a network on the validation split, a part of it in each process.

    During training it uses the training precision. The last validation uses float32 like the final measurement, so that
    the last line of the log and the result are the same number."""
    cast, ranks = autocast(plan.config.precision.compute, plan.device), run.ranks
    data = plan.config.data.model_copy(update={"scaled_decoding": False})
    reader = make_reader(plan.dataset.splits["val"], plan.preprocess, data, ranks.local_world_size)
    size = max(1, min(plan.config.train.batch_size // ranks.world_size, 512))
    loader = evaluation_loader(reader, size, data.workers, plan.device, ranks)

    @contextmanager
    def precision(last: bool) -> Iterator[None]:
        if last and validates_in_float32(plan.config.precision):
            compiled = plan.config.train.compile != "off"
            eager = torch.compiler.set_stance("force_eager") if compiled else nullcontext()
            with deterministic(plan.device), eager:
                yield
        else:
            with cast():
                yield

    @torch.no_grad()
    def evaluate(model: nn.Module, last: bool) -> dict[str, float]:
        validation = task.validation()
        for batch in loader:
            pixels = normalise(batch.pixels.to(plan.device, non_blocking=True), plan.preprocess)
            targets, weights = task.targets(batch.labels.to(plan.device)), batch.weights.to(plan.device)
            with precision(last):
                validation.update(model, Batch(pixels, targets, weights, batch.epoch, batch.sample))
            run.interrupts.check(ranks)
        return validation.compute(ranks)

    return evaluate
