"""Selective prediction: predict only above a confidence threshold, and trade coverage for accuracy."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, lgamma, log, log1p
from typing import Any

import numpy as np

from vitrail.errors import UserError

ALPHA = 0.05  # one-sided error probability of the promised accuracy
MIN_ANSWERED = 30  # predictions that a threshold has to keep: fewer are too few to estimate an accuracy
CURVE_POINTS = 101  # of a curve in JSON
CANDIDATES = 20  # thresholds tried; the more, the likelier one passes by chance


@dataclass(frozen=True, eq=False)
class RiskCoverageCurve:
    """For every threshold, highest first: the fraction of images with a prediction, and the accuracy on them."""

    threshold: np.ndarray  # (m,): an image gets a prediction if its probability is at least this
    coverage: np.ndarray  # (m,)
    accuracy: np.ndarray  # (m,)
    risk: float  # area under the risk-coverage curve: mean error rate over all coverages

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, at CURVE_POINTS coverages at most."""
        last = len(self.coverage) - 1
        points = np.unique(np.searchsorted(self.coverage, np.linspace(0, 1, CURVE_POINTS)).clip(0, last))
        curve = {name: getattr(self, name)[points].tolist() for name in ("threshold", "coverage", "accuracy")}
        return {**curve, "risk": self.risk}


def risk_coverage_curve(confidence: np.ndarray, correct: np.ndarray) -> RiskCoverageCurve:
    """Risk-coverage curve from the probability of each prediction and whether it is correct, (N,) each."""
    if not len(confidence):
        raise UserError("a coverage curve needs at least one image")
    order = np.argsort(-confidence, kind="stable")
    sorted_confidence, hits = confidence[order], np.cumsum(correct[order])
    answered = np.arange(1, len(order) + 1)
    ends = np.flatnonzero(np.append(np.diff(sorted_confidence) != 0, True))  # ties share one threshold
    accuracy = hits[ends] / answered[ends]
    steps = np.diff(answered[ends], prepend=0)
    return RiskCoverageCurve(
        sorted_confidence[ends],
        answered[ends] / len(order),
        accuracy,
        float((steps * (1 - accuracy)).sum() / len(order)),
    )


def selective_threshold(confidence: np.ndarray, correct: np.ndarray, accuracy: float) -> float | None:
    """The lowest threshold at which predictions reach `accuracy` with 95 % confidence; None if there is none.

    Tries CANDIDATES thresholds, evenly spaced in coverage, from the highest down. It stops at the first one whose
    Clopper-Pearson lower bound is below `accuracy`. Thresholds with so few predictions that even all correct would
    not pass are skipped.
    """
    if not 0 < accuracy < 1:
        raise UserError(f"the target accuracy must be between 0 and 1, not {accuracy:g}")
    curve = risk_coverage_curve(confidence, correct)
    best = None
    for coverage in np.linspace(0, 1, CANDIDATES + 1)[1:]:
        point = min(int(np.searchsorted(curve.coverage, coverage)), len(curve.coverage) - 1)
        answered = round(curve.coverage[point] * len(confidence))
        if answered < MIN_ANSWERED or clopper_pearson_lower(answered, answered) < accuracy:
            continue
        if clopper_pearson_lower(round(curve.accuracy[point] * answered), answered) < accuracy:
            break
        best = float(curve.threshold[point])
    return best


def clopper_pearson_lower(hits: int, n: int) -> float:
    """One-sided 95 % Clopper-Pearson lower bound of the proportion behind `hits` of `n`."""
    if hits == 0:
        return 0.0
    low, high = 0.0, hits / n
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if binomial_tail(hits, n, middle) < ALPHA else (low, middle)
    return low


def binomial_tail(hits: int, n: int, p: float) -> float:
    """P(X >= hits) for X ~ Binomial(n, p). For p below hits / n the summed terms decrease from the first on."""
    if p <= 0:
        return 0.0
    log_first = lgamma(n + 1) - lgamma(hits + 1) - lgamma(n - hits + 1)
    log_first += hits * log(p) + (n - hits) * (log1p(-p) if p < 1 else 0.0)
    term = total = 1.0
    for k in range(hits, n):
        term *= (n - k) / (k + 1) * p / (1 - p)
        total += term
        if term < 1e-17 * total:
            break
    return exp(log_first) * total
