"""Find probably wrong labels by confident learning (Northcutt, Jiang and Chuang, JAIR 2021)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vitrail.errors import UserError
from vitrail.metrics.accuracy import row_chunks

ROUNDING = 1e-6  # tolerance when a probability is compared with a threshold


@dataclass(frozen=True, eq=False)
class LabelIssues:
    """Images with a probably wrong label, most suspicious first."""

    row: np.ndarray  # (S,) row of the probabilities
    suggested: np.ndarray  # (S,) the probable true class
    margin: np.ndarray  # (S,) -1 to 1: probability of the label minus that of the likeliest other class


def find_label_issues(probabilities: np.ndarray, labels: np.ndarray) -> LabelIssues:
    """Find label issues from (N, K) out-of-sample probabilities and (N,) labels.

    A class counts as confident for an image if its probability reaches the mean probability over the images labelled
    with that class. An image has a label issue if its label is neither its likeliest confident class nor the
    prediction. Issues are sorted by margin.
    """
    probabilities, labels = np.asarray(probabilities), np.asarray(labels)
    if probabilities.ndim != 2 or labels.shape != probabilities.shape[:1]:
        raise ValueError(f"probabilities are {probabilities.shape} and labels {labels.shape}, not (N, K) and (N,)")
    if not len(labels):
        raise UserError("finding label issues needs at least one image")
    thresholds = class_thresholds(probabilities, labels) - ROUNDING
    parts = [
        _issues(probabilities[part], labels[part], thresholds, part.start) for part in row_chunks(*probabilities.shape)
    ]
    row, suggested, margin = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    order = np.argsort(margin, kind="stable")
    return LabelIssues(row[order], suggested[order], margin[order])


def class_thresholds(probabilities: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """(K,) mean probability of each class over the images labelled with it; infinite for a class without images."""
    count = np.bincount(labels, minlength=probabilities.shape[1])
    label_probability = np.take_along_axis(probabilities, labels[:, None], axis=1)[:, 0]
    total = np.bincount(labels, weights=label_probability, minlength=probabilities.shape[1])
    return np.where(count > 0, total / np.maximum(count, 1), np.inf)


def _issues(p: np.ndarray, labels: np.ndarray, thresholds: np.ndarray, first: int) -> tuple[np.ndarray, ...]:
    confident = np.where(p >= thresholds, p, -np.inf)
    suggested, predicted = confident.argmax(axis=1), p.argmax(axis=1)
    rows = np.flatnonzero((confident.max(axis=1) > -np.inf) & (suggested != labels) & (predicted != labels))
    return first + rows, suggested[rows], p[rows, labels[rows]] - p[rows, predicted[rows]]
