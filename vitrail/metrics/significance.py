"""Paired significance tests: is one classifier better than another on the same images?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vitrail.metrics.accuracy import RESAMPLES
from vitrail.metrics.multilabel import average_precision, bootstrap_interval
from vitrail.metrics.scores import Interval

MULTILABEL_RESAMPLES = 200


@dataclass(frozen=True)
class PairedComparison:
    """Comparison of a second classifier with a first one on the same images."""

    difference: float  # of the headline scores, second minus first
    interval: Interval  # 95 %, by bootstrap over images
    only_first: int | None  # images that only the first classifies correctly; None for multilabel
    only_second: int | None
    p: float | None  # two-sided, exact McNemar test; None for multilabel

    @property
    def different(self) -> bool:
        """Whether the difference is significant at 5 %."""
        return self.p < 0.05 if self.p is not None else self.interval[0] > 0 or self.interval[1] < 0


def compare_correct(first: np.ndarray, second: np.ndarray, seed: int = 0) -> PairedComparison:
    """Compare two classifiers from their correct predictions, (N,) bool in the same order."""
    n = len(first)
    lost, won = int((first & ~second).sum()), int((second & ~first).sum())
    resampled = np.random.default_rng(seed).multinomial(n, [won / n, lost / n, 1 - (won + lost) / n], size=RESAMPLES)
    low, high = np.quantile((resampled[:, 0] - resampled[:, 1]) / n, [0.025, 0.975])
    if not won + lost:  # all resamples are equal: use the Wilson bound
        high = 1 - 1 / (1 + 1.96**2 / n)
        low = -high
    return PairedComparison((won - lost) / n, (float(low), float(high)), lost, won, sign_test(won, lost))


def sign_test(won: int, lost: int) -> float:
    """Two-sided exact sign test: p-value of `won` against `lost` under a fair coin."""
    n, smaller = won + lost, min(won, lost)
    logs = [
        math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) - n * math.log(2) for k in range(smaller + 1)
    ]
    return min(1.0, 2 * math.fsum(map(math.exp, logs)))


def compare_multilabel(first: np.ndarray, second: np.ndarray, truth: np.ndarray, seed: int = 0) -> PairedComparison:
    """Compare the mean average precision of two (N, K) logits on the same (N, K) zeros and ones (paired bootstrap)."""
    truth = truth.astype(bool)
    n = len(truth)
    weights = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=MULTILABEL_RESAMPLES)
    weights = np.vstack([np.ones(n), weights])  # the first row is not resampled
    used = np.flatnonzero(truth.any(axis=0))
    differences = np.stack(
        [
            average_precision(second[:, k], truth[:, k], weights) - average_precision(first[:, k], truth[:, k], weights)
            for k in used
        ]
    )
    interval = bootstrap_interval(differences[:, 0], differences[:, 1:], truth[:, used].sum(axis=0))
    return PairedComparison(float(differences[:, 0].mean()), interval, None, None, None)


def holm_correction(values: Sequence[float]) -> list[float]:
    """Holm-Bonferroni adjusted p-values of several tests."""
    adjusted, highest = [0.0] * len(values), 0.0
    for rank, index in enumerate(np.argsort(values, kind="stable").tolist()):
        highest = max(highest, min(1.0, (len(values) - rank) * values[index]))
        adjusted[index] = highest
    return adjusted
