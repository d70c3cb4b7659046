"""Paired significance tests against scipy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from sklearn.metrics import average_precision_score

from vitrail.metrics.significance import compare_correct, compare_multilabel, holm_correction, sign_test


@given(won=st.integers(0, 400), lost=st.integers(0, 400))
def test_sign_test_equals_scipy(won, lost):
    expected = stats.binomtest(won, won + lost).pvalue if won + lost else 1.0
    assert sign_test(won, lost) == pytest.approx(expected, rel=1e-9)


def test_compare_correct_counts_and_interval():
    rng = np.random.default_rng(0)
    first, second = rng.random(500) < 0.7, rng.random(500) < 0.8
    found = compare_correct(first, second)
    assert found.difference == pytest.approx(second.mean() - first.mean())
    assert (found.only_first, found.only_second) == ((first & ~second).sum(), (~first & second).sum())
    expected = stats.bootstrap((first, second), lambda a, b: b.mean() - a.mean(), paired=True, method="percentile",
                               vectorized=False, n_resamples=2000, rng=rng).confidence_interval  # fmt: skip
    np.testing.assert_allclose(found.interval, expected, atol=0.006)
    assert found.different == (found.p < 0.05)


def test_equal_classifiers_have_no_difference_and_a_nonzero_interval():
    correct = np.random.default_rng(0).random(100) < 0.5
    found = compare_correct(correct, correct)
    assert found.p == 1 and not found.different and found.difference == 0
    assert found.interval[0] < 0 < found.interval[1]


def test_the_false_positive_rate_is_at_most_5_percent():
    rng = np.random.default_rng(1)
    alarms = []
    for seed in range(300):
        shared = rng.random(200)
        first, second = ((shared + rng.random(200)) > 0.8 for _ in range(2))  # equally good and correlated
        alarms.append(compare_correct(first, second, seed).different)
    assert np.mean(alarms) < 0.07


def test_compare_multilabel_is_paired():
    rng = np.random.default_rng(2)
    truth = rng.random((400, 3)) < 0.3
    poor, good = (rng.normal(size=truth.shape) + strength * truth for strength in (0.5, 1.5))
    found = compare_multilabel(poor, good, truth)
    expected = average_precision_score(truth, good) - average_precision_score(truth, poor)
    assert found.difference == pytest.approx(expected) and found.different
    assert found.interval[0] < expected < found.interval[1]
    assert not compare_multilabel(good, good + 1e-9 * rng.normal(size=truth.shape), truth).different


def test_holm_correction_by_hand():
    assert holm_correction([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm_correction([0.9, 0.6]) == [1.0, 1.0]
    assert holm_correction([0.02]) == [0.02] and holm_correction([]) == []
