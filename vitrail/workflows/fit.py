"""The training part of a run, for any network and any data: optimizer, loop, checkpoints, and what comes out of it."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from torch import Tensor, nn

from vitrail.config import RunConfig
from vitrail.data.randomness import step_seed
from vitrail.distributed import Ranks
from vitrail.errors import UserError
from vitrail.inference.device import autocast, repeatable
from vitrail.interrupt import Interrupts
from vitrail.models.estimate import peak_of
from vitrail.report.plots import draw_curves
from vitrail.tasks.task import Batch, Objective
from vitrail.terminal import escape
from vitrail.training.checkpoint import Checkpoints, Saved
from vitrail.training.cuda_graph import GraphedUpdate
from vitrail.training.ema import Average
from vitrail.training.loop import Evaluator, LoopPlan, Surroundings, run
from vitrail.training.optimizer import build_optimizer
from vitrail.training.parallel import compile_blocks, distribute, whole
from vitrail.training.progress import MetricsLog, TrainingProgress, read_metrics
from vitrail.training.schedule import learning_rate
from vitrail.training.state import TrainState
from vitrail.training.step import Update
from vitrail.training.tensorboard import Events, told_if_it_fails
from vitrail.workflows.run_folder import NEW, OLD, Lock, check_there, take_place


@dataclass(frozen=True)
class Launch:
    """What a launch of a run works in."""

    folder: Path
    about: dict[str, Any]  # what checkpoints say of the run
    console: Console
    interrupts: Interrupts
    ranks: Ranks
    lock: Lock = (0, 0)  # by which the folder is this launch's


@dataclass(frozen=True)
class Learning:
    """What is learned, from what, and how."""

    config: RunConfig
    device: torch.device
    parallel: Literal["none", "ddp", "fsdp"]
    objective: Objective
    batches: Callable[[TrainingProgress], Callable[[int, int], Iterable[Any]]]  # of a step and all after it
    evaluator: Callable[[Callable[[], bool]], Evaluator | None]  # from what tells whether training is at its end
    rehearsal: Batch | None = None  # a batch of the right shapes
    graphs: bool = False  # whether a step may be recorded as a CUDA graph
    flops_per_image: float = 0.0  # 0: not known

    @property
    def steps(self) -> int:
        return self.config.train.steps or 0


def fit(
    learning: Learning, module: nn.Module, launch: Launch, saved: Saved | None = None
) -> tuple[dict[str, Tensor], float]:
    """Train `module` from a checkpoint, or from the start, to the last step; returns the weights to keep (the average,
    where one is kept) and the seconds of all launches."""
    settings, ranks = learning.config.train, launch.ranks
    with launch.interrupts.at_once(ranks):
        state = _state(learning, module)
    when = _when(learning)
    checkpoints, first = (
        Checkpoints(place / "checkpoints", settings.keep_checkpoints, ranks, every=when.checkpoint_every)
        for place in (launch.folder, launch.folder / NEW)
    )
    started = time.monotonic() - (saved.facts["seconds"] if saved is not None else 0.0)

    def about() -> dict[str, Any]:
        return {**launch.about, "seconds": time.monotonic() - started}

    def save(current: TrainState) -> None:
        ranks.share(lambda: check_there(launch.folder, launch.lock))
        checkpoints.save(current, about())

    def restore(current: TrainState, given_up: Collection[int]) -> None:
        found = ranks.share(lambda: checkpoints.latest_good(current.step, given_up))
        if found is None:  # a run saves before its first step
            raise UserError(f"{checkpoints.folder} holds no checkpoint any more, and the run has to go back to one")
        _take(current, found[0])

    if saved is not None:
        _take(state, saved)
    else:  # a run killed before its first checkpoint can resume too; only now an earlier one is moved aside
        first.save(state, about())
        if ranks.share(lambda: take_place(launch.folder)):
            launch.console.print(f"the earlier run is kept in {escape(str(launch.folder / OLD))} until this one ends")
    update = _update(learning, ranks)
    with (
        _progress(learning, launch, state.step) as progress,
        repeatable(learning.device, settings.deterministic),
    ):
        batches = learning.batches(progress)
        if ranks.world > 1 and state.step < learning.steps and learning.rehearsal is not None:
            update.rehearse(state, learning.rehearsal)
        measured = learning.evaluator(lambda: state.step == learning.steps)
        around = Surroundings(batches, measured, save, restore, progress, launch.interrupts, ranks)
        try:
            run(state, GraphedUpdate(update, progress.message) if learning.graphs else update, when, around)
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
    first: dict[int, str] = {}  # a parameter that several layers share has one average
    names = {name: first.setdefault(id(p), name) for name, p in state.model.named_parameters(remove_duplicate=False)}
    for name, tensor in state.model.state_dict().items():
        one = whole(average.get(names.get(name, name), tensor))  # as it is kept: the model may have fewer digits
        if ranks.first:
            found[name] = one.to("cpu", copy=True, memory_format=torch.contiguous_format)
    return found


def _state(learning: Learning, module: nn.Module) -> TrainState:
    """The module with its optimizer and average, distributed and compiled as the settings say."""
    config, how = learning.config, learning.parallel
    # fsdp hangs its work between blocks. A network small enough for graphs gains 5 % when it is compiled as one, and
    # takes longer to compile than most of its runs earn back.
    by_blocks = config.train.compile in ("blocks", "graphs") or how == "fsdp"
    if config.train.compile != "off" and by_blocks:
        compile_blocks(module)
    network = distribute(module, how, config.precision, learning.device)
    if config.train.compile != "off" and not by_blocks:
        network = torch.compile(network)  # type: ignore[assignment]
    optimizer = build_optimizer(module, config.optimizer)
    average = Average(module, config.train.ema, config.train.ema_ramp) if config.train.ema else None
    return TrainState(module, optimizer, average, network=network)


def _take(state: TrainState, saved: Saved) -> None:
    state.load(saved.where.keys(), saved.read, saved.facts)


def _when(learning: Learning) -> LoopPlan:
    settings, tenth = learning.config.train, max(1, learning.steps // 10)
    return LoopPlan(
        learning.steps,
        settings.log_every,
        settings.evaluate_every or tenth,
        settings.checkpoint_every or tenth,
        math.inf if settings.checkpoint_every else 60.0,
        settings.bad_steps,
        settings.rollbacks,
    )


def _update(learning: Learning, ranks: Ranks) -> Update:
    config = learning.config
    return Update(
        learning.objective,
        lambda step: learning_rate(step, config.optimizer.lr, learning.steps, config.schedule),
        config.optimizer.clip,
        autocast(config.precision.compute, learning.device),
        lambda step: step_seed(config.train.seed, step, ranks.rank),
        config.train.micro_batch,
        ranks,
    )


def _progress(learning: Learning, launch: Launch, start: int) -> TrainingProgress:
    metrics = MetricsLog(launch.folder / "metrics.jsonl", start) if launch.ranks.first else None
    written = launch.ranks.first and learning.config.train.tensorboard
    events = Events(launch.folder / "tensorboard", start) if written else None
    device = learning.device
    peak = peak_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return TrainingProgress(
        launch.console,
        metrics,
        learning.steps,
        start,
        flops_per_image=learning.flops_per_image,
        peak=peak and peak * launch.ranks.world,
        events=events,
    )


def _curves(folder: Path) -> None:
    rows = read_metrics(folder / "metrics.jsonl")
    if any("loss" in row for row in rows):
        with told_if_it_fails(folder / "curves.svg"):
            draw_curves(rows, folder / "curves.svg")
