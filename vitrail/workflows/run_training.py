"""Run the trainer in a run folder: checkpoints, curves, and how to resume after a signal.

In: a module, a task, batches, settings and a `RunContext`. Out: the trained weights. `vitrail train` and `vitrail.fit`
both train here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from vitrail.config import RunConfig, TrainConfig
from vitrail.errors import UserError, os_errors_as
from vitrail.interrupt import Interrupted
from vitrail.report.training_plots import draw_training_curves
from vitrail.tasks.task import TrainingTask
from vitrail.terminal import escape
from vitrail.training.batches import BatchStream
from vitrail.training.checkpoint import Checkpoint, CheckpointManager
from vitrail.training.progress import read_metrics
from vitrail.training.run_context import RunContext
from vitrail.training.state import TrainState
from vitrail.training.trainer import Trainer, Validate
from vitrail.workflows.run_folder import NEW, OLD, check_not_replaced, move_into_place, stop_message


@dataclass(frozen=True)
class TrainResult:
    """The result of a training run."""

    folder: Path
    weights: Path
    report: Path | None  # none without a classifier
    scores: Any  # of the final measurement


def train_in_folder(
    model: nn.Module,
    task: TrainingTask,
    batches: BatchStream,
    config: RunConfig,
    run: RunContext,
    *,
    validate: Validate | None,
    saved: Checkpoint | None,
    flops_per_image: float = 0.0,
) -> tuple[dict[str, Tensor], float]:
    """Call `Trainer.fit` with the checkpoints and curves of a run folder.

    Returns the weights to keep and the seconds that the run took, over all its launches."""
    checkpoints = RunCheckpoints(run, config.train, new=saved is None)
    try:
        trainer = Trainer(
            model, task, batches, config, run, checkpoints, validate=validate, flops_per_image=flops_per_image
        )
        result = trainer.fit(saved)
    except BaseException:
        with contextlib.suppress(UserError):  # report what stopped the run, not an error of the plot
            if run.ranks.is_first:
                _draw_curves(run.folder)
        raise
    run.ranks.broadcast(lambda: _draw_curves(run.folder))
    return result


def _draw_curves(folder: Path) -> None:
    rows = read_metrics(folder / "metrics.jsonl")
    if any("loss" in row for row in rows):
        with os_errors_as(f"cannot write to {folder / 'curves.svg'}"):
            draw_training_curves(rows, folder / "curves.svg")


class RunCheckpoints(CheckpointManager):
    """The checkpoints of a run folder. The first one of a new run moves the run from `NEW` into the folder."""

    def __init__(self, run: RunContext, train: TrainConfig, new: bool):
        tenth = max(1, (train.steps or 0) // 10)
        super().__init__(
            run.folder / "checkpoints", train.keep_checkpoints, run.ranks, every=train.checkpoint_every or tenth
        )
        self.run, self.new = run, new

    def save(self, state: TrainState, run_facts: Mapping[str, Any]) -> None:
        folder, ranks = self.run.folder, self.run.ranks
        if not self.new:
            ranks.broadcast(lambda: check_not_replaced(folder, self.run.lock))
            super().save(state, run_facts)
            return
        CheckpointManager(folder / NEW / "checkpoints", self.keep, ranks, every=self.every).save(state, run_facts)
        if ranks.broadcast(lambda: move_into_place(folder)):
            self.run.console.print(f"the previous run is kept in {escape(str(folder / OLD))} until this run finishes")
        self.new = False


@contextlib.contextmanager
def resume_advice(folder: Path, command: str) -> Iterator[None]:
    """When a signal stops the run, add to the message what is saved and the command that resumes the run."""
    try:
        yield
    except Interrupted as stopped:
        stopped.advice = stop_message(folder, command)
        raise
