"""Multilabel scores: average precision, F1 and thresholds of each label."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.errors import UserError
from vitrail.metrics.calibration import Reliability, bin_confidence
from vitrail.metrics.scores import Interval, Scores

if TYPE_CHECKING:
    from vitrail.metrics.tuning import MultilabelTuning

THRESHOLD = 0.5
MIN_POSITIVES = 5  # images with a label needed to fit its threshold
RESAMPLES = 200
BOOTSTRAP_VALUES = 2_000_000_000  # images x labels x resamples at most; larger sets get fewer resamples


@dataclass(frozen=True)
class LabelScore:
    """Scores of one label. None where undefined, as for a label that no image has."""

    name: str
    count: int
    threshold: float  # the label is predicted from this probability on
    average_precision: float | None
    recall: float | None
    precision: float | None
    f1: float | None


@dataclass(frozen=True, eq=False, kw_only=True)
class MultilabelScores(Scores):
    """Scores of a classifier with any number of labels per image."""

    mean_ap: float  # mean over the labels that some image has
    mean_ap_interval: Interval  # 95 %
    chance: float  # mean average precision of a random ranking
    micro_f1: float | None  # over all images and labels
    exact: float  # fraction of images with every label correct
    nll: float  # binary cross-entropy summed over labels, mean over images, in nats
    per_class: Sequence[LabelScore]
    tuned: MultilabelTuning | None = None

    @property
    def headline(self) -> float:
        return self.mean_ap

    @property
    def interval(self) -> Interval:
        return self.mean_ap_interval


def score_multilabel(
    logits: np.ndarray,
    truth: np.ndarray,
    classes: Sequence[str],
    *,
    thresholds: np.ndarray | float = THRESHOLD,
    seed: int = 0,
) -> MultilabelScores:
    """Score (N, K) logits against (N, K) zeros and ones.

    A label is predicted if its sigmoid reaches `thresholds`: one value, or (K,).
    """
    truth = np.asarray(truth).astype(bool)
    if logits.shape != truth.shape or truth.shape[1] != len(classes):
        raise UserError(f"the network has {logits.shape[1]} outputs, but there are {truth.shape[1]} labels")
    if not np.isfinite(logits).all():
        raise UserError("some outputs of the network are NaN or infinite; check the weights and the images")
    if not truth.any():
        raise UserError("no test image has a label, so there is nothing to measure")
    logits = logits.astype(np.float64)
    thresholds = np.broadcast_to(thresholds, len(classes))
    decided = sigmoid(logits) >= thresholds
    per_class = [
        _label_score(name, float(thresholds[k]), logits[:, k], truth[:, k], decided[:, k])
        for k, name in enumerate(classes)
    ]
    hits = (decided & truth).sum()
    return MultilabelScores(
        n=len(truth),
        mean_ap=_mean(scores.average_precision for scores in per_class),
        mean_ap_interval=_interval(logits, truth, np.random.Generator(np.random.PCG64(seed))),
        chance=float(truth.mean(axis=0)[truth.any(axis=0)].mean()),
        micro_f1=_ratio(2 * hits, decided.sum() + truth.sum()),
        exact=float((decided == truth).all(axis=1).mean()),
        nll=float((np.logaddexp(0, logits) - logits * truth).sum(axis=1).mean()),
        per_class=per_class,
        reliability=decision_reliability(logits, truth, thresholds),
    )


def average_precision(scores: np.ndarray, truth: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """Average precision of (N,) scores and truth, as scikit-learn: ties are one step of the curve.

    With (B, N) sample weights, one value for each row.
    """
    order = np.argsort(-scores, kind="stable")
    ends = np.flatnonzero(np.append(np.diff(scores[order]) != 0, True))  # the last of each run of equal scores
    weights = np.ones((1, len(scores))) if weights is None else weights
    sorted_weights = weights[:, order]
    hits = np.cumsum(sorted_weights * truth[order], axis=1)[:, ends]
    seen = np.cumsum(sorted_weights, axis=1)[:, ends]
    new_hits = np.diff(hits, axis=1, prepend=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        precision = np.where(seen > 0, hits / seen, 0.0)
        return (new_hits * precision).sum(axis=1) / hits[:, -1]


def mean_average_precision(logits: np.ndarray, truth: np.ndarray) -> float:
    """Mean average precision over the labels that some image has; 0 if there are none."""
    used = np.flatnonzero(truth.any(axis=0))
    values = [average_precision(logits[:, label], truth[:, label].astype(bool))[0] for label in used]
    return float(np.mean(values)) if values else 0.0


def bootstrap_interval(values: np.ndarray, resampled: np.ndarray, positives: np.ndarray) -> Interval:
    """95 % interval of the mean of (K,) values, one per label, from their (K, B) values on resamples of the images.

    Bias-corrected normal interval. Images drawn twice raise average precision, most for rare labels: the bias of the
    resamples is subtracted. The spread is scaled by sqrt(m / (m - 1)) for m = `positives` (K,), the images of a label.
    """
    means = np.nanmean(resampled, axis=1)
    deviations = (resampled - means[:, None]) * np.sqrt(positives / np.maximum(1, positives - 1))[:, None]
    centre = float((2 * values - means).mean())
    half = 1.96 * float(np.nanmean(deviations, axis=0).std())
    return centre - half, centre + half


def decision_reliability(
    logits: np.ndarray, truth: np.ndarray, thresholds: np.ndarray | float = THRESHOLD
) -> Reliability:
    """Reliability of all decisions for or against a label, by the probability of the decision."""
    p = sigmoid(logits.astype(np.float64))
    decided = p >= thresholds
    return bin_confidence(np.where(decided, p, 1 - p).ravel(), (decided == truth.astype(bool)).ravel())


def worst_decisions(
    logits: np.ndarray, truth: np.ndarray, k: int, thresholds: np.ndarray | float = THRESHOLD
) -> list[tuple[int, int]]:
    """(image, label) of the at most `k` wrong decisions farthest from the threshold, farthest first, one per image."""
    p = sigmoid(logits.astype(np.float64))
    wrong = (p >= thresholds) != truth.astype(bool)
    distance = np.where(wrong, np.abs(logits - _logit(thresholds)), -1.0)
    label = distance.argmax(axis=1)
    largest = distance[np.arange(len(distance)), label]
    rows = np.argsort(-largest, kind="stable")[:k]
    return [(int(row), int(label[row])) for row in rows if largest[row] >= 0]


def rescale_thresholds(thresholds: np.ndarray, scale: float) -> np.ndarray:
    """Thresholds that give the same decisions after logits are divided by `scale`."""
    return sigmoid(_logit(thresholds) / scale)


def best_thresholds(probabilities: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """(K,) thresholds with the highest F1 of each label; 0.5 for a label with fewer than MIN_POSITIVES images.

    A threshold is halfway between the lowest probability above it and the highest below.
    """
    thresholds = np.full(truth.shape[1], THRESHOLD)
    for label in range(truth.shape[1]):
        if truth[:, label].sum() < MIN_POSITIVES:
            continue
        order = np.argsort(-probabilities[:, label], kind="stable")
        p, hits = probabilities[order, label], np.cumsum(truth[order, label])
        f1 = 2 * hits / (np.arange(1, len(p) + 1) + hits[-1])
        f1[:-1][p[:-1] == p[1:]] = -1  # ties share one threshold
        best = int(f1.argmax())
        thresholds[label] = (p[best] + (p[best + 1] if best + 1 < len(p) else 0.0)) / 2
    return thresholds


def f1_scores(decided: np.ndarray, truth: np.ndarray) -> tuple[float, float]:
    """Micro F1 over all decisions, and macro F1 over the labels that some image has."""
    hits, sums = (decided & truth).sum(axis=0), decided.sum(axis=0) + truth.sum(axis=0)
    used = truth.any(axis=0)
    micro = float(2 * hits.sum() / max(1, sums.sum()))
    macro = float((2 * hits[used] / sums[used]).mean()) if used.any() else 0.0
    return micro, macro


def sigmoid(logits: np.ndarray) -> np.ndarray:
    return np.exp(-np.logaddexp(0, -logits))


def _logit(probabilities: np.ndarray | float) -> np.ndarray:
    with np.errstate(divide="ignore"):  # thresholds of 0 and 1 are infinite logits
        return np.log(probabilities) - np.log1p(-np.asarray(probabilities))


def _label_score(name: str, threshold: float, logits: np.ndarray, truth: np.ndarray, decided: np.ndarray) -> LabelScore:
    hits, actual, predicted = int((decided & truth).sum()), int(truth.sum()), int(decided.sum())
    return LabelScore(
        name=str(name),
        count=actual,
        threshold=threshold,
        average_precision=float(average_precision(logits, truth)[0]) if actual else None,
        recall=_ratio(hits, actual),
        precision=_ratio(hits, predicted),
        f1=_ratio(2 * hits, actual + predicted),
    )


def _ratio(part: Any, whole: Any) -> float | None:
    return float(part / whole) if whole else None


def _mean(values: Any) -> float:
    return float(np.mean([value for value in values if value is not None]))


def _interval(logits: np.ndarray, truth: np.ndarray, rng: np.random.Generator) -> Interval:
    """95 % bootstrap interval over images of the mean average precision."""
    n, k = truth.shape
    resamples = int(max(20, min(RESAMPLES, BOOTSTRAP_VALUES / (n * k))))
    weights = rng.multinomial(n, np.full(n, 1 / n), size=resamples).astype(np.float32)
    used = np.flatnonzero(truth.any(axis=0))
    resampled = np.stack([average_precision(logits[:, label], truth[:, label], weights) for label in used])
    values = np.array([average_precision(logits[:, label], truth[:, label])[0] for label in used])
    low, high = bootstrap_interval(values, resampled, truth[:, used].sum(axis=0))
    point = float(values.mean())
    return max(0.0, min(point, low)), min(1.0, max(point, high))
