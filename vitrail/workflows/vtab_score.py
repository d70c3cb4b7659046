"""What a task of VTAB-1k scored, and in what it was not the published task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vitrail.config import ProbeConfig
from vitrail.data.dataset import Dataset
from vitrail.inference.features import Features
from vitrail.metrics.accuracy import proportion_interval
from vitrail.metrics.probe import Probe, fit_probe
from vitrail.metrics.scores import Interval
from vitrail.metrics.vtab import VtabTask

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


def notes_on(task: VtabTask, published: bool, classes: int, tested: int, seen: int) -> list[str]:
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
    notes = notes_on(task, published, classes, tested, seen)
    interval = proportion_interval(right, tested)
    return TaskScore(task.key, task.group, right / tested, interval, tested, f"penalty {best:g}", published, notes)
