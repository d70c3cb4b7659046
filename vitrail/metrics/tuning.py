"""Tuning after training without changing weights: temperature, selective prediction, thresholds of labels.

Each is fitted on all images. Its score comes from cross-fitting: fit on one half, measure on the other, with groups
kept together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from vitrail.metrics.accuracy import log_softmax, row_chunks
from vitrail.metrics.calibration import bin_confidence
from vitrail.metrics.multilabel import best_thresholds, f1_scores, sigmoid
from vitrail.metrics.selective import RiskCoverageCurve, risk_coverage_curve, selective_threshold
from vitrail.metrics.temperature import (
    MAX_TEMPERATURE,
    MIN_TEMPERATURE,
    cross_fitted_temperatures,
    fit_temperature,
    split_halves,
)


@dataclass(frozen=True, eq=False)
class Abstention:
    """Selective prediction: the network predicts only above a threshold."""

    accuracy: float  # target accuracy
    threshold: float | None  # None: no threshold reaches the target
    answered: float | None  # fraction of images with a prediction, cross-fitted
    right: float | None  # fraction of these predictions that are correct, cross-fitted


@dataclass(frozen=True, eq=False)
class Tuning:
    """Tuning of a classifier with one label per image."""

    temperature: float  # for the raw logits of the network
    nll: float  # cross-fitted
    ece: float  # cross-fitted
    coverage: RiskCoverageCurve  # at that temperature
    abstention: Abstention | None

    def to_dict(self) -> dict[str, Any]:
        abstention = None if self.abstention is None else vars(self.abstention)
        values = {"temperature": self.temperature, "nll": self.nll, "ece": self.ece}
        return {**values, "coverage": self.coverage.to_dict(), "abstention": abstention}


@dataclass(frozen=True, eq=False)
class MultilabelTuning:
    """Tuning of a multilabel classifier."""

    temperature: float  # for the raw logits of the network
    nll: float  # cross-fitted
    micro_f1: float  # cross-fitted
    macro_f1: float  # cross-fitted
    macro_f1_before: float  # with the previous thresholds
    thresholds: list[float]  # probabilities at that temperature

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


def tune(
    logits: np.ndarray,
    labels: np.ndarray,
    accuracy: float | None = None,
    temperature: float = 1.0,
    seed: int = 0,
    groups: np.ndarray | None = None,
) -> Tuning:
    """Fit temperature and, for a target `accuracy`, the threshold of selective prediction.

    (N, K) `logits` are already divided by `temperature`; `labels` are (N,). Images with equal `groups` are in one half
    of the cross-fit.
    """
    new_temperature = _fit_temperature(logits, labels, temperature)
    held_out = cross_fitted_temperatures(logits, labels, seed, groups)
    halves = split_halves(len(labels), seed, groups)
    confidence, correct, nll = _predictions(logits, labels, held_out)
    final, _, _ = _predictions(logits, labels, np.full(len(labels), new_temperature / temperature))
    return Tuning(
        new_temperature,
        nll=float(nll.mean()),
        ece=bin_confidence(confidence, correct).ece,
        coverage=risk_coverage_curve(final, correct),
        abstention=None if accuracy is None else _abstention(logits, labels, held_out, final, accuracy, halves),
    )


def _abstention(
    logits: np.ndarray,
    labels: np.ndarray,
    held_out: np.ndarray,
    final: np.ndarray,
    accuracy: float,
    halves: list[tuple[np.ndarray, np.ndarray]],
) -> Abstention:
    """Fit the threshold for `accuracy`. `held_out`: cross-fitted temperatures; `final`: confidence at the final one."""
    correct, answered = logits.argmax(axis=1) == labels, np.zeros(len(labels), bool)
    for half, other_half in halves:
        temperatures = np.full(len(labels), held_out[half[0]])  # fitted on the other half
        confidence, _, _ = _predictions(logits, labels, temperatures)
        threshold = selective_threshold(confidence[other_half], correct[other_half], accuracy)
        answered[half] = threshold is not None and confidence[half] >= threshold
    return Abstention(
        accuracy,
        selective_threshold(final, correct, accuracy),
        float(answered.mean()) if answered.any() else None,
        float(correct[answered].mean()) if answered.any() else None,
    )


def tune_multilabel(
    logits: np.ndarray,
    truth: np.ndarray,
    thresholds: np.ndarray,
    temperature: float = 1.0,
    seed: int = 0,
    groups: np.ndarray | None = None,
) -> MultilabelTuning:
    """Fit temperature and thresholds of a multilabel classifier.

    (N, K) `logits` are already divided by `temperature`; `truth` is (N, K) zeros and ones; `thresholds` (K,) are the
    previous ones. Images with equal `groups` are in one half of the cross-fit.
    """
    truth = truth.astype(bool)
    new_temperature = _fit_temperature(logits, truth, temperature)
    held_out = cross_fitted_temperatures(logits, truth, seed, groups)[:, None]
    decided = sigmoid(logits.astype(np.float64)) >= thresholds
    _, before = f1_scores(decided, truth)
    scaled = logits.astype(np.float64) / held_out
    for half, other_half in split_halves(len(truth), seed, groups):
        best = best_thresholds(sigmoid(logits[other_half] / held_out[half[0]]), truth[other_half])
        decided[half] = sigmoid(scaled[half]) >= best
    micro, macro = f1_scores(decided, truth)
    return MultilabelTuning(
        new_temperature,
        nll=float((np.logaddexp(0, scaled) - scaled * truth).sum(axis=1).mean()),
        micro_f1=micro,
        macro_f1=macro,
        macro_f1_before=before,
        thresholds=best_thresholds(sigmoid(logits * (temperature / new_temperature)), truth).tolist(),
    )


def _fit_temperature(logits: np.ndarray, truth: np.ndarray, temperature: float) -> float:
    """The temperature for raw logits, from `logits` that are already divided by `temperature`."""
    return float(np.clip(temperature * fit_temperature(logits, truth), MIN_TEMPERATURE, MAX_TEMPERATURE))


def _predictions(logits: np.ndarray, labels: np.ndarray, temperatures: np.ndarray) -> tuple[np.ndarray, ...]:
    """Confidence of the prediction, whether it is correct, and negative log-likelihood of the label, (N,) each."""
    n = len(labels)
    confidence, nll, correct = np.empty(n), np.empty(n), np.empty(n, bool)
    for rows in row_chunks(*logits.shape):
        log_p = log_softmax(logits[rows].astype(np.float64) / temperatures[rows, None])
        confidence[rows] = np.exp(log_p.max(axis=1))
        nll[rows] = -np.take_along_axis(log_p, labels[rows, None], axis=1)[:, 0]
        correct[rows] = logits[rows].argmax(axis=1) == labels[rows]
    return confidence, correct, nll
