"""What can be learned from frozen features: classifiers fitted to some training images, and scored on test images."""

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
    """One number of the table, and all it was made from."""

    data: str
    method: Method
    shots: int | None  # images of each class; none: all
    accuracy: float  # mean over the seeds
    deviation: float | None  # over the seeds, if there are several
    interval: tuple[float, float]  # 95 %, of the mean over the test images
    seeds: list[float]  # the accuracy of each
    images: int  # learned from
    tested: int
    setting: str  # penalty or neighbours, in words


@dataclass(frozen=True)
class FrozenTask:
    """A data set with its features, and which images are learned from."""

    name: str
    classes: int
    train: Features
    test: Features
    chosen: dict[tuple[int | None, int | None], np.ndarray]  # by shots and seed


@dataclass(frozen=True)
class Counts:
    """Correct predictions of every candidate setting, for one task, number of shots and seed."""

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
        (said,) = knn_predict(features, labels, values, task.classes, (neighbours,), temperature)
        correct += int((said == truth).sum())
        tested += len(truth)
    return Counts(np.array([correct]), tested, len(labels), f"{neighbours} neighbours, temperature {temperature:g}")


def few_shot_rows(
    method: Method, shots: int | None, counts: dict[str, list[Counts]], penalties: Sequence[float]
) -> list[FewShot]:
    """The candidate that serves all data sets, and what each of them scores with it."""
    accuracies = {name: np.stack([one.correct / one.tested for one in found]) for name, found in counts.items()}
    best = best_mean_rank({name: found.mean(axis=0) for name, found in accuracies.items()})
    rows = []
    for name, found in counts.items():
        seeds, tested = accuracies[name][:, best], found[0].tested
        setting = found[0].setting or f"penalty 2^{np.log2(penalties[best]):.0f}"
        rows.append(
            FewShot(
                name,
                method,
                shots,
                accuracy=float(seeds.mean()),
                deviation=float(seeds.std(ddof=1)) if len(seeds) > 1 else None,
                interval=proportion_interval(round(float(seeds.mean()) * tested), tested),
                seeds=seeds.tolist(),
                images=found[0].images,
                tested=tested,
                setting=setting,
            )
        )
    return rows
