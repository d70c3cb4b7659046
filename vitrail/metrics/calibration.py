"""Reliability diagram and expected calibration error (ECE), Guo et al. (2017)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vitrail.errors import UserError

ROUNDING = 1e-3  # a half-precision probability may exceed 1 by this much


@dataclass(frozen=True, eq=False)
class Reliability:
    """Images binned by the probability of their predicted class; `confidence` and `accuracy` are NaN in empty bins."""

    edges: np.ndarray  # (bins + 1,)
    confidence: np.ndarray  # (bins,) mean probability of the predicted class
    accuracy: np.ndarray  # (bins,) fraction of correct predictions
    count: np.ndarray  # (bins,)
    ece: float
    overconfidence: float  # mean confidence minus accuracy, over all images


def reliability(probabilities: np.ndarray, labels: np.ndarray, bins: int = 15) -> Reliability:
    """Reliability of (N, K) class probabilities against (N,) true labels."""
    probabilities, labels = np.asarray(probabilities), np.asarray(labels)
    if probabilities.ndim != 2 or labels.shape != probabilities.shape[:1]:
        raise ValueError(f"probabilities are {probabilities.shape} and labels {labels.shape}, not (N, K) and (N,)")
    predicted = probabilities.argmax(axis=1)
    confidence = probabilities[np.arange(len(labels)), predicted]
    return bin_confidence(confidence, predicted == labels, bins)


def bin_confidence(confidence: np.ndarray, correct: np.ndarray, bins: int = 15) -> Reliability:
    """Reliability from the probability of each prediction and whether it is correct. Bin m of M is (m/M, (m+1)/M]."""
    if len(confidence) == 0:
        raise UserError("calibration needs at least one image")
    if not (np.all(confidence >= 0) and np.all(confidence <= 1 + ROUNDING)):
        raise ValueError("a probability is outside 0 to 1 or NaN")
    edges = np.linspace(0.0, 1.0, bins + 1)
    bin_of = np.searchsorted(edges[1:-1], confidence, side="left")
    count = np.bincount(bin_of, minlength=bins)
    confidence_sum = np.bincount(bin_of, weights=confidence, minlength=bins)
    correct_sum = np.bincount(bin_of, weights=correct, minlength=bins)
    filled = np.where(count > 0, count, np.nan)
    return Reliability(
        edges=edges,
        confidence=confidence_sum / filled,
        accuracy=correct_sum / filled,
        count=count,
        ece=float(np.abs(correct_sum - confidence_sum).sum() / len(confidence)),
        overconfidence=float((confidence_sum.sum() - correct_sum.sum()) / len(confidence)),
    )


def ece_chance_level(confidence: np.ndarray, rng: np.random.Generator, resamples: int = 200, bins: int = 15) -> float:
    """95th percentile of the ECE of perfectly calibrated classifiers with these confidences.

    A measured ECE below it can be due to the finite number of images alone.
    """
    confidence = confidence.clip(0, 1)
    resampled = (rng.random(len(confidence)) < confidence for _ in range(resamples))
    return float(np.quantile([bin_confidence(confidence, correct, bins).ece for correct in resampled], 0.95))
