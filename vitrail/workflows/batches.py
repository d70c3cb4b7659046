"""The images of a run as batches for its network, and the measurement on held-out ones while it trains."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn

from vitrail.data.augment.batch import augment_batch, erase
from vitrail.data.augment.mix import mix
from vitrail.data.loader.loader import (
    UNCUT,
    Batch,
    Loader,
    Place,
    evaluation_loader,
    training_loader,
    training_order,
)
from vitrail.data.loader.reader import Reader
from vitrail.data.loader.resident import ResidentLoader
from vitrail.data.to_device import on_device
from vitrail.data.transforms import normalise
from vitrail.distributed import Ranks
from vitrail.errors import UserError
from vitrail.inference.device import autocast, repeatable
from vitrail.interrupt import Interrupts
from vitrail.metrics.multilabel import mean_average_precision
from vitrail.tasks.batch import Objective, Prepared
from vitrail.tasks.classification import Classification
from vitrail.training.loop import Evaluator
from vitrail.training.precision import measured_in_float32
from vitrail.training.progress import TrainingProgress
from vitrail.workflows.outputs import reader_of, waiting_advice
from vitrail.workflows.resolve import Plan

Targets = Callable[[Tensor], Tensor]  # labels -> (B, K)
RESIDENT = 8 << 30  # bytes of images that may be kept on a GPU
TOGETHER = 1 << 26  # values of images that are changed at one go, at most
RESIDENT_SHARE = 0.25  # of its free memory, at most


def pattern(plan: Plan, targets: Targets, size: int) -> Prepared:
    """A batch of the right shapes."""
    pixels = torch.zeros(size, plan.preprocess.channels, *plan.preprocess.size, device=plan.device)
    key = torch.zeros(size, dtype=torch.int64)
    return Prepared(pixels, targets(key.to(plan.device)), torch.ones(size, device=plan.device), key, key)


class TrainingBatches:
    """Batches as the network takes them; each unreadable image is reported once."""

    def __init__(self, plan: Plan, targets: Targets, ranks: Ranks, progress: TrainingProgress):
        self.plan, self.targets, self.progress = plan, targets, progress
        self.loader = _loader(plan, Place(ranks.rank, ranks.world, ranks.beside))
        self.reported: set[str] = set()

    def __call__(self, start: int, passed: int) -> Iterator[Prepared]:
        """Those of step `start` and all after it, with so many of the stream passed over."""
        place, stop, together = start + passed, self.plan.steps + passed, self._together()
        if isinstance(self.loader, Loader):
            self._advise(self.loader, start)
        upcoming = self.loader.from_step(place, stop, together)
        while place < stop:
            since = time.monotonic()
            batch = next(upcoming)
            waited = time.monotonic() - since  # augmentation, which comes next, is work and not waiting
            if isinstance(self.loader, ResidentLoader) and place > start + passed:
                waited = 0.0  # the images are on the device: it was the device's earlier work that took this time
            self._report(batch, place - passed)
            places = range(place, min(place + together, stop))
            for prepared in prepare(batch, places, self.plan, self.targets):
                yield replace(prepared, waited=waited / len(places))
            place = places.stop

    def _together(self) -> int:
        """Steps whose images are changed at one go: small ones take a GPU less time than its host."""
        if self.plan.device.type != "cuda":
            return 1
        values = min(TOGETHER, torch.cuda.get_device_properties(self.plan.device).total_memory >> 10)
        spec, rows = self.plan.preprocess, self.plan.config.train.batch_size
        return max(1, min(16, values // (rows * spec.channels * spec.size[0] * spec.size[1])))

    def _advise(self, loader: Loader, start: int) -> None:
        samples, batch_size = self.plan.dataset.splits["train"], self.plan.config.train.batch_size
        # Where images are kept, those of the first epoch are yet to be decoded: what it waits for says nothing.
        settled = start + (len(samples) // batch_size + 1 if loader.reader.cache is not None else 0)
        self.progress.advise(waiting_advice(loader, samples, self.plan.preprocess, self.plan.config.data), settled)

    def _report(self, batch: Batch, step: int) -> None:
        for name, reason in batch.failures:
            if name not in self.reported:
                self.progress.message(f"{name} cannot be read any more and is left out: {reason}")
                self.reported.add(name)
        if 2 * len(batch.failures) > len(batch):
            raise UserError(
                f"{len(batch.failures)} of the {len(batch)} images of step {step} cannot be read any more, first "
                f"{batch.failures[0][0]}: {batch.failures[0][1]}; put them back and go on with --resume"
            )


def _loader(plan: Plan, place: Place) -> Loader | ResidentLoader:
    config, samples, device = plan.config, plan.dataset.splits["train"], plan.device
    settings = config.train.batch_size, config.augment, config.train.seed
    size = len(samples) * plan.preprocess.channels * plan.preprocess.size[0] * plan.preprocess.size[1]
    if config.augment.crop in UNCUT and device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        if size <= min(RESIDENT, RESIDENT_SHARE * free):
            reader = Reader(samples, plan.preprocess, config.data.max_pixels)
            alone = replace(place, rank=0, world=1)  # any process may need any image
            images = evaluation_loader(reader, 512, config.data.workers, device, alone)
            return ResidentLoader(images, training_order(reader, *settings, place))
    reader = reader_of(samples, plan.preprocess, config.data, place.beside)
    return training_loader(reader, *settings, config.data.workers, device, place)


def prepare(batch: Batch, places: Sequence[int], plan: Plan, targets_of: Targets) -> Iterator[Prepared]:
    """The batches of some places of the stream, which lie in one, on the device: distorted, normalised, mixed. An image
    that could not be read counts nothing."""
    augment, seed = plan.config.augment, plan.config.train.seed
    pixels = batch.pixels.to(plan.device, non_blocking=True)
    pixels = augment_batch(pixels, augment, seed, batch.epoch, batch.sample)
    pixels = normalise(pixels, plan.preprocess)
    if augment.erasing:
        pixels = erase(pixels, augment, seed, batch.epoch, batch.sample)
    targets = targets_of(on_device(batch.labels.numpy(), plan.device))
    weights = on_device(batch.weights.numpy(), plan.device)
    if augment.mixup or augment.cutmix:
        pixels, targets, weights = mix(pixels, targets, weights, augment, seed, places, batch.position.numpy())
    size = len(batch) // len(places)
    for first in range(0, len(batch), size):
        own = slice(first + batch.extra, first + size)
        yield Prepared(pixels[own], targets[own], weights[own], batch.epoch[own], batch.sample[own])


class _HeldOut:
    """The validation images, each process taking a part of them: on the way in the precision of the training, in the
    end (`last`) as every other measurement, so that the last line of a run and its result are one number."""

    def __init__(self, plan: Plan, ranks: Ranks, interrupts: Interrupts, last: Callable[[], bool]):
        self.plan, self.ranks, self.last = plan, ranks, last
        self.cast = autocast(plan.config.precision.compute, plan.device)
        self.between = lambda _: interrupts.check(ranks)
        data = plan.config.data.model_copy(update={"scaled_decoding": False})
        reader = reader_of(plan.dataset.splits["val"], plan.preprocess, data, ranks.beside)
        size = max(1, min(plan.config.train.batch_size // ranks.world, 512))
        place = Place(ranks.rank, ranks.world, ranks.beside)
        self.loader = evaluation_loader(reader, size, data.workers, plan.device, place)

    @contextmanager
    def precision(self) -> Iterator[None]:
        if self.last() and measured_in_float32(self.plan.config.precision):
            compiled = self.plan.config.train.compile != "off"
            eager = torch.compiler.set_stance("force_eager") if compiled else nullcontext()
            with repeatable(self.plan.device), eager:
                yield
        else:
            with self.cast():
                yield


def classification_evaluator(
    plan: Plan, objective: Classification, ranks: Ranks, interrupts: Interrupts, last: Callable[[], bool]
) -> Evaluator:
    """Loss and accuracy on the validation images, during training. Only sums are kept: the logits of a million images
    would not fit in memory."""
    held = _HeldOut(plan, ranks, interrupts, last)

    @torch.no_grad()
    def evaluate(model: nn.Module) -> dict[str, float]:
        sums, found = torch.zeros(3, dtype=torch.float64), []
        for batch in held.loader:
            pixels = normalise(batch.pixels.to(plan.device, non_blocking=True), plan.preprocess)
            with held.precision():
                logits = model(pixels)
            readable = batch.weights > 0
            logits, labels = logits.float()[readable.to(plan.device)], batch.labels[readable]
            targets = objective.targets(labels.to(plan.device))
            loss = objective.loss(logits, targets, torch.ones(len(labels), device=plan.device))
            sums += torch.stack([loss.total, loss.right, loss.total.new_tensor(len(labels))]).double().cpu()
            if plan.dataset.several:
                found.append((logits.cpu(), labels))
            held.between(len(batch))
        loss, right, count = torch.stack(ranks.gather(sums)).sum(0).tolist()
        if not count:
            gone = "none of the images held out to measure on can be read any more"
            raise UserError(f"{gone}; put them back and go on with --resume")
        row = {"val_loss": loss / count}
        if not plan.dataset.several:
            return row | {"val_top1": right / count}
        pairs = [pair for part in ranks.gather(found) for pair in part]
        values, marks = (torch.cat(column).numpy() for column in zip(*pairs, strict=True))
        return row | {"val_map": mean_average_precision(values, marks)}

    return evaluate


def masked_evaluator(
    plan: Plan, objective: Objective, ranks: Ranks, interrupts: Interrupts, last: Callable[[], bool]
) -> Evaluator:
    """Loss and share of right predictions over corrupted patches of the validation images, the same ones each time."""
    held = _HeldOut(plan, ranks, interrupts, last)

    @torch.no_grad()
    def evaluate(model: nn.Module) -> dict[str, float]:
        sums = torch.zeros(3, dtype=torch.float64)
        for batch in held.loader:
            pixels = normalise(batch.pixels.to(plan.device, non_blocking=True), plan.preprocess)
            weights = batch.weights.to(plan.device)
            prepared = Prepared(pixels, torch.empty(len(batch), 0), weights, batch.epoch, batch.sample)
            with held.precision():
                found = objective(model, prepared)
            sums += torch.stack([found.total, found.right, weights.sum()]).double().cpu()
            held.between(len(batch))
        loss, right, count = torch.stack(ranks.gather(sums)).sum(0).tolist()
        row = {"val_loss": loss / max(count, 1)}
        return row | {"val_accuracy": right / max(count, 1)} if math.isfinite(right) else row

    return evaluate
