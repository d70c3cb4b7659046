"""The training part of a run: objects from a plan, the loop, and what comes out of it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from vitrail.errors import UserError
from vitrail.evaluate.tags import mean_average_precision
from vitrail.images.augment.batch import augment_batch, erase
from vitrail.images.augment.mix import mix
from vitrail.images.loading.loader import Batch, Loader, evaluation_loader, training_loader
from vitrail.images.preprocess import normalise
from vitrail.images.randomness import step_seed
from vitrail.infer.forward import run_network
from vitrail.model.build import Network
from vitrail.objectives.classification import Classification
from vitrail.runs.outputs import reader_of, waiting_advice
from vitrail.runs.plan import Plan
from vitrail.training.average import Average
from vitrail.training.checkpoint import Checkpoints, TrainState
from vitrail.training.interrupt import Interrupts
from vitrail.training.loop import Evaluator, LoopPlan, Prepared, Update, run
from vitrail.training.optimizer import build_optimizer
from vitrail.training.precision import autocast, repeatable
from vitrail.training.progress import MetricsLog, TrainingProgress
from vitrail.training.schedule import learning_rate


@dataclass(frozen=True)
class Checkpoint:
    """Where an earlier launch left the run."""

    tensors: dict[str, Tensor]
    step: int
    seconds: float  # of training before it


def fit(
    plan: Plan,
    net: Network,
    folder: Path,
    about: dict[str, Any],
    console: Console,
    interrupts: Interrupts,
    checkpoint: Checkpoint | None = None,
) -> tuple[Network, float]:
    """Train `net` to the last step; returns the network to keep (the average, where one is kept) and the seconds."""
    config, settings = plan.config, plan.config.train
    average = Average(net, settings.ema) if settings.ema else None
    state = TrainState(net, build_optimizer(net, config.optimizer), average)
    checkpoints = Checkpoints(folder / "checkpoints", settings.keep_checkpoints)

    started = time.monotonic() - (checkpoint.seconds if checkpoint is not None else 0.0)

    def save(current: TrainState) -> None:
        checkpoints.save(current, {**about, "seconds": time.monotonic() - started})

    if checkpoint is not None:
        state.load(checkpoint.tensors, checkpoint.step)
    else:
        save(state)  # a run killed before its first checkpoint can go on too
    objective = Classification(config.objective, len(plan.dataset.classes))
    metrics = MetricsLog(folder / "metrics.jsonl", state.step)
    with (
        TrainingProgress(console, metrics, plan.steps, state.step) as progress,
        repeatable(plan.device, settings.deterministic),
    ):
        run(
            state,
            prepared_batches(plan, objective, state.step, progress),
            _update(plan, objective),
            _when(plan),
            evaluator=_evaluator(plan, objective, interrupts),
            save=save,
            watcher=progress,
            interrupts=interrupts,
        )
    kept = average.model if average is not None else net
    return kept, time.monotonic() - started  # type: ignore[return-value]


def _when(plan: Plan) -> LoopPlan:
    settings, tenth = plan.config.train, max(1, plan.steps // 10)
    return LoopPlan(
        plan.steps,
        settings.log_every,
        settings.evaluate_every or tenth,
        settings.checkpoint_every or tenth,
        math.inf if settings.checkpoint_every else 60.0,
    )


def _update(plan: Plan, objective: Classification) -> Update:
    config = plan.config
    return Update(
        objective,
        lambda step: learning_rate(step, config.optimizer.lr, plan.steps, config.schedule),
        config.optimizer.clip,
        autocast(config.train.precision, plan.device),
        lambda step: step_seed(config.train.seed, step),
    )


def prepared_batches(
    plan: Plan, objective: Classification, start: int, progress: TrainingProgress
) -> Iterator[Prepared]:
    """Batches from step `start` on, as the network takes them; each unreadable image is reported once."""
    config, samples = plan.config, plan.dataset.splits["train"]
    reader = reader_of(samples, plan.preprocess, config.data)
    loader = training_loader(
        reader, config.train.batch_size, config.augment, config.train.seed, config.data.workers, plan.device
    )
    # Where images are kept, those of the first epoch are yet to be decoded: what it waits for says nothing.
    settled = start + (len(samples) // config.train.batch_size + 1 if reader.cache is not None else 0)
    progress.advise(waiting_advice(loader, samples, plan.preprocess, config.data), settled)
    reported: set[str] = set()
    upcoming = loader.from_step(start, plan.steps)
    for step in range(start, plan.steps):
        since = time.monotonic()
        batch = next(upcoming)
        waited = time.monotonic() - since  # augmentation, which comes next, is work and not waiting
        for name, reason in batch.failures:
            if name not in reported:
                progress.message(f"{name} cannot be read any more and is left out: {reason}")
                reported.add(name)
        if 2 * len(batch.failures) > len(batch):
            raise UserError(
                f"{len(batch.failures)} of the {len(batch)} images of step {step} cannot be read any more, first "
                f"{batch.failures[0][0]}: {batch.failures[0][1]}; put them back and go on with --resume"
            )
        yield replace(prepare(batch, step, plan, objective), waited=waited)


def prepare(batch: Batch, step: int, plan: Plan, objective: Classification) -> Prepared:
    """A batch on the device: distorted, normalised, mixed. An image that could not be read counts nothing."""
    augment, seed = plan.config.augment, plan.config.train.seed
    pixels = batch.pixels.to(plan.device, non_blocking=True)
    pixels = augment_batch(pixels, augment, seed, batch.epoch, batch.sample)
    pixels = normalise(pixels, plan.preprocess)
    if augment.erasing:
        pixels = erase(pixels, augment, seed, batch.epoch, batch.sample)
    targets = objective.targets(batch.labels).to(plan.device, non_blocking=True)
    weights = batch.weights.to(plan.device, non_blocking=True)
    if augment.mixup or augment.cutmix:
        pixels, targets, weights = mix(pixels, targets, weights, augment, seed, step, batch.position.numpy())
    return Prepared(pixels[batch.extra :], targets[batch.extra :], weights[batch.extra :])


def _evaluator(plan: Plan, objective: Classification, interrupts: Interrupts) -> Evaluator:
    """Loss and accuracy on the validation images, during training."""
    reader = reader_of(plan.dataset.splits["val"], plan.preprocess, plan.config.data)
    loader: Loader = evaluation_loader(reader, plan.config.train.batch_size, plan.config.data.workers, plan.device)
    cast: Callable[[], AbstractContextManager[object]] = autocast(plan.config.train.precision, plan.device)

    def evaluate(model: torch.nn.Module) -> dict[str, float]:
        out = run_network(
            model, loader, plan.preprocess, plan.device, autocast=cast, between=lambda _: interrupts.check()
        )
        loss = objective(out.values, objective.targets(out.labels), torch.ones(len(out.labels)))
        row = {"val_loss": loss.item()}
        if plan.dataset.several:
            return row | {"val_map": mean_average_precision(out.values.numpy(), out.labels.numpy())}
        return row | {"val_top1": (out.values.argmax(-1) == out.labels).float().mean().item()}

    return evaluate
