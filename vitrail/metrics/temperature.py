"""Temperature scaling: calibrate probabilities by one divisor of the logits (Guo et al. 2017)."""

from __future__ import annotations

import numpy as np

from vitrail.metrics.accuracy import log_softmax, row_chunks
from vitrail.metrics.group_split import stratified_group_mask
from vitrail.metrics.multilabel import sigmoid

MIN_TEMPERATURE, MAX_TEMPERATURE = 0.02, 50.0
STEPS = 60
TOLERANCE = 1e-10  # of the logarithm of the temperature


def fit_temperature(logits: np.ndarray, truth: np.ndarray) -> float:
    """Maximum-likelihood temperature of (N, K) logits for (N,) labels or (N, K) zeros and ones.

    Returns 1 if there is no finite optimum: all predictions are correct, or none is better than chance. The negative
    log-likelihood is convex in 1 / temperature, so this uses Newton's method with a bracket.
    """
    predicted = logits > 0 if truth.ndim == 2 else logits.argmax(axis=1)
    if (predicted == truth).all():
        return 1.0
    low, high = 1 / MAX_TEMPERATURE, 1 / MIN_TEMPERATURE
    inverse = 1.0
    for _ in range(STEPS):
        slope, curvature = _derivatives(logits, truth, inverse)
        if slope == curvature == 0:  # constant logits: no temperature changes them
            break
        if slope > 0:
            high = inverse
        else:
            low = inverse
        step = inverse - slope / curvature if curvature > 0 else 0.0
        following = step if low < step < high else np.sqrt(low * high)
        if abs(np.log(following / inverse)) < TOLERANCE:
            break
        inverse = float(following)
    return 1 / inverse if 1.01 / MAX_TEMPERATURE < inverse < 0.99 / MIN_TEMPERATURE else 1.0


def cross_fitted_temperatures(
    logits: np.ndarray, truth: np.ndarray, seed: int = 0, groups: np.ndarray | None = None
) -> np.ndarray:
    """(N,) temperatures: each half of the images gets the one fitted on the other half (cross-fitting)."""
    temperatures = np.ones(len(logits))
    for half, other_half in split_halves(len(logits), seed, groups):
        temperatures[half] = fit_temperature(logits[other_half], truth[other_half])
    return temperatures


def split_halves(n: int, seed: int, groups: np.ndarray | None = None) -> list[tuple[np.ndarray, np.ndarray]]:
    """Two random halves, as [(first, second), (second, first)]; empty for a single image or group.

    Images with equal `groups` are in one half.
    """
    mask = stratified_group_mask(np.arange(n) if groups is None else groups, None, 0.5, seed)
    first, second = np.flatnonzero(mask), np.flatnonzero(~mask)
    return [(first, second), (second, first)] if len(first) else []


def _derivatives(logits: np.ndarray, truth: np.ndarray, inverse: float) -> tuple[float, float]:
    """First and second derivative of the mean negative log-likelihood in the inverse temperature."""
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
