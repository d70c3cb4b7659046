"""The trainer: trains any model on any task, from the start or from a checkpoint, to the last step.

Read `Trainer` from top to bottom. One optimizer step is in step.py, the state that training changes in state.py.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.config import RunConfig
from vitrail.errors import UserError
from vitrail.inference.device import choose_device, deterministic
from vitrail.interrupt import Interrupted
from vitrail.tasks.task import TrainingTask
from vitrail.training.batches import BatchStream
from vitrail.training.checkpoint import Checkpoint, CheckpointManager
from vitrail.training.cuda_graph import GraphedStep
from vitrail.training.parallel import local_shard, reshard
from vitrail.training.progress import TrainingProgress, open_progress
from vitrail.training.run_context import RunContext
from vitrail.training.state import build_train_state
from vitrail.training.step import TrainStep
from vitrail.training.throughput import Throughput

CHECKPOINT_SECONDS = 60.0  # between timed checkpoints, which are saved unless train.checkpoint_every is set
MAX_SAVE_OVERHEAD = 50  # the time between timed checkpoints is at least this many times the duration of a save

Validate = Callable[[nn.Module, bool], dict[str, float]]  # (model, is this the last validation) -> metrics


class _Diverged(Exception):
    """The weights, the validation loss or many gradients in a row are NaN or Inf."""


class Trainer:
    """Train a model.

    The loop logs, validates and saves checkpoints. It skips a step whose gradient is NaN or Inf, and rolls back to a
    good checkpoint after `train.max_nonfinite_steps` of them in a row. On SIGINT or SIGTERM it saves a checkpoint and
    raises `Interrupted`. In a distributed run every process calls every method.

    Parameters
    ----------
    model
        Any module. Its weights are changed in place. Optional methods: see blocks.py.
    task
        Computes the loss of a batch: `task.loss(model, batch)`.
    batches
        The stream of training batches.
    config
        The sections `train`, `optimizer`, `schedule` and `precision` are used.
    run
        Folder, console, processes and signals of the run.
    checkpoints
        Where checkpoints are saved.
    validate
        Called every `train.evaluate_every` steps and after the last step. Its metrics are logged.
    flops_per_image
        FLOPs of a training step per image, to log TFLOP/s. 0 if unknown.
    """

    progress: TrainingProgress

    def __init__(
        self,
        model: nn.Module,
        task: TrainingTask,
        batches: BatchStream,
        config: RunConfig,
        run: RunContext,
        checkpoints: CheckpointManager,
        *,
        validate: Validate | None = None,
        flops_per_image: float = 0.0,
    ):
        self.task, self.batches, self.config, self.run = task, batches, config, run
        self.checkpoints, self.validate, self.flops_per_image = checkpoints, validate, flops_per_image
        self.device, self.ranks = choose_device(config.train.device), run.ranks
        with run.interrupts.interruptible(run.ranks):
            self.state = build_train_state(model, config, self.device, run.ranks)
        self.train_step: TrainStep | GraphedStep = TrainStep(task.loss, config, self.device, run.ranks)
        self.throughput = Throughput(run.ranks)
        self.started = time.monotonic()

        self.steps = config.train.steps or 0
        tenth = max(1, self.steps // 10)
        self.validate_every = config.train.evaluate_every or tenth
        self.checkpoint_every = config.train.checkpoint_every or tenth
        self.checkpoint_seconds = math.inf if config.train.checkpoint_every else CHECKPOINT_SECONDS

    def fit(self, checkpoint: Checkpoint | None = None) -> tuple[dict[str, Tensor], float]:
        """Train to the last step.

        Parameters
        ----------
        checkpoint
            The checkpoint to resume from.

        Returns
        -------
        The final weights (the moving average with `train.ema`), on the CPU of the first process and empty on the
        others; and the duration of the run in seconds, over all launches.
        """
        if checkpoint is not None:
            self.started -= checkpoint.facts["seconds"]
            checkpoint.load_into(self.state)
        else:  # lets a run that is killed before its first regular checkpoint resume
            self.checkpoints.save(self.state, self.facts())
        train, start = self.config.train, self.state.step
        with (
            open_progress(train, self.run, self.device, start, self.flops_per_image) as self.progress,
            deterministic(self.device, train.deterministic),
        ):
            if advice := self.batches.waiting_advice(start):
                self.progress.advise(*advice)
            self._prepare_first_step()
            self.train()
        return self.state.final_weights(self.ranks), time.monotonic() - self.started

    def train(self) -> None:
        """Run the training loop to the last step, with rollbacks."""
        rolled_back_to: int | None = None
        rejected: set[int] = set()  # checkpoints from which training diverged before it saved a good one
        while True:
            try:
                return self._train()
            except _Diverged:
                if self.state.rollbacks >= self.config.train.max_rollbacks:
                    raise self._divergence_error() from None
            if rolled_back_to is not None and self.state.last_good_step == rolled_back_to:
                rejected.add(rolled_back_to)
            else:
                rejected.clear()
            self.roll_back(rejected)
            rolled_back_to = self.state.last_good_step

    def _train(self) -> None:
        state = self.state
        self.throughput = Throughput(self.ranks)
        state.model.train()
        if state.step and state.validated_step < state.step and self._validation_due():
            self.run_validation()  # a signal stopped the run between this step and its validation
        # Until the first step is done (worker start, compilation) nothing is lost if a signal stops the run at once.
        with ExitStack() as before_first_step:
            before_first_step.enter_context(self.run.interrupts.interruptible(self.ranks))
            self._loop(before_first_step)

    def _loop(self, before_first_step: ExitStack) -> None:
        state, train, interrupts = self.state, self.config.train, self.run.interrupts
        saved_at, save_seconds = time.monotonic(), 0.0  # of the last checkpoint
        # Agreeing on signals and timed checkpoints is an all-reduce: across machines, only on steps that log.
        agree_every = 1 if self.ranks.world_size == self.ranks.local_world_size else train.log_every

        for batch in self.throughput.timed(self.batches(state.step, state.skipped_batches)):
            result = self.train_step(state, batch)
            self.throughput.add(result, len(batch))
            before_first_step.close()

            step, is_last = state.step, state.step == self.steps
            self.progress.step(step)
            if step % train.log_every == 0 or is_last:
                self.log()
            read_counter = step % train.log_every == 0 or step % train.max_nonfinite_steps == 0  # waits for the device
            if read_counter and int(state.nonfinite_steps) >= train.max_nonfinite_steps:
                raise _Diverged

            timed_checkpoint_due = 0
            if step % agree_every == 0 or is_last:
                elapsed = time.monotonic() - saved_at
                late = elapsed > max(self.checkpoint_seconds, MAX_SAVE_OVERHEAD * save_seconds)
                caught, timed_checkpoint_due = self.ranks.all_reduce_max(
                    interrupts.caught or 0, int(late and self.ranks.is_first)
                )
                if caught:
                    self.save_checkpoint()
                    raise Interrupted(caught)
            if self._validation_due():
                self.run_validation()
            if step % self.checkpoint_every == 0 or is_last or timed_checkpoint_due:
                save_started = time.monotonic()
                with self.throughput.paused():
                    self.save_checkpoint()
                saved_at = time.monotonic()
                save_seconds = saved_at - save_started

        if state.step < self.steps and interrupts.caught:  # the signal ended the data loader's workers, too
            self.save_checkpoint()
            raise Interrupted(interrupts.caught)

    def log(self) -> None:
        step, row = self.state.step, self.throughput.summary()
        skipped = int(row.pop("skipped"))
        self.progress.log({"step": step, **row, "lr": self.train_step.learning_rate(step - 1)})
        if skipped:
            steps = "1 step" if skipped == 1 else f"{skipped} steps"
            self.progress.log({"step": step, "event": f"skipped {steps}: non-finite gradient"})

    def run_validation(self) -> None:
        """Validate the moving average of the weights (with `train.ema`), else the current weights."""
        assert self.validate is not None
        state = self.state
        averaged = state.ema.applied(state.model) if state.ema is not None else nullcontext()
        try:
            with self.throughput.paused(), averaged:
                state.model.eval()
                try:
                    metrics = self.validate(state.model, state.step == self.steps)
                finally:
                    state.model.train()
                    reshard(state.model)
        except Interrupted:
            self.save_checkpoint()
            raise
        if not math.isfinite(metrics.get("val_loss", 0.0)):
            raise _Diverged
        state.validated_step = state.step
        self.progress.log({"step": state.step, **metrics})

    def save_checkpoint(self) -> None:
        """Save a checkpoint, if the weights are finite. After a skipped step a run can resume from it, but it is not
        one to roll back to."""
        finite = [torch.isfinite(local_shard(p.detach())).all() for p in self.state.model.parameters()]
        if any(self.ranks.all_reduce_max(int(not torch.stack(finite).all()))):
            raise _Diverged
        self.checkpoints.save(self.state, self.facts())
        if not int(self.state.nonfinite_steps):
            self.state.last_good_step = self.state.step

    def facts(self) -> dict[str, Any]:
        """The facts of the run that are stored in each checkpoint."""
        return {**self.run.facts, "seconds": time.monotonic() - self.started}

    def roll_back(self, rejected: set[int]) -> None:
        """Load the last good checkpoint, and skip the batches since then: they would make training diverge again."""
        state = self.state
        diverged_at, position, rollbacks = state.step, state.step + state.skipped_batches, state.rollbacks + 1
        good = self.ranks.broadcast(lambda: self.checkpoints.latest_good(diverged_at, rejected))
        if good is None:
            raise UserError(f"training diverged, and {self.checkpoints.folder} has no checkpoint left to roll back to")
        checkpoint, _ = good
        checkpoint.load_into(state)
        state.last_good_step = state.step
        state.skipped_batches, state.rollbacks = position - state.step, rollbacks
        state.nonfinite_steps.zero_()
        self.progress.rewind(state.step)
        left = self.config.train.max_rollbacks - rollbacks
        event = (
            f"NaN or Inf at step {diverged_at}: rolled back to step {state.step} and skipped the batches in between "
            f"(rollbacks left: {left})"
        )
        self.progress.log({"step": state.step, "event": event})

    def _prepare_first_step(self) -> None:
        """Rehearse the first step in a distributed run; use a CUDA graph where that is possible."""
        train, train_step = self.config.train, self.train_step
        assert isinstance(train_step, TrainStep)
        if (
            self.ranks.world_size > 1
            and self.state.step < self.steps
            and (example := self.batches.example()) is not None
        ):
            train_step.rehearse(self.state, example)
        # Gradient checkpointing saves and restores the random state, which a CUDA graph cannot do.
        use_graph = train.compile == "graphs" and self.ranks.world_size == 1 and not train.gradient_checkpointing
        if use_graph and self.task.graph_safe:
            self.train_step = GraphedStep(train_step, self.progress.message)

    def _validation_due(self) -> bool:
        step = self.state.step
        return self.validate is not None and (step % self.validate_every == 0 or step == self.steps)

    def _divergence_error(self) -> UserError:
        rollbacks = self.config.train.max_rollbacks
        after = f" after {rollbacks} rollbacks" if rollbacks else ""
        return UserError(
            f"training diverged: NaN or Inf in the loss, gradients or weights at step {self.state.step}{after}. "
            "Start again with a lower learning rate (--set optimizer.lr=...)"
        )
