"""One number that logits are divided by, so that stated probabilities become true: Guo et al. (2017)."""

from __future__ import annotations

import numpy as np

from vitrail.metrics.accuracy import log_softmax, row_chunks
from vitrail.metrics.group_split import stratified_group_mask
from vitrail.metrics.multilabel import sigmoid

COLDEST, HOTTEST = 0.02, 50.0
STEPS = 60
PRECISE = 1e-10  # of the logarithm of the temperature


def fit_temperature(logits: np.ndarray, truth: np.ndarray) -> float:
    """The temperature of the highest likelihood of (N, K) logits, for (N,) labels or (N, K) zeros and ones; 1 where
    there is none, since every answer is right, or none better than chance.

    In 1 / temperature the negative log-likelihood is convex: Newton's steps, and a bracket that keeps them safe.
    """
    answers = logits > 0 if truth.ndim == 2 else logits.argmax(axis=1)
    if (answers == truth).all():
        return 1.0
    low, high = 1 / HOTTEST, 1 / COLDEST
    inverse = 1.0
    for _ in range(STEPS):
        slope, curvature = _derivatives(logits, truth, inverse)
        if slope == curvature == 0:  # logits that say nothing say it at any temperature
            break
        if slope > 0:
            high = inverse
        else:
            low = inverse
        step = inverse - slope / curvature if curvature > 0 else 0.0
        following = step if low < step < high else np.sqrt(low * high)
        if abs(np.log(following / inverse)) < PRECISE:
            break
        inverse = float(following)
    return 1 / inverse if 1.01 / HOTTEST < inverse < 0.99 / COLDEST else 1.0


def cross_fitted_temperatures(
    logits: np.ndarray, truth: np.ndarray, seed: int = 0, groups: np.ndarray | None = None
) -> np.ndarray:
    """(N,) temperatures, that of each half of the images fitted on the other half, so that its judgement is fair."""
    found = np.ones(len(logits))
    for own, other in split_halves(len(logits), seed, groups):
        found[own] = fit_temperature(logits[other], truth[other])
    return found


def split_halves(n: int, seed: int, groups: np.ndarray | None = None) -> list[tuple[np.ndarray, np.ndarray]]:
    """Two random halves, as (this one, the other one), images of equal `groups` in one; a single image or group has
    none."""
    mask = stratified_group_mask(np.arange(n) if groups is None else groups, None, 0.5, seed)
    first, second = np.flatnonzero(mask), np.flatnonzero(~mask)
    return [(first, second), (second, first)] if len(first) else []


def _derivatives(logits: np.ndarray, truth: np.ndarray, inverse: float) -> tuple[float, float]:
    """First and second derivative of the mean negative log-likelihood by the inverse of the temperature."""
    slope = curvature = 0.0
    for rows in row_chunks(*logits.shape):
        z = logits[rows].astype(np.float64)
        if truth.ndim == 2:
            p = sigmoid(inverse * z)
            slope += float(((p - truth[rows]) * z).sum())
            curvature += float((p * (1 - p) * z * z).sum())
        else:
            p = np.exp(log_softmax(inverse * z))
            mean = (p * z).sum(axis=1)
            slope += float((mean - np.take_along_axis(z, truth[rows, None], axis=1)[:, 0]).sum())
            curvature += float(((p * z * z).sum(axis=1) - mean**2).sum())
    return slope / len(logits), curvature / len(logits)
