"""Images with any number of labels: how well each label is ranked and decided."""

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
MIN_POSITIVES = 5  # images with a label, for a threshold of its own
RESAMPLES = 200
BOOTSTRAP_VALUES = 2_000_000_000  # image-label-resample triples: beyond, fewer resamples are drawn


@dataclass(frozen=True)
class LabelScore:
    """One label. A number is None where it is undefined, as for a label that no image has."""

    name: str
    count: int
    threshold: float  # from which probability on the label is given
    average_precision: float | None
    recall: float | None
    precision: float | None
    f1: float | None


@dataclass(frozen=True, eq=False, kw_only=True)
class MultilabelScores(Scores):
    """Where each image has any number of labels."""

    mean_ap: float  # over the labels that some image has
    mean_ap_interval: Interval  # 95 %
    chance: float  # the mean average precision of a random ranking
    micro_f1: float | None  # of all decisions
    exact: float  # share of images with every label right
    nll: float  # mean over images of the summed binary cross-entropy, in nats
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
    """Judge (N, K) logits, each through a sigmoid, against (N, K) zeros and ones.

    A label is given from its threshold on, one for all or (K,).
    """
    truth = np.asarray(truth).astype(bool)
    if logits.shape != truth.shape or truth.shape[1] != len(classes):
        raise UserError(f"the network gives {logits.shape[1]} values per image but there are {truth.shape[1]} labels")
    if not np.isfinite(logits).all():
        raise UserError("the network's outputs are not all numbers; the weights or the inputs are broken")
    if not truth.any():
        raise UserError("none of the measured images has a label")
    logits = logits.astype(np.float64)
    thresholds = np.broadcast_to(thresholds, len(classes))
    decided = sigmoid(logits) >= thresholds
    per_class = [
        _label(name, float(thresholds[k]), logits[:, k], truth[:, k], decided[:, k]) for k, name in enumerate(classes)
    ]
    right = (decided & truth).sum()
    return MultilabelScores(
        n=len(truth),
        mean_ap=_mean(one.average_precision for one in per_class),
        mean_ap_interval=_interval(logits, truth, np.random.Generator(np.random.PCG64(seed))),
        chance=float(truth.mean(axis=0)[truth.any(axis=0)].mean()),
        micro_f1=_share(2 * right, decided.sum() + truth.sum()),
        exact=float((decided == truth).all(axis=1).mean()),
        nll=float((np.logaddexp(0, logits) - logits * truth).sum(axis=1).mean()),
        per_class=per_class,
        reliability=decision_reliability(logits, truth, thresholds),
    )


def average_precision(scores: np.ndarray, truth: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """Area under the steps of precision against recall, equal scores counting as one step.

    For (N,) scores and truth; with (B, N) weights one value for each row of them.
    """
    order = np.argsort(-scores, kind="stable")
    ends = np.flatnonzero(np.append(np.diff(scores[order]) != 0, True))  # the last of each run of equal scores
    weights = np.ones((1, len(scores))) if weights is None else weights
    sorted_weights = weights[:, order]
    hits = np.cumsum(sorted_weights * truth[order], axis=1)[:, ends]
    seen = np.cumsum(sorted_weights, axis=1)[:, ends]
    gained = np.diff(hits, axis=1, prepend=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        precision = np.where(seen > 0, hits / seen, 0.0)
        return (gained * precision).sum(axis=1) / hits[:, -1]


def mean_average_precision(logits: np.ndarray, truth: np.ndarray) -> float:
    """Over the labels that some image has; 0 when there are none."""
    used = np.flatnonzero(truth.any(axis=0))
    found = [average_precision(logits[:, label], truth[:, label].astype(bool))[0] for label in used]
    return float(np.mean(found)) if found else 0.0


def bootstrap_interval(values: np.ndarray, resampled: np.ndarray, having: np.ndarray) -> Interval:
    """95 % for the mean of (K,) values, one a label, that are (K, B) on resamples of the images; `having`: how many
    images have each label, (K,).

    Images drawn twice flatter average precision, the more the rarer the label: by how much resamples lie too high is
    taken off. And a resample of m images scatters less than m new ones: by the square root of 1 - 1 / m.
    """
    means = np.nanmean(resampled, axis=1)
    apart = (resampled - means[:, None]) * np.sqrt(having / np.maximum(1, having - 1))[:, None]
    centre = float((2 * values - means).mean())
    half = 1.96 * float(np.nanmean(apart, axis=0).std())
    return centre - half, centre + half


def decision_reliability(
    logits: np.ndarray, truth: np.ndarray, thresholds: np.ndarray | float = THRESHOLD
) -> Reliability:
    """Every decision for or against a label, by the probability it was made with."""
    p = sigmoid(logits.astype(np.float64))
    decided = p >= thresholds
    return bin_confidence(np.where(decided, p, 1 - p).ravel(), (decided == truth.astype(bool)).ravel())


def worst_decisions(
    logits: np.ndarray, truth: np.ndarray, k: int, thresholds: np.ndarray | float = THRESHOLD
) -> list[tuple[int, int]]:
    """(image, label) of the at most `k` most confident wrong decisions, the farthest beyond the threshold first, one
    for an image."""
    p = sigmoid(logits.astype(np.float64))
    wrong = (p >= thresholds) != truth.astype(bool)
    by = np.where(wrong, np.abs(logits - _logit(thresholds)), -1.0)
    label = by.argmax(axis=1)
    most = by[np.arange(len(by)), label]
    rows = np.argsort(-most, kind="stable")[:k]
    return [(int(row), int(label[row])) for row in rows if most[row] >= 0]


def rescale_thresholds(thresholds: np.ndarray, scale: float) -> np.ndarray:
    """The thresholds that decide as these do once logits are divided by `scale`."""
    return sigmoid(_logit(thresholds) / scale)


def best_thresholds(probabilities: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """(K,) thresholds of the highest F1 for each label; a half for a label that too few images have.

    A threshold lies halfway between the last probability that is taken and the first that is not.
    """
    found = np.full(truth.shape[1], THRESHOLD)
    for label in range(truth.shape[1]):
        if truth[:, label].sum() < MIN_POSITIVES:
            continue
        order = np.argsort(-probabilities[:, label], kind="stable")
        p, hits = probabilities[order, label], np.cumsum(truth[order, label])
        f1 = 2 * hits / (np.arange(1, len(p) + 1) + hits[-1])
        f1[:-1][p[:-1] == p[1:]] = -1  # equal ones are taken together
        best = int(f1.argmax())
        found[label] = (p[best] + (p[best + 1] if best + 1 < len(p) else 0.0)) / 2
    return found


def f1_scores(decided: np.ndarray, truth: np.ndarray) -> tuple[float, float]:
    """Over all decisions together, and the mean over the labels that some image has."""
    right, sums = (decided & truth).sum(axis=0), decided.sum(axis=0) + truth.sum(axis=0)
    used = truth.any(axis=0)
    return float(2 * right.sum() / max(1, sums.sum())), float(
        (2 * right[used] / sums[used]).mean()
    ) if used.any() else 0.0


def sigmoid(logits: np.ndarray) -> np.ndarray:
    return np.exp(-np.logaddexp(0, -logits))


def _logit(probabilities: np.ndarray | float) -> np.ndarray:
    with np.errstate(divide="ignore"):  # a threshold of 0 or 1 lies beyond all logits
        return np.log(probabilities) - np.log1p(-np.asarray(probabilities))


def _label(name: str, threshold: float, logits: np.ndarray, truth: np.ndarray, decided: np.ndarray) -> LabelScore:
    right, actual, said = int((decided & truth).sum()), int(truth.sum()), int(decided.sum())
    return LabelScore(
        name=str(name),
        count=actual,
        threshold=threshold,
        average_precision=float(average_precision(logits, truth)[0]) if actual else None,
        recall=_share(right, actual),
        precision=_share(right, said),
        f1=_share(2 * right, actual + said),
    )


def _share(part: Any, whole: Any) -> float | None:
    return float(part / whole) if whole else None


def _mean(values: Any) -> float:
    return float(np.mean([value for value in values if value is not None]))


def _interval(logits: np.ndarray, truth: np.ndarray, rng: np.random.Generator) -> Interval:
    """95 % over images; a resample is how often each image was drawn."""
    n, k = truth.shape
    resamples = int(max(20, min(RESAMPLES, BOOTSTRAP_VALUES / (n * k))))
    weights = rng.multinomial(n, np.full(n, 1 / n), size=resamples).astype(np.float32)
    used = np.flatnonzero(truth.any(axis=0))
    found = np.stack([average_precision(logits[:, label], truth[:, label], weights) for label in used])
    values = np.array([average_precision(logits[:, label], truth[:, label])[0] for label in used])
    low, high = bootstrap_interval(values, found, truth[:, used].sum(axis=0))
    point = float(values.mean())
    return max(0.0, min(point, low)), min(1.0, max(point, high))
