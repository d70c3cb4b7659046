"""Classification scores against scikit-learn and closed forms, and edge cases."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn import metrics as oracle

from vitrail.errors import UserError
from vitrail.metrics import accuracy
from vitrail.metrics.accuracy import (
    least_confident,
    most_confident_errors,
    proportion_interval,
    score_classification,
    softmax,
)


def names(k: int) -> list[str]:
    return [f"class {i}" for i in range(k)]


def sample(n: int, k: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    labels = rng.integers(k, size=n)
    logits = rng.normal(size=(n, k)) + 1.5 * np.eye(k)[labels]
    return logits.astype(np.float32), labels


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 60), k=st.integers(2, 9), seed=st.integers(0, 10**6))
def test_agrees_with_scikit_learn(n: int, k: int, seed: int) -> None:
    logits, labels = sample(n, k, seed)
    got = score_classification(logits, labels, names(k), bootstrap=10)
    predicted = logits.argmax(axis=1)
    every = np.arange(k)
    assert got.n == n
    assert got.top1 == pytest.approx(oracle.accuracy_score(labels, predicted))
    assert got.nll == pytest.approx(oracle.log_loss(labels, softmax(logits), labels=every), rel=1e-6)
    np.testing.assert_array_equal(got.confusion, oracle.confusion_matrix(labels, predicted, labels=every))
    present = [one for one in got.per_class if one.recall is not None]
    assert got.balanced_accuracy == pytest.approx(np.mean([one.recall for one in present]))
    precision, recall, f1, count = oracle.precision_recall_fscore_support(
        labels, predicted, labels=every, zero_division=0
    )
    for i, one in enumerate(got.per_class):
        assert one.count == count[i]
        assert (one.recall or 0) == pytest.approx(recall[i])
        assert (one.precision or 0) == pytest.approx(precision[i])
        assert (one.f1 or 0) == pytest.approx(f1[i])
    if k <= 5:
        assert got.top5 is None and got.top5_interval is None
    else:
        assert got.top5 == pytest.approx(oracle.top_k_accuracy_score(labels, logits, k=5, labels=every))


def test_balanced_accuracy_agrees_with_scikit_learn_when_a_class_is_absent() -> None:
    logits, labels = sample(300, 6)
    labels[labels == 2] = 3
    got = score_classification(logits, labels, names(6))
    with pytest.warns(UserWarning):  # it warns of predicted classes that are not in the truth
        expected = oracle.balanced_accuracy_score(labels, logits.argmax(axis=1))
    assert got.balanced_accuracy == pytest.approx(expected)
    assert got.per_class[2].count == 0 and got.per_class[2].recall is None


def test_ties_go_to_the_lower_class_index() -> None:
    flat = np.zeros((7, 7))
    got = score_classification(flat, np.arange(7), names(7))
    assert got.top1 == pytest.approx(1 / 7)  # class 0 is predicted for all
    assert got.top5 == pytest.approx(5 / 7)  # classes 0 to 4 are the first five
    assert got.nll == pytest.approx(np.log(7))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), shift=st.floats(-1e6, 1e6))
def test_scores_do_not_depend_on_chunks_shifts_or_order(seed: int, shift: float) -> None:
    logits, labels = sample(40, 6, seed)
    whole = score_classification(logits, labels, names(6), bootstrap=50)
    order = np.random.default_rng(seed).permutation(40)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accuracy, "CHUNK_VALUES", 20)  # chunks of three images
        parts = score_classification(logits[order].astype(np.float64) + shift, labels[order], names(6), bootstrap=50)
    assert parts.top1 == whole.top1 and parts.top5 == whole.top5
    assert parts.top1_interval == whole.top1_interval
    assert parts.nll == pytest.approx(whole.nll, abs=1e-6)
    assert parts.ece == pytest.approx(whole.ece, abs=1e-6)


def test_interval_equals_the_binomial_one() -> None:
    n, p = 1000, 0.8
    logits = np.tile([1.0, 0.0], (n, 1))
    labels = (np.arange(n) >= p * n).astype(int)
    low, high = score_classification(logits, labels, names(2), bootstrap=20_000).top1_interval
    half = 1.96 * np.sqrt(p * (1 - p) / n)
    assert low == pytest.approx(p - half, abs=2e-3)
    assert high == pytest.approx(p + half, abs=2e-3)


def test_interval_equals_a_bootstrap_over_images() -> None:
    logits, labels = sample(500, 4, seed=3)
    hits = logits.argmax(axis=1) == labels
    rng = np.random.default_rng(1)
    means = hits[rng.integers(500, size=(5000, 500))].mean(axis=1)
    expected = np.quantile(means, [0.025, 0.975])
    np.testing.assert_allclose(
        score_classification(logits, labels, names(4), bootstrap=5000).top1_interval, expected, atol=0.0041
    )


@pytest.mark.parametrize(("hits", "n"), [(17, 19), (0, 7), (7, 7), (99, 5000), (1, 1), (4990, 5000)])
def test_small_counts_use_the_wilson_interval(hits: int, n: int) -> None:
    expected = stats.binomtest(hits, n).proportion_ci(method="wilson")
    assert proportion_interval(hits, n) == pytest.approx(tuple(expected), abs=1e-6)


def test_the_interval_of_a_proportion_covers_the_truth() -> None:
    """Over all outcomes of 19 images with an accuracy of 80 %; percentiles of a bootstrap cover it in 89 %."""
    pmf = stats.binom(19, 0.8).pmf
    bounds = [proportion_interval(hits, 19) for hits in range(20)]
    assert sum(pmf(hits) for hits, (low, high) in enumerate(bounds) if low <= 0.8 <= high) > 0.94


def test_the_seed_fixes_the_interval() -> None:
    logits, labels = sample(500, 6)
    logits[::3] = -logits[::3]  # so that many are wrong, also in the top 5
    first, again, other = (score_classification(logits, labels, names(6), bootstrap=20, seed=s) for s in (7, 7, 8))
    assert first.top1_interval == again.top1_interval and first.top5_interval == again.top5_interval
    assert first.top1_interval != other.top1_interval


def test_extreme_logits_stay_finite() -> None:
    logits = np.array([[1e5, -1e5, 0.0], [-3e38, 0.0, 3e38]], dtype=np.float32)
    got = score_classification(logits, np.array([0, 2]), names(3))
    assert got.top1 == 1.0 and got.nll == 0.0
    assert np.isfinite(score_classification(logits, np.array([1, 0]), names(3)).nll)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nonfinite_logits_are_an_error(bad: float) -> None:
    logits, labels = sample(10, 3)
    logits[4, 1] = bad
    with pytest.raises(UserError, match="1 of 10 images"):
        score_classification(logits, labels, names(3))


def test_no_images_and_shape_mismatches_are_errors() -> None:
    with pytest.raises(UserError, match="no images"):
        score_classification(np.empty((0, 3)), np.empty(0, dtype=int), names(3))
    with pytest.raises(UserError, match=r"3 outputs.* 2 class names"):
        score_classification(np.zeros((1, 3)), np.array([0]), names(2))
    with pytest.raises(UserError, match=r"0 to 3.*0 to 2"):
        score_classification(np.zeros((2, 3)), np.array([0, 3]), names(3))


def test_to_dict_is_json() -> None:
    logits, labels = sample(30, 7)
    labels[labels == 6] = 0
    values = json.loads(json.dumps(score_classification(logits, labels, names(7)).to_dict(), allow_nan=False))
    assert values["n"] == 30 and len(values["top1_interval"]) == 2
    assert values["per_class"][6] == {"name": "class 6", "count": 0, "recall": None} | {
        key: values["per_class"][6][key] for key in ("precision", "f1")
    }
    assert np.array(values["confusion"]).shape == (7, 7)


def test_errors_are_sorted_by_confidence() -> None:
    logits = np.log(np.array([[0.9, 0.1], [0.4, 0.6], [0.2, 0.8], [0.7, 0.3]]))
    labels = np.array([0, 0, 0, 1])
    assert most_confident_errors(logits, labels, 10).tolist() == [2, 3, 1]
    assert most_confident_errors(logits, labels, 1).tolist() == [2]
    assert most_confident_errors(logits[:1], labels[:1], 5).tolist() == []
    assert least_confident(logits, 2).tolist() == [1, 3]


@pytest.mark.slow
def test_a_large_evaluation() -> None:
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((10_000, 1000), dtype=np.float32)
    got = score_classification(logits, rng.integers(1000, size=10_000), names(1000))
    assert got.confusion.dtype == np.int32 and got.confusion.sum() == 10_000
    assert got.top5 is not None and got.top5 == pytest.approx(0.005, abs=0.003)


def test_balanced_and_nll_intervals_equal_a_bootstrap_over_images() -> None:
    logits, labels = sample(150, 4, 3)
    labels[: 150 - 30] = np.where(labels[:120] == 3, 0, labels[:120])  # one class is rare
    got = score_classification(logits, labels, names(4))
    predicted, p = logits.argmax(axis=1), softmax(logits)
    nll = -np.log(p[np.arange(150), labels])

    def resampled(statistic: object, *data: np.ndarray) -> tuple[float, float]:
        options = {"paired": True, "vectorized": False, "n_resamples": 2000, "method": "percentile"}
        result = stats.bootstrap(data, statistic, rng=np.random.default_rng(1), **options)
        return tuple(result.confidence_interval)

    def balanced(truth: np.ndarray, predicted: np.ndarray) -> float:
        return np.mean([(predicted[truth == label] == label).mean() for label in np.unique(truth)])

    np.testing.assert_allclose(got.balanced_interval, resampled(balanced, labels, predicted), atol=0.012)
    np.testing.assert_allclose(got.nll_interval, resampled(np.mean, nll), atol=0.02)
    assert got.balanced_accuracy == pytest.approx(oracle.balanced_accuracy_score(labels, predicted))


def test_classes_all_correct_or_all_wrong_have_a_nonzero_interval() -> None:
    logits, labels = np.eye(3)[[0, 1, 1]].repeat(8, axis=0) * 9, np.array([0, 1, 2]).repeat(8)
    low, high = score_classification(logits, labels, names(3)).balanced_interval or (0, 0)
    assert low < 2 / 3 < high
