"""Tasks of VTAB-1k: the 1,000 training images of a task, its score by a linear probe, and its score by fine-tuning.

In: a dataset and a `VtabTask`. Out: the splits (`vtab_splits`), and a `TaskScore` (`probe_score`, `finetune_tasks`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from vitrail.config import ProbeConfig
from vitrail.data.dataset import Dataset, Samples
from vitrail.data.sources.split_lists import VTAB_1K_LISTS, VTAB_1K_NOTE
from vitrail.data.splits import group_ids
from vitrail.errors import UserError
from vitrail.inference.features import Features
from vitrail.metrics.accuracy import proportion_interval
from vitrail.metrics.probe import Probe, fit_probe
from vitrail.metrics.scores import Interval
from vitrail.metrics.vtab import TRAIN, VAL, VtabTask
from vitrail.workflows.transfer import run_transfer

CANDIDATES = 3  # choose the validation images from this many times as many, to avoid groups with training images


def vtab_splits(dataset: Dataset, task: VtabTask) -> tuple[Samples, Samples, Samples]:
    """The 800 training, the 200 validation and the test images.

    If their lists are not published, they are drawn by the content of the images, whatever their names and order."""
    splits = dataset.splits
    if dataset.multilabel:
        raise UserError(f"the images of '{dataset.root}' are multilabel, but those of {task.name} have one label each")
    if "all" in splits:
        images = splits["all"]
        train, val, rest = _split_rows(images, task, dataset)
        test = images.subset(rest)
    elif "train" in splits and "test" in splits:
        images, test = splits["train"], splits["test"]
        train = _order(images)
        last = len(train) if "val" in splits else int(len(train) * task.learned)
        train, val = train[:last], train[last:]
    else:
        raise UserError(f"'{dataset.root}' has the splits {', '.join(splits)}: {task.name} needs train and test")
    published = splits["val"] if "all" not in splits and "val" in splits else None
    val_count = len(val) if published is None else len(published)
    if len(train) < TRAIN or val_count < VAL:
        raise UserError(
            f"'{dataset.root}' has {len(train):,} training and {val_count:,} validation images, but VTAB-1k needs "
            f"{TRAIN} and {VAL}"
        )
    train = train[:TRAIN]
    if published is None:
        return images.subset(train), images.subset(_ungrouped(images, train, val)), test
    return images.subset(train), published.subset(_order(published)[:VAL]), test


def _ungrouped(images: Samples, train: np.ndarray, val: np.ndarray) -> np.ndarray:
    """The first validation rows that share no group with training rows; others only if these are too few."""
    candidates = val[: CANDIDATES * VAL]
    groups = group_ids(images, np.concatenate([train, candidates]))
    grouped = np.isin(groups[len(train) :], groups[: len(train)])
    return candidates[np.argsort(grouped, kind="stable")][:VAL]


def _split_rows(images: Samples, task: VtabTask, dataset: Dataset) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The training, validation and test rows of a dataset without splits."""
    order = _order(images)
    if task.per_class:
        by_class = [order[images.labels[order] == label][: task.per_class] for label in range(len(images.classes))]
        rows = np.concatenate(by_class)
        rows = rows[_order(images.subset(rows))]
        last = int(len(rows) * task.learned)
        return rows[:last], rows[last:], np.setdiff1d(order, rows)
    if task.parts is None:
        raise UserError(f"'{dataset.root}' has no splits, but {task.name} needs them: {task.split}")
    first, second = (int(len(order) * share) for share in (task.parts[0], task.parts[0] + task.parts[1]))
    return order[:first], order[first:second], order[second:]


def _order(samples: Samples) -> np.ndarray:
    """Rows ordered by the content of the images."""
    return np.argsort(samples.original_digests, kind="stable")


@dataclass(frozen=True)
class TaskScore:
    """The score of one task, with how it was measured."""

    key: str
    group: str
    accuracy: float
    interval: Interval  # 95 %, over the test images
    tested: int
    setting: str  # chosen on the 200 validation images, or given
    published: bool  # whether the 1,000 images are the published ones
    notes: list[str]  # differences from the published task


def comparability_notes(task: VtabTask, published: bool, classes: int, tested: int, seen: int) -> list[str]:
    """Differences from the published task. `seen`: the number of test images that the weights were trained on."""
    notes = [] if published else ["the 1,000 images are not the published ones: compare scores only roughly"]
    if classes != task.classes:
        notes.append(f"{classes} classes, but the task has {task.classes}")
    if tested != task.test:
        notes.append(f"{tested:,} test images, but the task has {task.test:,}")
    if seen:
        notes.append(f"the weights were trained on {seen:,} of the test images: the score is too high")
    return notes


def probe_score(task: VtabTask, dataset: Dataset, splits: Sequence[Features], seen: int) -> TaskScore:
    """The score of a linear probe. Its penalty is chosen on the validation images; then it is fitted on all 1,000."""
    train, val, test = splits
    x, y = train.take(np.arange(len(train.samples)))
    x_val, y_val = val.take(np.arange(len(val.samples)))
    classes, settings = len(dataset.classes), ProbeConfig()

    def fit(features: Tensor, labels: Tensor, penalty: float) -> Probe:
        return fit_probe(features, labels, classes, penalties=(penalty,), iterations=settings.iterations)

    tried = {
        penalty: int((fit(x, y, penalty).predict(x_val) == y_val).sum())
        for penalty in sorted(settings.penalties, reverse=True)
    }
    best = max(tried, key=lambda penalty: tried[penalty])  # the strongest of equal ones
    probe = fit(torch.cat([x, x_val]), torch.cat([y, y_val]), best)
    correct = tested = 0
    for values, truth in test.parts():
        correct += int((probe.predict(values) == truth).sum())
        tested += len(truth)
    published = VTAB_1K_NOTE in dataset.notes
    notes = comparability_notes(task, published, classes, tested, seen)
    interval = proportion_interval(correct, tested)
    return TaskScore(task.key, task.group, correct / tested, interval, tested, f"penalty {best:g}", published, notes)


RECIPE = "paper-finetune-vtab"


def finetune_tasks(
    weights: str | Path,
    folders: Mapping[VtabTask, Path],
    *,
    out: str | Path,
    seeds: int,
    overrides: Sequence[str],
    console: Console,
) -> list[TaskScore]:
    """Fine-tune on the published 1,000 images of each task, without augmentation that would change a label.

    Finished runs are used again."""
    for task, folder in folders.items():
        missing = [name for name in VTAB_1K_LISTS if not (folder / name).is_file()]
        if missing:
            raise UserError(
                f"fine-tuning needs the published lists of {TRAIN} and {VAL} images, but '{folder}' has no "
                f"{missing[0]}: exclude {task.key} with --tasks, or measure it by a probe"
            )
    scores = []
    for task, folder in folders.items():
        result = run_transfer(
            folder,
            from_=weights,
            recipe=RECIPE,
            seeds=seeds,
            out=Path(out) / task.key,
            overrides=task_overrides(task, overrides),
            console=console,
        )
        scores.append(
            TaskScore(
                task.key,
                task.group,
                result.mean,
                proportion_interval(round(result.mean * result.tested), result.tested),
                result.tested,
                f"rate {result.rate:g}, {seeds} {'seed' if seeds == 1 else 'seeds'}",
                True,
                comparability_notes(task, True, task.classes, result.tested, result.seen_before),
            )
        )
    return scores


def task_overrides(task: VtabTask, overrides: Sequence[str]) -> list[str]:
    """The settings of the user, and settings so that augmentation changes no label. For a task without cropping, the
    settings of the crop are dropped."""
    crop_settings = () if task.crop else ("augment.scale=", "augment.ratio=")
    unchanged = ["augment.flip=false"] * (not task.flip) + ["augment.crop=none"] * (not task.crop)
    return [*unchanged, *(setting for setting in overrides if not setting.startswith(crop_settings))]
