"""All tasks by name, and the task of a run or of a weights file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from vitrail.config import NetworkConfig, ObjectiveConfig, Preprocess, RunConfig
from vitrail.data.dataset import Dataset
from vitrail.errors import UserError
from vitrail.tasks.classification import Classification
from vitrail.tasks.cross_entropy import CrossEntropy
from vitrail.tasks.distillation import Distillation, Teacher
from vitrail.tasks.masked_patch import MaskedPatch
from vitrail.tasks.multilabel import Multilabel
from vitrail.tasks.task import PredictionTask, Task

TASKS: dict[str, type[Any]] = {task.name: task for task in (Classification, Multilabel, MaskedPatch)}
COLUMNS = [task.columns for task in TASKS.values() if hasattr(task, "columns")]  # of predictions.csv, for each task


def task_name(config: RunConfig, dataset: Dataset) -> str:
    """The name of the task of a run on a dataset."""
    if config.kind == "masked":
        return MaskedPatch.name
    return Multilabel.name if dataset.multilabel else Classification.name


def build_task(
    config: RunConfig,
    model: NetworkConfig,
    preprocess: Preprocess,
    dataset: Dataset,
    teacher: Callable[[], tuple[Teacher, Literal["softmax", "sigmoid"]]],
) -> Task:
    """Build the task of a run.

    Parameters
    ----------
    teacher
        Called if `objective.teacher` is set. Returns the teacher and the loss it was trained with.
    """
    task: Task = TASKS[task_name(config, dataset)].from_run(config, model, preprocess, dataset)
    objective = config.objective
    if not objective.teacher or not isinstance(task, CrossEntropy):
        return task
    weight = 0.5 if objective.teacher_weight is None else objective.teacher_weight
    network, loss = teacher()
    return Distillation(task, network, weight, objective.teacher_targets, objective.temperature, loss)


def prediction_task(name: str, classes: int) -> PredictionTask:
    """The task of trained weights, for prediction and evaluation."""
    if not hasattr(TASKS.get(name), "predictions"):
        raise UserError(
            f"these weights are for the task '{name}', which this version of vitrail cannot predict with"
            ": upgrade vitrail"
        )
    task: PredictionTask = TASKS[name](ObjectiveConfig(), classes)
    return task
