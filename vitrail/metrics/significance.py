"""Is one classifier better than another? Both answered the same images: what counts are those on which they differ."""

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
    """A second classifier against a first one."""

    difference: float  # of the headline number, second minus first
    interval: Interval  # 95 %, by resampling images
    only_first: int | None  # images that only the first gets right; none for several labels
    only_second: int | None
    p: float | None  # two-sided, by McNemar's exact test; none for several labels

    @property
    def different(self) -> bool:
        """Whether these images tell them apart, at 5 %."""
        return self.p < 0.05 if self.p is not None else self.interval[0] > 0 or self.interval[1] < 0


def compare_correct(first: np.ndarray, second: np.ndarray, seed: int = 0) -> PairedComparison:
    """From which images each gets right, (N,) bool in the same order."""
    n = len(first)
    lost, won = int((first & ~second).sum()), int((second & ~first).sum())
    drawn = np.random.default_rng(seed).multinomial(n, [won / n, lost / n, 1 - (won + lost) / n], size=RESAMPLES)
    low, high = np.quantile((drawn[:, 0] - drawn[:, 1]) / n, [0.025, 0.975])
    if not won + lost:  # resamples cannot see a difference that did not happen
        high = 1 - 1 / (1 + 1.96**2 / n)
        low = -high
    return PairedComparison((won - lost) / n, (float(low), float(high)), lost, won, sign_test(won, lost))


def sign_test(won: int, lost: int) -> float:
    """Two-sided: how likely a fair coin is at least as uneven."""
    n, less = won + lost, min(won, lost)
    logs = [math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) - n * math.log(2) for k in range(less + 1)]
    return min(1.0, 2 * math.fsum(map(math.exp, logs)))


def compare_multilabel(first: np.ndarray, second: np.ndarray, truth: np.ndarray, seed: int = 0) -> PairedComparison:
    """Mean average precision of two (N, K) logits for the same (N, K) zeros and ones: each resample takes the same
    images for both."""
    truth = truth.astype(bool)
    n = len(truth)
    weights = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=MULTILABEL_RESAMPLES)
    weights = np.vstack([np.ones(n), weights])  # the first row: the images as they are
    used = np.flatnonzero(truth.any(axis=0))
    found = np.stack(
        [
            average_precision(second[:, k], truth[:, k], weights) - average_precision(first[:, k], truth[:, k], weights)
            for k in used
        ]
    )
    interval = bootstrap_interval(found[:, 0], found[:, 1:], truth[:, used].sum(axis=0))
    return PairedComparison(float(found[:, 0].mean()), interval, None, None, None)


def holm_correction(values: Sequence[float]) -> list[float]:
    """The p-values of several tests, raised so that one false alarm among all of them stays as unlikely as it says."""
    found, highest = [0.0] * len(values), 0.0
    for place, index in enumerate(np.argsort(values, kind="stable").tolist()):
        highest = max(highest, min(1.0, (len(values) - place) * values[index]))
        found[index] = highest
    return found
