"""The training part of a run: objects from a plan, the loop, and what comes out of it."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from vitrail.errors import UserError
from vitrail.images.randomness import step_seed
from vitrail.model.cost import macs
from vitrail.model.estimate import peak_of
from vitrail.objectives.batch import Objective, Prepared
from vitrail.report.plots import draw_curves
from vitrail.runs.batches import Targets, TrainingBatches
from vitrail.runs.learner import Task
from vitrail.runs.plan import Plan
from vitrail.runs.room import parallel_for
from vitrail.training.average import Average
from vitrail.training.checkpoint import Checkpoints, Saved
from vitrail.training.events import Events, told_if_it_fails
from vitrail.training.graph import GraphedUpdate
from vitrail.training.interrupt import Interrupts
from vitrail.training.loop import LoopPlan, Surroundings, run
from vitrail.training.optimizer import build_optimizer
from vitrail.training.parallel import Ranks, compile_blocks, distribute, whole
from vitrail.training.precision import autocast, repeatable
from vitrail.training.progress import MetricsLog, TrainingProgress, read_metrics
from vitrail.training.schedule import learning_rate
from vitrail.training.state import TrainState
from vitrail.training.step import Update


@dataclass(frozen=True)
class Launch:
    """What a launch of a run works in."""

    folder: Path
    about: dict[str, Any]  # what checkpoints say of the run
    console: Console
    interrupts: Interrupts
    ranks: Ranks


def fit(
    plan: Plan, module: nn.Module, task: Task, launch: Launch, saved: Saved | None = None
) -> tuple[dict[str, Tensor], float]:
    """Train `module` from a checkpoint, or from the start, to the last step; returns the weights to keep (the average,
    where one is kept) and the seconds of all launches."""
    settings, ranks = plan.config.train, launch.ranks
    state = _state(plan, module, ranks)
    when = _when(plan)
    checkpoints = Checkpoints(
        launch.folder / "checkpoints", settings.keep_checkpoints, ranks, every=when.checkpoint_every
    )
    started = time.monotonic() - (saved.facts["seconds"] if saved is not None else 0.0)

    def save(current: TrainState) -> None:
        checkpoints.save(current, {**launch.about, "seconds": time.monotonic() - started})

    def restore(current: TrainState, given_up: Collection[int]) -> None:
        found = ranks.share(lambda: checkpoints.latest_good(current.step, given_up))
        assert found is not None  # a run saves before its first step
        _take(current, found[0])

    if saved is not None:
        _take(state, saved)
    else:
        save(state)  # a run killed before its first checkpoint can go on too
    update = _update(plan, task.objective, ranks)
    # Corrupted patches are drawn by the host anew in each step, which a graph cannot repeat.
    graphs = settings.compile == "graphs" and ranks.world == 1 and task.labels is not None
    graphs = graphs and not settings.recompute  # which keeps random numbers of its own, and a graph would not know them
    with (
        _progress(plan, launch, state.step) as progress,
        repeatable(plan.device, settings.deterministic),
    ):
        batches = TrainingBatches(plan, task.targets, ranks, progress)
        if ranks.world > 1 and state.step < plan.steps:
            update.rehearse(state, pattern(plan, task.targets, settings.batch_size // ranks.world))
        evaluator = task.evaluator(plan, ranks, launch.interrupts)
        around = Surroundings(batches, evaluator, save, restore, progress, launch.interrupts, ranks)
        try:
            run(state, GraphedUpdate(update, progress.message) if graphs else update, when, around)
        except BaseException:
            with contextlib.suppress(UserError):  # what stopped the run is what to tell
                if ranks.first:
                    _curves(launch.folder)
            raise
    ranks.share(lambda: _curves(launch.folder))
    return weights_of(state, ranks), time.monotonic() - started


def weights_of(state: TrainState, ranks: Ranks) -> dict[str, Tensor]:
    """Every tensor of the model, averaged where there is an average, in one piece on the CPU, for the first process.
    All of them call this together."""
    found, average = {}, state.average.tensors if state.average is not None else {}
    for name, tensor in state.model.state_dict().items():
        one = whole(average.get(name, tensor))  # as it is kept: the model may have fewer digits
        if ranks.first:
            found[name] = one.to("cpu", copy=True)
    return found


def _state(plan: Plan, module: nn.Module, ranks: Ranks) -> TrainState:
    """The module with its optimizer and average, distributed and compiled as the plan says."""
    config = plan.config
    how = parallel_for(plan, ranks)
    # fsdp hangs its work between blocks. A network small enough for graphs gains 5 % when it is compiled as one, and
    # takes longer to compile than most of its runs earn back.
    by_blocks = config.train.compile in ("blocks", "graphs") or how == "fsdp"
    if config.train.compile != "off" and by_blocks:
        compile_blocks(module)
    network = distribute(module, how, config.precision, plan.device)
    if config.train.compile != "off" and not by_blocks:
        network = torch.compile(network)  # type: ignore[assignment]
    optimizer = build_optimizer(module, config.optimizer)
    average = Average(module, config.train.ema, config.train.ema_ramp) if config.train.ema else None
    return TrainState(module, optimizer, average, network=network)


def _take(state: TrainState, saved: Saved) -> None:
    state.load(saved.where.keys(), saved.read, saved.facts)


def _when(plan: Plan) -> LoopPlan:
    settings, tenth = plan.config.train, max(1, plan.steps // 10)
    return LoopPlan(
        plan.steps,
        settings.log_every,
        settings.evaluate_every or tenth,
        settings.checkpoint_every or tenth,
        math.inf if settings.checkpoint_every else 60.0,
        settings.bad_steps,
        settings.rollbacks,
    )


def _update(plan: Plan, objective: Objective, ranks: Ranks) -> Update:
    config = plan.config
    return Update(
        objective,
        lambda step: learning_rate(step, config.optimizer.lr, plan.steps, config.schedule),
        config.optimizer.clip,
        autocast(config.precision.compute, plan.device),
        lambda step: step_seed(config.train.seed, step, ranks.rank),
        config.train.micro_batch,
        ranks,
    )


def pattern(plan: Plan, targets: Targets, size: int) -> Prepared:
    """A batch of the right shapes."""
    pixels = torch.zeros(size, plan.preprocess.channels, *plan.preprocess.size, device=plan.device)
    key = torch.zeros(size, dtype=torch.int64)
    return Prepared(pixels, targets(key.to(plan.device)), torch.ones(size, device=plan.device), key, key)


def _progress(plan: Plan, launch: Launch, start: int) -> TrainingProgress:
    metrics = MetricsLog(launch.folder / "metrics.jsonl", start) if launch.ranks.first else None
    written = launch.ranks.first and plan.config.train.tensorboard
    events = Events(launch.folder / "tensorboard", start) if written else None
    peak = peak_of(torch.cuda.get_device_name(plan.device)) if plan.device.type == "cuda" else None
    return TrainingProgress(
        launch.console,
        metrics,
        plan.steps,
        start,
        flops_per_image=6.0 * macs(plan.model),
        peak=peak and peak * launch.ranks.world,
        events=events,
    )


def _curves(folder: Path) -> None:
    rows = read_metrics(folder / "metrics.jsonl")
    if any("loss" in row for row in rows):
        with told_if_it_fails(folder / "curves.svg"):
            draw_curves(rows, folder / "curves.svg")
