"""Labels that are probably wrong, by confident learning: Northcutt, Jiang and Chuang (JAIR 2021)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vitrail.errors import UserError
from vitrail.metrics.accuracy import row_chunks

ROUNDING = 1e-6  # of a probability, by which it may miss a threshold


@dataclass(frozen=True, eq=False)
class LabelIssues:
    """Images whose label is doubted, the most doubtful first."""

    row: np.ndarray  # (S,) of the probabilities
    rather: np.ndarray  # (S,) the class that is likelier the true one
    margin: np.ndarray  # (S,) -1 to 1: probability of the label less that of the likeliest other class


def find_label_issues(probabilities: np.ndarray, labels: np.ndarray) -> LabelIssues:
    """Of (N, K) probabilities for images that were not learned from, and their (N,) labels, those that disagree with
    confidence.

    A class is met with confidence where its probability reaches the mean that images labelled with it have: a class
    that the network is never sure of asks for less. An image is suspected if, of the classes met with confidence, the
    likeliest is not its label, nor is its label what the network answers. They are ranked by the margin.
    """
    probabilities, labels = np.asarray(probabilities), np.asarray(labels)
    if probabilities.ndim != 2 or labels.shape != probabilities.shape[:1]:
        raise ValueError(f"probabilities are {probabilities.shape} and labels {labels.shape}, not (N, K) and (N,)")
    if not len(labels):
        raise UserError("suspecting labels takes at least one image")
    least = class_thresholds(probabilities, labels) - ROUNDING
    parts = [
        _suspects(probabilities[part], labels[part], least, part.start) for part in row_chunks(*probabilities.shape)
    ]
    row, rather, margin = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    order = np.argsort(margin, kind="stable")
    return LabelIssues(row[order], rather[order], margin[order])


def class_thresholds(probabilities: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """(K,) the mean probability of each class over the images labelled with it; no image can reach that of a class
    without any."""
    count = np.bincount(labels, minlength=probabilities.shape[1])
    own = np.take_along_axis(probabilities, labels[:, None], axis=1)[:, 0]
    total = np.bincount(labels, weights=own, minlength=probabilities.shape[1])
    return np.where(count > 0, total / np.maximum(count, 1), np.inf)


def _suspects(p: np.ndarray, labels: np.ndarray, least: np.ndarray, first: int) -> tuple[np.ndarray, ...]:
    confident = np.where(p >= least, p, -np.inf)
    rather, answer = confident.argmax(axis=1), p.argmax(axis=1)
    rows = np.flatnonzero((confident.max(axis=1) > -np.inf) & (rather != labels) & (answer != labels))
    return first + rows, rather[rows], p[rows, labels[rows]] - p[rows, answer[rows]]  # the likeliest is another
