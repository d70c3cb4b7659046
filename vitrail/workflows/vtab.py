"""Tasks of VTAB-1k: the 1,000 training images of a task, its score by a linear probe, and its score by fine-tuning."""

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
from vitrail.data.sources.split_lists import VTAB_1K_LISTS
from vitrail.data.splits import group_ids
from vitrail.errors import UserError
from vitrail.inference.features import Features
from vitrail.metrics.accuracy import proportion_interval
from vitrail.metrics.probe import Probe, fit_probe
from vitrail.metrics.scores import Interval
from vitrail.metrics.vtab import TRAIN, VAL, VtabTask
from vitrail.workflows.transfer import run_transfer

CANDIDATES = 3  # times the images to validate on, to choose those from that stand apart from training images


def vtab_splits(dataset: Dataset, task: VtabTask) -> tuple[Samples, Samples, Samples]:
    """The 800, the 200 and the test images. Where they are not published, they are drawn by the content of the images:
    the same ones whatever their names and order."""
    splits = dataset.splits
    if dataset.multilabel:
        raise UserError(f"the images of '{dataset.root}' have any number of labels, and those of {task.name} have one")
    if "all" in splits:
        images = splits["all"]
        learned, watched, rest = _parted(images, task, dataset)
        test = images.subset(rest)
    elif "train" in splits and "test" in splits:
        images, test = splits["train"], splits["test"]
        learned = _order(images)
        last = len(learned) if "val" in splits else int(len(learned) * task.learned)
        learned, watched = learned[:last], learned[last:]
    else:
        raise UserError(f"'{dataset.root}' has the splits {', '.join(splits)}: {task.name} needs train and test")
    given = splits["val"] if "all" not in splits and "val" in splits else None
    to_validate = len(watched) if given is None else len(given)
    if len(learned) < TRAIN or to_validate < VAL:
        raise UserError(
            f"'{dataset.root}' has {len(learned):,} images to train and {to_validate:,} to validate on, and VTAB-1k "
            f"takes {TRAIN} and {VAL}"
        )
    learned = learned[:TRAIN]
    val = images.subset(_apart(images, learned, watched)) if given is None else given.subset(_order(given)[:VAL])
    return images.subset(learned), val, test


def _apart(images: Samples, learned: np.ndarray, watched: np.ndarray) -> np.ndarray:
    """The first rows to validate on that belong together with none that is trained on; others only for want of such."""
    candidates = watched[: CANDIDATES * VAL]
    groups = group_ids(images, np.concatenate([learned, candidates]))
    with_learned = np.isin(groups[len(learned) :], groups[: len(learned)])
    return candidates[np.argsort(with_learned, kind="stable")][:VAL]


def _parted(images: Samples, task: VtabTask, dataset: Dataset) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows to train, to validate and to test on."""
    order = _order(images)
    if task.per_class:
        own = [order[images.labels[order] == label][: task.per_class] for label in range(len(images.classes))]
        learned = np.concatenate(own)
        learned = learned[_order(images.subset(learned))]
        last = int(len(learned) * task.learned)
        return learned[:last], learned[last:], np.setdiff1d(order, learned)
    if task.parts is None:
        raise UserError(f"'{dataset.root}' comes without a split, and {task.name} has one: {task.split}")
    first, second = (int(len(order) * share) for share in (task.parts[0], task.parts[0] + task.parts[1]))
    return order[:first], order[first:second], order[second:]


def _order(samples: Samples) -> np.ndarray:
    return np.argsort(samples.original_digests, kind="stable")


LISTS = "Read as a task of VTAB-1k with its published lists."


@dataclass(frozen=True)
class TaskScore:
    key: str
    group: str
    accuracy: float
    interval: Interval  # 95 %, over the test images
    tested: int
    setting: str  # chosen on the 200, or given
    published: bool  # whether the 1,000 images are the published ones
    notes: list[str]  # in what it is not the published task


def comparability_notes(task: VtabTask, published: bool, classes: int, tested: int, seen: int) -> list[str]:
    """`seen`: test images that the weights were trained on."""
    notes = [] if published else ["the 1,000 images are drawn anew: compare it in kind, not to the digit"]
    if classes != task.classes:
        notes.append(f"{classes} classes, and the task has {task.classes}")
    if tested != task.test:
        notes.append(f"{tested:,} test images, and the task has {task.test:,}")
    if seen:
        notes.append(f"{seen:,} test images were seen in training: the number is too good")
    return notes


def probe_score(task: VtabTask, dataset: Dataset, splits: Sequence[Features], seen: int) -> TaskScore:
    """A linear probe, whose penalty is chosen on the images to validate on; then all 1,000 images are trained on."""
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
    best = max(tried, key=lambda penalty: tried[penalty])  # the strongest of equals
    probe = fit(torch.cat([x, x_val]), torch.cat([y, y_val]), best)
    right = tested = 0
    for values, truth in test.parts():
        right += int((probe.predict(values) == truth).sum())
        tested += len(truth)
    published = LISTS in dataset.notes
    notes = comparability_notes(task, published, classes, tested, seen)
    interval = proportion_interval(right, tested)
    return TaskScore(task.key, task.group, right / tested, interval, tested, f"penalty {best:g}", published, notes)


RECIPE = "paper-finetune-vtab"


def finetune_tasks(
    weights: str | Path,
    places: Mapping[VtabTask, Path],
    *,
    out: str | Path,
    seeds: int,
    overrides: Sequence[str],
    console: Console,
) -> list[TaskScore]:
    """Each on its published 1,000 images, without augmentation that would change a label; finished runs are taken as
    they are."""
    for task, place in places.items():
        missing = [name for name in VTAB_1K_LISTS if not (place / name).is_file()]
        if missing:
            raise UserError(
                f"fine-tuning takes the {TRAIN} and {VAL} images of published lists, and '{place}' has no "
                f"{missing[0]}: leave {task.key} out with --tasks, or measure it by a probe"
            )
    scores = []
    for task, place in places.items():
        found = run_transfer(
            place,
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
                found.mean,
                proportion_interval(round(found.mean * found.tested), found.tested),
                found.tested,
                f"rate {found.rate:g}, {seeds} {'seed' if seeds == 1 else 'seeds'}",
                True,
                comparability_notes(task, True, task.classes, found.tested, found.seen_before),
            )
        )
    return scores


def task_overrides(task: VtabTask, overrides: Sequence[str]) -> list[str]:
    """What is asked for, without what would change the label of an image; where images are not cut, no matter how."""
    how = () if task.crop else ("augment.scale=", "augment.ratio=")
    unchanged = ["augment.flip=false"] * (not task.flip) + ["augment.crop=none"] * (not task.crop)
    return [*unchanged, *(setting for setting in overrides if not setting.startswith(how))]
