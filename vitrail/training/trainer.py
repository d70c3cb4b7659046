"""The trainer: any model on any task, from a checkpoint or from the start, to the last step.

It knows no model and no task by name. Models may offer `blocks` and `param_depth(name)` (parallel.py, optimizer.py);
a task gives the loss of a batch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.config import RunConfig
from vitrail.distributed import Ranks
from vitrail.errors import UserError
from vitrail.inference.device import choose_device, deterministic
from vitrail.interrupt import Interrupted
from vitrail.tasks.task import TrainingTask
from vitrail.training.batches import BatchStream
from vitrail.training.checkpoint import Checkpoint, CheckpointManager
from vitrail.training.cuda_graph import GraphedStep
from vitrail.training.ema import EMA
from vitrail.training.optimizer import build_optimizer
from vitrail.training.parallel import choose_parallel, compile_blocks, distribute, local_shard, reshard
from vitrail.training.progress import TrainingProgress, open_progress
from vitrail.training.run_context import RunContext
from vitrail.training.state import TrainState
from vitrail.training.step import TrainStep
from vitrail.training.throughput import Throughput

SAVING_SHARE = 50  # times as long as a checkpoint takes, at least, between two that only time asks for
CHECKPOINT_SECONDS = 60.0  # between two checkpoints, where the settings do not say how many steps

Validate = Callable[
    [nn.Module, bool], dict[str, float]
]  # the model, and whether this is the last validation -> numbers


def train_model(
    model: nn.Module,
    task: TrainingTask,
    batches: BatchStream,
    config: RunConfig,
    run: RunContext,
    checkpoints: CheckpointManager,
    *,
    validate: Validate | None = None,
    saved: Checkpoint | None = None,
    flops_per_image: float = 0.0,
) -> tuple[dict[str, Tensor], float]:
    """Train `model` to the last step of `config`.

    Parameters
    ----------
    model
        Any module; its weights are changed in place.
    task
        Gives the loss of a batch: `task.loss(model, batch)`.
    batches
        The stream of batches.
    config
        Read are `train`, `optimizer`, `schedule` and `precision`.
    run
        Folder, console, processes and signals of the run.
    checkpoints
        Where the state of the run is saved.
    validate
        Called every `train.evaluate_every` steps and after the last one; its numbers are logged.
    saved
        The checkpoint to resume from.
    flops_per_image
        What training on an image takes, for the TFLOP/s in the log; 0: not known.

    Returns
    -------
    The weights to keep (the moving average, where there is one), on the CPU of the first process; and the seconds that
    the run took, all its launches together.
    """
    device = choose_device(config.train.device)
    with run.interrupts.interruptible(run.ranks):
        state = build_train_state(model, config, device, run.ranks)
    started = time.monotonic() - (saved.facts["seconds"] if saved is not None else 0.0)

    def facts() -> dict[str, Any]:
        return {**run.facts, "seconds": time.monotonic() - started}

    if saved is not None:
        saved.load_into(state)
    else:  # so that a run that is killed before its first checkpoint can resume too
        checkpoints.save(state, facts())
    step = TrainStep(task.loss, config, device, run.ranks)
    with (
        open_progress(config.train, run, device, state.step, flops_per_image) as progress,
        deterministic(device, config.train.deterministic),
    ):
        if advice := batches.waiting_advice(state.step):
            progress.advise(*advice)
        if (
            run.ranks.world_size > 1
            and state.step < (config.train.steps or 0)
            and (example := batches.example()) is not None
        ):
            step.rehearse(state, example)
        # Gradient checkpointing saves and restores the random state, which a CUDA graph cannot do.
        recomputes = config.train.gradient_checkpointing
        graphs = config.train.compile == "graphs" and run.ranks.world_size == 1 and not recomputes
        graphed = GraphedStep(step, progress.message) if graphs and task.graph_safe else step
        Trainer(state, graphed, batches, config, run, progress, checkpoints, facts, validate).train()
    return state.final_weights(run.ranks), time.monotonic() - started


def build_train_state(model: nn.Module, config: RunConfig, device: torch.device, ranks: Ranks) -> TrainState:
    """The model with its optimizer and average, distributed and compiled as the settings say."""
    train, parallel = config.train, choose_parallel(model, config.train, ranks, device)
    # FSDP is applied block by block. A network small enough for CUDA graphs gains 5 % when it is compiled as a whole,
    # and takes longer to compile than most of its runs earn back.
    by_blocks = train.compile in ("blocks", "graphs") or parallel == "fsdp"
    if train.compile != "off" and by_blocks:
        compile_blocks(model)
    network = distribute(model, parallel, config.precision, device)
    if train.compile != "off" and not by_blocks:
        network = torch.compile(network)  # type: ignore[assignment]
    optimizer = build_optimizer(model, config.optimizer)
    average = EMA(model, train.ema, train.ema_warmup) if train.ema else None
    return TrainState(model, optimizer, average, network=network)


class _Diverged(Exception):
    """The weights, or too many gradients in a row, are not finite."""


@dataclass
class Trainer:
    """The loop over steps: log, validate, save, skip steps without a finite gradient, return to a checkpoint after many
    of these in a row, and stop at a signal. All processes of a run call everything here together."""

    state: TrainState
    step: TrainStep | GraphedStep
    batches: BatchStream
    config: RunConfig
    run: RunContext
    progress: TrainingProgress
    checkpoints: CheckpointManager
    facts: Callable[[], dict[str, Any]]  # what to store in a checkpoint
    validate: Validate | None = None

    def __post_init__(self) -> None:
        train = self.config.train
        self.steps = train.steps or 0
        tenth = max(1, self.steps // 10)
        self.validate_every = train.evaluate_every or tenth
        self.checkpoint_every = train.checkpoint_every or tenth
        self.checkpoint_seconds = math.inf if train.checkpoint_every else CHECKPOINT_SECONDS
        self.throughput = Throughput(self.run.ranks)

    def train(self) -> None:
        """From state.step to the last step. On a signal: save, then raise Interrupted, at the next boundary."""
        returned_to: int | None = None
        given_up: set[int] = set()  # checkpoints from which it diverged again, before anything better was saved
        while True:
            try:
                return self._train()
            except _Diverged:
                if self.state.rollbacks >= self.config.train.max_rollbacks:
                    raise self._diverged() from None
            if returned_to is not None and self.state.last_good_step == returned_to:
                given_up.add(returned_to)
            else:
                given_up.clear()
            self._roll_back(given_up)
            returned_to = self.state.last_good_step

    def _train(self) -> None:
        state = self.state
        self.throughput = Throughput(self.run.ranks)
        state.model.train()
        if state.step and state.validated_step < state.step and self._validation_due():
            self._validate()  # a signal came before it
        # What is on the disk is all there is until the first step is taken, which may start workers and compile long.
        with ExitStack() as beginning:
            beginning.enter_context(self.run.interrupts.interruptible(self.run.ranks))
            self._steps(beginning.close)

    def _steps(self, begun: Callable[[], None]) -> None:
        """`begun` is called after every step; only the first call does something."""
        state, train, ranks, interrupts = self.state, self.config.train, self.run.ranks, self.run.interrupts
        saved_at, save_seconds = time.monotonic(), 0.0  # of the last checkpoint
        # Across machines an exchange between all processes takes a while, and a step need not wait for it.
        agree_every = 1 if ranks.world_size == ranks.local_world_size else train.log_every
        for batch in self.throughput.waiting(self.batches(state.step, state.skipped_batches)):
            self.throughput.add(self.step(state, batch), len(batch))
            begun()
            step, last = state.step, state.step == self.steps
            self.progress.step(step)
            if step % train.log_every == 0 or last:
                self._log()
            if (step % train.log_every == 0 or step % train.max_nonfinite_steps == 0) and int(
                state.nonfinite_steps
            ) >= train.max_nonfinite_steps:
                raise _Diverged
            due = 0
            if step % agree_every == 0 or last:
                late = time.monotonic() - saved_at > max(self.checkpoint_seconds, SAVING_SHARE * save_seconds)
                caught, due = ranks.all_reduce_max(interrupts.caught or 0, int(late and ranks.is_first))
                if caught:
                    self._save()
                    raise Interrupted(caught)
            if self._validation_due():
                self._validate()
            if step % self.checkpoint_every == 0 or last or due:
                since = time.monotonic()
                with self.throughput.paused():
                    self._save()
                saved_at = time.monotonic()
                save_seconds = saved_at - since
        if state.step < self.steps and interrupts.caught:  # the signal ended the source of the batches, too
            self._save()
            raise Interrupted(interrupts.caught)

    def _log(self) -> None:
        step, row = self.state.step, self.throughput.summary()
        skipped = int(row.pop("skipped"))
        self.progress.log({"step": step, **row, "lr": self.step.learning_rate(step - 1)})
        if skipped:
            steps = "one step" if skipped == 1 else f"{skipped} steps"
            event = f"{steps} without a finite gradient left the weights as they were"
            self.progress.log({"step": step, "event": event})

    def _validation_due(self) -> bool:
        step = self.state.step
        return self.validate is not None and (step % self.validate_every == 0 or step == self.steps)

    def _validate(self) -> None:
        """Measure the averaged weights where there is an average, else the current ones. On a signal: save."""
        assert self.validate is not None
        state = self.state
        averaged = state.ema.applied(state.model) if state.ema is not None else nullcontext()
        try:
            with self.throughput.paused(), averaged:
                state.model.eval()
                try:
                    row = self.validate(state.model, state.step == self.steps)
                finally:
                    state.model.train()
                    reshard(state.model)
        except Interrupted:
            self._save()
            raise
        if not math.isfinite(row.get("val_loss", 0.0)):
            raise _Diverged
        state.validated_step = state.step
        self.progress.log({"step": state.step, **row})

    def _save(self) -> None:
        """Also after a step without a finite gradient: to resume from, but not to roll back to."""
        finite = [torch.isfinite(local_shard(p.detach())).all() for p in self.state.model.parameters()]
        if any(self.run.ranks.all_reduce_max(int(not torch.stack(finite).all()))):
            raise _Diverged
        self.checkpoints.save(self.state, self.facts())
        if not int(self.state.nonfinite_steps):
            self.state.last_good_step = self.state.step

    def _roll_back(self, given_up: set[int]) -> None:
        """Return to the last good checkpoint, and pass over the batches on the way to the trouble: with them, it would
        only come again."""
        state = self.state
        at, position, rollbacks = state.step, state.step + state.skipped_batches, state.rollbacks + 1
        found = self.run.ranks.broadcast(lambda: self.checkpoints.latest_good(at, given_up))
        if found is None:  # a run saves before its first step
            folder = self.checkpoints.folder
            raise UserError(f"{folder} holds no checkpoint any more, and the run has to go back to one")
        found[0].load_into(state)
        state.last_good_step = state.step
        state.skipped_batches, state.rollbacks = position - state.step, rollbacks
        state.nonfinite_steps.zero_()
        self.progress.rewind(state.step)
        event = (
            f"at step {at} the numbers were not finite any more: back to step {state.step}, with other images "
            f"({self.config.train.max_rollbacks - rollbacks} more such returns before the run ends)"
        )
        self.progress.log({"step": state.step, "event": event})

    def _diverged(self) -> UserError:
        rollbacks = self.config.train.max_rollbacks
        again = f", also after going back {rollbacks} times" if rollbacks else ""
        return UserError(
            f"training diverged: at step {self.state.step} the loss or the weights are not numbers any more{again}; "
            "start again with a lower learning rate (--set optimizer.lr=...)"
        )
