"""When to answer "none of these": accuracy against the share of images that get an answer."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, lgamma, log, log1p
from typing import Any

import numpy as np

from vitrail.errors import UserError

DOUBT = 0.05  # that a promised accuracy is luck, one-sided
MIN_ANSWERED = 30  # answers that a threshold has to leave: fewer say nothing
POINTS = 101  # of a curve that is written down
CANDIDATES = 20  # thresholds looked at; the more of them, the likelier one is good by luck


@dataclass(frozen=True, eq=False)
class RiskCoverageCurve:
    """For every threshold, from the highest on: which share of the images is answered, and which share of it right."""

    threshold: np.ndarray  # (m,): answered if the probability is at least this
    coverage: np.ndarray  # (m,)
    accuracy: np.ndarray  # (m,)
    risk: float  # mean share of wrong answers over all coverages (the area under the risk-coverage curve)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; of many thresholds some that are even in coverage."""
        last = len(self.coverage) - 1
        places = np.unique(np.searchsorted(self.coverage, np.linspace(0, 1, POINTS)).clip(0, last))
        curve = {name: getattr(self, name)[places].tolist() for name in ("threshold", "coverage", "accuracy")}
        return {**curve, "risk": self.risk}


def risk_coverage_curve(confidence: np.ndarray, correct: np.ndarray) -> RiskCoverageCurve:
    """From the probability of each answer and whether it was right, (N,) each."""
    if not len(confidence):
        raise UserError("a coverage curve needs at least one image")
    order = np.argsort(-confidence, kind="stable")
    sorted_confidence, right = confidence[order], np.cumsum(correct[order])
    answered = np.arange(1, len(order) + 1)
    ends = np.flatnonzero(np.append(np.diff(sorted_confidence) != 0, True))  # equal ones are answered together
    accuracy = right[ends] / answered[ends]
    steps = np.diff(answered[ends], prepend=0)
    return RiskCoverageCurve(
        sorted_confidence[ends],
        answered[ends] / len(order),
        accuracy,
        float((steps * (1 - accuracy)).sum() / len(order)),
    )


def selective_threshold(confidence: np.ndarray, correct: np.ndarray, accuracy: float) -> float | None:
    """The lowest threshold above which answers are right with at least this `accuracy`; none if there is no such.

    Of 20 thresholds, even in coverage, the lowest for which the exact lower bound (95 %, one-sided) of the accuracy
    reaches it, all higher ones reaching it too, but for those that leave so few answers that not even all of them right
    would tell: on new images of the same kind it then holds, but for bad luck.
    """
    if not 0 < accuracy < 1:
        raise UserError(f"the accuracy to reach is a share between 0 and 1, not {accuracy:g}")
    curve = risk_coverage_curve(confidence, correct)
    found = None
    for share in np.linspace(0, 1, CANDIDATES + 1)[1:]:
        place = min(int(np.searchsorted(curve.coverage, share)), len(curve.coverage) - 1)
        answered = round(curve.coverage[place] * len(confidence))
        if answered < MIN_ANSWERED or clopper_pearson_lower(answered, answered) < accuracy:
            continue
        if clopper_pearson_lower(round(curve.accuracy[place] * answered), answered) < accuracy:
            break
        found = float(curve.threshold[place])
    return found


def clopper_pearson_lower(right: int, n: int) -> float:
    """Clopper and Pearson's: the share at which so many right of n, or more, would be as unlikely as DOUBT."""
    if right == 0:
        return 0.0
    low, high = 0.0, right / n
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if binomial_tail(right, n, middle) < DOUBT else (low, middle)
    return low


def binomial_tail(right: int, n: int, share: float) -> float:
    """How likely so many right of n, or more, are where each is right with this chance: a sum whose terms fall, for a
    `share` below right / n, from the first one on."""
    if share <= 0:
        return 0.0
    log_first = lgamma(n + 1) - lgamma(right + 1) - lgamma(n - right + 1)
    log_first += right * log(share) + (n - right) * (log1p(-share) if share < 1 else 0.0)
    term = total = 1.0
    for k in range(right, n):
        term *= (n - k) / (k + 1) * share / (1 - share)
        total += term
        if term < 1e-17 * total:
            break
    return exp(log_first) * total
