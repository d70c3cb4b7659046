"""Multilabel scores against scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, f1_score, log_loss, precision_score, recall_score

from vitrail.errors import UserError
from vitrail.metrics.multilabel import (
    average_precision,
    bootstrap_interval,
    decision_reliability,
    rescale_thresholds,
    score_multilabel,
    sigmoid,
    worst_decisions,
)


def example(seed: int, n: int = 200, k: int = 5, ties: bool = False) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    truth = rng.random((n, k)) < rng.random(k) * 0.6
    logits = rng.normal(size=(n, k)) + 2.0 * truth - 1
    return (np.round(logits) if ties else logits), truth


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), n=st.integers(2, 60), ties=st.booleans())
def test_average_precision_equals_scikit_learn(seed: int, n: int, ties: bool) -> None:
    logits, truth = example(seed, n, 1, ties)
    truth[0] = True
    found = average_precision(logits[:, 0], truth[:, 0])[0]
    assert found == pytest.approx(average_precision_score(truth[:, 0], logits[:, 0]), abs=1e-12)
    weights = np.random.default_rng(seed).integers(0, 3, n).astype(float)
    weights[0] = 1
    weighted = average_precision(logits[:, 0], truth[:, 0], weights[None])[0]
    expected = average_precision_score(truth[:, 0], logits[:, 0], sample_weight=weights)
    assert weighted == pytest.approx(expected, abs=1e-12)


def test_scores_equal_scikit_learn() -> None:
    logits, truth = example(1)
    scores = score_multilabel(logits, truth, list("abcde"))
    decided = sigmoid(logits) >= 0.5
    assert scores.mean_ap == pytest.approx(average_precision_score(truth, logits, average="macro"))
    assert scores.micro_f1 == pytest.approx(f1_score(truth, decided, average="micro"))
    assert scores.exact == pytest.approx((decided == truth).all(1).mean())
    expected = sum(log_loss(truth[:, k], sigmoid(logits[:, k])) for k in range(5))
    assert scores.nll == pytest.approx(expected)
    for k, one in enumerate(scores.per_class):
        assert one.precision == pytest.approx(precision_score(truth[:, k], decided[:, k]))
        assert one.recall == pytest.approx(recall_score(truth[:, k], decided[:, k]))
        assert one.f1 == pytest.approx(f1_score(truth[:, k], decided[:, k]))
        assert one.count == truth[:, k].sum()


def test_the_interval_contains_the_score_and_shrinks_with_n() -> None:
    wide, narrow = (score_multilabel(*example(3, n), list("abcde")) for n in (60, 2000))
    for scores in (wide, narrow):
        assert scores.mean_ap_interval[0] < scores.mean_ap < scores.mean_ap_interval[1]
    widths = [high - low for low, high in (wide.mean_ap_interval, narrow.mean_ap_interval)]
    assert widths[1] < widths[0] / 2
    random = np.random.default_rng(0).normal(size=(2000, 5))
    chance = score_multilabel(random, example(3, 2000)[1], list("abcde"))
    assert chance.mean_ap == pytest.approx(chance.chance, abs=0.03)


@pytest.mark.slow
def test_the_interval_covers_the_truth_of_rare_labels() -> None:
    """The true value comes from the same classifier on 40,000 images."""

    def drawn(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(seed)
        truth = rng.random((n, 8)) < 0.04
        return rng.normal(size=(n, 8)) + 1.5 * truth, truth

    names = list("abcdefgh")
    true = score_multilabel(*drawn(40_000, 99), names).mean_ap
    intervals = [score_multilabel(*drawn(300, seed), names).mean_ap_interval for seed in range(40)]
    covered = sum(low <= true <= high for low, high in intervals)
    assert covered >= 30  # 95 % of 40 would be 38; half-width intervals cover about 20


def test_the_bootstrap_corrects_bias_and_spread() -> None:
    values, around = np.array([0.5, 0.7]), np.random.default_rng(0).normal(size=(2, 4000))
    low, high = bootstrap_interval(values, values[:, None] + 0.04 + 0.01 * around, np.array([2, 5]))
    assert (low + high) / 2 == pytest.approx(0.6 - 0.04, abs=1e-3)
    half = 1.96 * 0.01 * np.sqrt(2 / 1 + 5 / 4) / 2  # scaled by m / (m - 1)
    assert (high - low) / 2 == pytest.approx(half, rel=0.05)


def test_labels_without_images_and_nonfinite_outputs() -> None:
    logits, truth = example(2)
    truth[:, 3] = False
    scores = score_multilabel(logits, truth, list("abcde"))
    assert scores.per_class[3].average_precision is None and scores.per_class[3].recall is None
    with pytest.raises(UserError, match="no test image has a label"):
        score_multilabel(logits, np.zeros_like(truth), list("abcde"))
    logits[0, 0] = np.nan
    with pytest.raises(UserError, match="NaN"):
        score_multilabel(logits, truth, list("abcde"))


def test_worst_decisions_are_sorted_and_one_per_image() -> None:
    truth = np.array([[1, 0], [0, 1], [1, 1]])
    logits = np.array([[-3.0, 5.0], [1.0, 2.0], [4.0, 4.0]])
    assert worst_decisions(logits, truth, 5) == [(0, 1), (1, 0)]
    # With logit thresholds 1.5 and 5.5, the second label is never predicted and the first only in row 2.
    assert worst_decisions(logits, truth, 5, sigmoid(np.array([1.5, 5.5]))) == [(0, 0), (1, 1), (2, 1)]


def test_reliability_counts_every_decision() -> None:
    logits, truth = example(4, n=100)
    found = decision_reliability(logits, truth)
    assert found.count.sum() == 500
    correct = ((sigmoid(logits) >= 0.5) == truth).mean()
    assert np.nansum(found.accuracy * found.count) / 500 == pytest.approx(correct)
    thresholds = np.array([0.1, 0.3, 0.5, 0.7, 0.9])
    found = decision_reliability(logits, truth, thresholds)
    correct = ((sigmoid(logits) >= thresholds) == truth).mean()
    assert np.nansum(found.accuracy * found.count) / 500 == pytest.approx(correct)


def test_rescaled_thresholds_give_the_same_decisions() -> None:
    logits, _ = example(5, n=100)
    thresholds = np.array([0.1, 0.3, 0.5, 0.7, 0.9])
    rescaled = rescale_thresholds(thresholds, 1.7)
    np.testing.assert_array_equal(sigmoid(logits / 1.7) >= rescaled, sigmoid(logits) >= thresholds)
    assert rescaled[2] == 0.5 and rescale_thresholds(np.array([0.0, 1.0]), 1.7).tolist() == [0, 1]
