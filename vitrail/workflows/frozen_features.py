"""Classifiers on frozen features (least squares, linear probe, k-NN): fitted on training images, scored on test images.

In: a `FrozenTask` and the rows to fit on. Out: `Counts`, and from these a `FewShot` row of the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from vitrail.config import ProbeConfig
from vitrail.inference.features import Features
from vitrail.metrics.accuracy import proportion_interval
from vitrail.metrics.fewshot import LeastSquares, best_mean_rank
from vitrail.metrics.knn import knn_predict
from vitrail.metrics.probe import fit_probe

Method = Literal["least-squares", "probe", "knn"]


@dataclass(frozen=True)
class FewShot:
    """One number of the table, with how it was measured."""

    data: str
    method: Method
    shots: int | None  # images per class; None: all images
    accuracy: float  # mean over the seeds
    deviation: float | None  # over the seeds; None for one seed
    interval: tuple[float, float]  # 95 %, of the mean over the test images
    seeds: list[float]  # the accuracy of each seed
    images: int  # number of training images
    tested: int
    setting: str  # penalty or neighbours, in words


@dataclass(frozen=True)
class FrozenTask:
    """A dataset with its features, and the training rows of each number of shots and seed."""

    name: str
    classes: int
    train: Features
    test: Features
    chosen: dict[tuple[int | None, int | None], np.ndarray]  # by shots and seed


@dataclass(frozen=True)
class Counts:
    """The correct predictions of each candidate setting, for one task, number of shots and seed."""

    correct: np.ndarray  # int64 (candidates,)
    tested: int
    images: int
    setting: str = ""


def score_least_squares(task: FrozenTask, rows: np.ndarray, penalties: Sequence[float]) -> Counts:
    features, labels = task.train.take(rows)
    problem = LeastSquares(features, labels, task.classes)
    correct, tested = np.zeros(len(penalties), np.int64), 0
    for values, truth in task.test.parts():
        correct += problem.count_correct(values, truth, penalties)
        tested += len(truth)
    return Counts(correct, tested, len(labels))


def score_linear_probe(task: FrozenTask, rows: np.ndarray) -> Counts:
    features, labels = task.train.take(rows)
    settings = ProbeConfig()
    groups = task.train.groups(rows)
    probe = fit_probe(
        features, labels, task.classes, penalties=settings.penalties, iterations=settings.iterations, groups=groups
    )
    correct = tested = 0
    for values, truth in task.test.parts():
        correct += int((probe.predict(values) == truth).sum())
        tested += len(truth)
    return Counts(np.array([correct]), tested, len(labels), f"penalty {probe.penalty:g}")


def score_knn(task: FrozenTask, rows: np.ndarray, neighbours: int, temperature: float) -> Counts:
    features, labels = task.train.take(rows)
    correct = tested = 0
    for values, truth in task.test.parts():
        (predicted,) = knn_predict(features, labels, values, task.classes, (neighbours,), temperature)
        correct += int((predicted == truth).sum())
        tested += len(truth)
    return Counts(np.array([correct]), tested, len(labels), f"{neighbours} neighbours, temperature {temperature:g}")


def few_shot_rows(
    method: Method, shots: int | None, counts: dict[str, list[Counts]], penalties: Sequence[float]
) -> list[FewShot]:
    """Choose the candidate that is best over all datasets; return the score of each dataset with it."""
    accuracies = {name: np.stack([count.correct / count.tested for count in seeds]) for name, seeds in counts.items()}
    best = best_mean_rank({name: values.mean(axis=0) for name, values in accuracies.items()})
    rows = []
    for name, by_seed in counts.items():
        seeds, tested = accuracies[name][:, best], by_seed[0].tested
        setting = by_seed[0].setting or f"penalty 2^{np.log2(penalties[best]):.0f}"
        rows.append(
            FewShot(
                name,
                method,
                shots,
                accuracy=float(seeds.mean()),
                deviation=float(seeds.std(ddof=1)) if len(seeds) > 1 else None,
                interval=proportion_interval(round(float(seeds.mean()) * tested), tested),
                seeds=seeds.tolist(),
                images=by_seed[0].images,
                tested=tested,
                setting=setting,
            )
        )
    return rows
