"""What can be made better after training without touching a weight: temperature, abstention, thresholds of labels.

Each is fitted on all images there are, and judged by fits on one half of them measured on the other; what belongs
together is in one half.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from vitrail.metrics.accuracy import log_softmax, row_chunks
from vitrail.metrics.calibration import bin_confidence
from vitrail.metrics.multilabel import best_thresholds, f1_scores, sigmoid
from vitrail.metrics.selective import RiskCoverageCurve, risk_coverage_curve, selective_threshold
from vitrail.metrics.temperature import COLDEST, HOTTEST, cross_fitted_temperatures, fit_temperature, split_halves


@dataclass(frozen=True, eq=False)
class Abstention:
    """Answers are given only above a threshold."""

    accuracy: float  # that was asked for
    threshold: float | None  # none: no threshold reaches it
    answered: float | None  # share of images, and
    right: float | None  # share of answers, by thresholds found on the other half of the images


@dataclass(frozen=True, eq=False)
class Tuning:
    """For weights that give an image one label."""

    temperature: float  # of the network's own logits, whatever those fitted to were divided by already
    nll: float  # this and the next with temperatures that were fitted on the other half of the images
    ece: float
    coverage: RiskCoverageCurve  # at that temperature
    abstention: Abstention | None

    def to_dict(self) -> dict[str, Any]:
        abstention = None if self.abstention is None else vars(self.abstention)
        values = {"temperature": self.temperature, "nll": self.nll, "ece": self.ece}
        return {**values, "coverage": self.coverage.to_dict(), "abstention": abstention}


@dataclass(frozen=True, eq=False)
class MultilabelTuning:
    """For weights that give an image any number of labels."""

    temperature: float  # of the network's own logits, whatever those fitted to were divided by already
    nll: float  # this and the next two by what was fitted on the other half of the images
    micro_f1: float
    macro_f1: float
    macro_f1_before: float  # with the thresholds the weights came with
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
    """Fit (N, K) logits, divided by `temperature` already, to (N,) labels; `accuracy`: that answers shall have, for the
    price of giving fewer. Images of equal `groups` are in one half."""
    found = _fit(logits, labels, temperature)
    held_out = cross_fitted_temperatures(logits, labels, seed, groups)
    parts = split_halves(len(labels), seed, groups)
    confidence, correct, nll = _answers(logits, labels, held_out)
    final, _, _ = _answers(logits, labels, np.full(len(labels), found / temperature))
    return Tuning(
        found,
        nll=float(nll.mean()),
        ece=bin_confidence(confidence, correct).ece,
        coverage=risk_coverage_curve(final, correct),
        abstention=None if accuracy is None else _abstention(logits, labels, held_out, final, accuracy, parts),
    )


def _abstention(
    logits: np.ndarray,
    labels: np.ndarray,
    held_out: np.ndarray,
    final: np.ndarray,
    accuracy: float,
    parts: list[tuple[np.ndarray, np.ndarray]],
) -> Abstention:
    """`parts`: the halves; `final`: the probabilities of all answers at the temperature that was fitted on all."""
    correct, answered = logits.argmax(axis=1) == labels, np.zeros(len(labels), bool)
    for own, other in parts:
        scale = np.full(len(labels), held_out[own[0]])  # what was fitted on the other half
        confidence, _, _ = _answers(logits, labels, scale)
        threshold = selective_threshold(confidence[other], correct[other], accuracy)
        answered[own] = threshold is not None and confidence[own] >= threshold
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
    """Fit (N, K) logits, divided by `temperature` already, to (N, K) zeros and ones; `thresholds`: those in use until
    now, (K,)."""
    truth = truth.astype(bool)
    found = _fit(logits, truth, temperature)
    held_out = cross_fitted_temperatures(logits, truth, seed, groups)[:, None]
    decided = sigmoid(logits.astype(np.float64)) >= thresholds
    _, before = f1_scores(decided, truth)
    scaled = logits.astype(np.float64) / held_out
    for own, other in split_halves(len(truth), seed, groups):
        # The order within a label does not hang on the temperature: only the scale of the numbers does.
        best = best_thresholds(sigmoid(logits[other] / held_out[own[0]]), truth[other])
        decided[own] = sigmoid(scaled[own]) >= best
    micro, macro = f1_scores(decided, truth)
    return MultilabelTuning(
        found,
        nll=float((np.logaddexp(0, scaled) - scaled * truth).sum(axis=1).mean()),
        micro_f1=micro,
        macro_f1=macro,
        macro_f1_before=before,
        thresholds=best_thresholds(sigmoid(logits * (temperature / found)), truth).tolist(),
    )


def _fit(logits: np.ndarray, truth: np.ndarray, temperature: float) -> float:
    """The temperature that was not divided by yet, times the one that was."""
    return float(np.clip(temperature * fit_temperature(logits, truth), COLDEST, HOTTEST))


def _answers(logits: np.ndarray, labels: np.ndarray, temperatures: np.ndarray) -> tuple[np.ndarray, ...]:
    """Probability of the answer, whether it is right, and negative log-likelihood of the truth, (N,) each."""
    n = len(labels)
    confidence, nll, correct = np.empty(n), np.empty(n), np.empty(n, bool)
    for rows in row_chunks(*logits.shape):
        log_p = log_softmax(logits[rows].astype(np.float64) / temperatures[rows, None])
        confidence[rows] = np.exp(log_p.max(axis=1))
        nll[rows] = -np.take_along_axis(log_p, labels[rows, None], axis=1)[:, 0]
        correct[rows] = logits[rows].argmax(axis=1) == labels[rows]
    return confidence, correct, nll
