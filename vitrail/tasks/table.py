"""Every kind of learning, by its name, and which one a run or a weights file has."""

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
COLUMNS = [task.columns for task in TASKS.values() if hasattr(task, "columns")]  # of each table of predictions


def task_name(config: RunConfig, dataset: Dataset) -> str:
    """What a run on these images learns."""
    if config.kind == "masked":
        return MaskedPatch.name
    return Multilabel.name if dataset.multilabel else Classification.name


def make_task(
    config: RunConfig,
    model: NetworkConfig,
    preprocess: Preprocess,
    dataset: Dataset,
    teacher: Callable[[], tuple[Teacher, Literal["softmax", "sigmoid"]]],
) -> Task:
    """The task of a run. `teacher` gives the network to distil from, where the settings name one, and the loss that it
    was trained with."""
    task: Task = TASKS[task_name(config, dataset)].from_run(config, model, preprocess, dataset)
    settings = config.objective
    if not settings.teacher or not isinstance(task, CrossEntropy):
        return task
    weight = 0.5 if settings.teacher_weight is None else settings.teacher_weight
    network, loss = teacher()
    return Distillation(task, network, weight, settings.teacher_targets, settings.temperature, loss)


def prediction_task(name: str, classes: int) -> PredictionTask:
    """The task of trained weights, to predict and to score with."""
    if not hasattr(TASKS.get(name), "predictions"):
        raise UserError(f"the weights are for a task '{name}', which this version of vitrail does not know: upgrade it")
    found: PredictionTask = TASKS[name](ObjectiveConfig(), classes)
    return found
