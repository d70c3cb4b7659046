"""Temperature scaling, selective prediction and label thresholds: optimal on the fitted images, valid on new ones."""

import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from scipy.stats import binomtest
from sklearn.metrics import f1_score, log_loss, precision_recall_curve

from vitrail.errors import UserError
from vitrail.metrics.accuracy import softmax
from vitrail.metrics.calibration import ece_chance_level, reliability
from vitrail.metrics.multilabel import best_thresholds, f1_scores, sigmoid
from vitrail.metrics.selective import clopper_pearson_lower, risk_coverage_curve, selective_threshold
from vitrail.metrics.temperature import cross_fitted_temperatures, fit_temperature
from vitrail.metrics.tuning import tune, tune_multilabel


def single_label(seed=0, n=4000, k=8, factor=3.0):
    """Calibrated logits multiplied by `factor`, and labels."""
    rng = np.random.default_rng(seed)
    calibrated = 1.5 * rng.normal(size=(n, k))
    labels = (rng.random((n, 1)) > softmax(calibrated).cumsum(axis=1)).sum(axis=1).clip(0, k - 1)
    return (factor * calibrated).astype(np.float32), labels


def multilabel(seed=0, n=1500, k=6, shift=2.0):
    """Multilabel logits whose best threshold is not 0.5, and labels."""
    rng = np.random.default_rng(seed)
    truth = rng.random((n, k)) < rng.uniform(0.05, 0.4, k)
    return (rng.normal(size=(n, k)) + 2.5 * truth - shift).astype(np.float32), truth


def test_temperature_equals_a_general_optimizer():
    logits, labels = single_label()
    best = minimize_scalar(lambda t: log_loss(labels, softmax(logits / t)), bounds=(0.1, 20), options={"xatol": 1e-8})
    assert fit_temperature(logits, labels) == pytest.approx(best.x, abs=1e-5)
    assert fit_temperature(logits, labels) == pytest.approx(3, rel=0.05)  # the factor
    logits, truth = multilabel()
    loss = lambda t: np.mean(np.logaddexp(0, logits / t) - logits / t * truth)  # noqa: E731
    best = minimize_scalar(loss, bounds=(0.1, 20), options={"xatol": 1e-8})
    assert fit_temperature(logits, truth) == pytest.approx(best.x, abs=1e-5)


@pytest.mark.parametrize("factor", [0.3, 1.0, 5.0])
def test_a_fitted_temperature_lowers_the_calibration_error_of_new_images(factor):
    logits, labels = single_label(factor=factor)
    fitted = fit_temperature(logits[:2000], labels[:2000])
    before, after = (reliability(softmax(logits[2000:] / t), labels[2000:]).ece for t in (1, fitted))
    if factor == 1:
        assert after == pytest.approx(before, abs=0.01)
    else:
        assert after < before / 3


def test_temperature_is_one_without_a_finite_optimum():
    logits = np.eye(3)[[0, 1, 2]] * 5
    assert fit_temperature(logits, np.array([0, 1, 2])) == 1  # all correct: lower is always better
    assert fit_temperature(np.zeros((10, 3)), np.arange(10) % 3) == 1  # constant logits
    assert fit_temperature(logits, np.array([1, 2, 0])) == 1  # all wrong


def test_cross_fitted_temperatures_come_from_the_other_half():
    logits, labels = single_label(n=101)
    found = cross_fitted_temperatures(logits, labels, seed=1)
    assert len(set(found)) == 2
    for value in set(found):
        assert value == fit_temperature(logits[found != value], labels[found != value])
    assert cross_fitted_temperatures(logits[:1], labels[:1]).tolist() == [1.0]


def test_ece_chance_level_of_calibrated_classifiers():
    rng = np.random.default_rng(0)
    calibrated = [
        reliability(softmax(logits), labels).ece
        for logits, labels in (single_label(s, 500, factor=1) for s in range(40))
    ]
    confidence = softmax(single_label(99, 500, factor=1)[0]).max(axis=1)
    assert 0.8 < np.mean(np.array(calibrated) < ece_chance_level(confidence, rng)) <= 1
    miscalibrated = reliability(softmax(single_label(1, 500)[0]), single_label(1, 500)[1])
    assert miscalibrated.ece > 3 * ece_chance_level(confidence, rng)


def test_risk_coverage_curve_by_hand():
    found = risk_coverage_curve(np.array([0.9, 0.5, 0.7, 0.7]), np.array([True, False, True, False]))
    assert found.threshold.tolist() == [0.9, 0.7, 0.5]
    assert found.coverage.tolist() == [0.25, 0.75, 1.0]
    assert found.accuracy == pytest.approx([1, 2 / 3, 0.5])
    assert found.risk == pytest.approx((0 + 2 * (1 / 3) + 0.5) / 4)
    written = risk_coverage_curve(np.random.default_rng(0).random(5000), np.ones(5000, bool)).to_dict()
    assert len(written["coverage"]) == 101 and written["coverage"][-1] == 1


def test_the_target_accuracy_holds_on_new_images():
    """In at least 90 % of cases: the bound of 95 % is for one threshold, and the best of several is chosen."""
    kept, answered = [], []
    for seed in range(100):
        logits, labels = single_label(seed, n=2000, k=4, factor=1.5)
        p = softmax(logits)
        confidence, correct = p.max(axis=1), p.argmax(axis=1) == labels
        threshold = selective_threshold(confidence[:1000], correct[:1000], 0.75)
        if threshold is None:
            continue
        new = confidence[1000:] >= threshold
        expected = softmax(logits[1000:] / 1.5).max(axis=1)[new].mean()  # the true accuracy
        kept.append(expected >= 0.75)
        answered.append(new.mean())
    assert len(kept) > 90 and np.mean(kept) >= 0.9
    assert np.mean(answered) > 0.3  # coverage


def test_no_threshold_where_the_target_cannot_be_guaranteed():
    confidence = np.random.default_rng(0).random(400)
    assert selective_threshold(confidence, np.zeros(400, bool), 0.9) is None
    assert selective_threshold(confidence[:10], np.ones(10, bool), 0.9) is None  # too few predictions
    assert selective_threshold(confidence, np.ones(400, bool), 0.9) == confidence.min()
    with pytest.raises(UserError, match=r"between 0 and 1.* 95"):
        selective_threshold(confidence, np.ones(400, bool), 95)
    assert selective_threshold(confidence[:100], np.ones(100, bool), 0.95) == confidence[:100].min()
    assert selective_threshold(confidence[:50], np.ones(50, bool), 0.95) is None  # 0.95 ** 50 is more than 5 %


@pytest.mark.parametrize(("hits", "n"), [(90, 100), (100, 100), (1, 40), (0, 10), (4800, 5000)])
def test_clopper_pearson_bound_equals_scipy(hits, n):
    expected = binomtest(hits, n).proportion_ci(0.9, "exact").low  # two-sided 90 % is one-sided 95 %
    assert clopper_pearson_lower(hits, n) == pytest.approx(expected, abs=1e-9)


def test_label_thresholds_maximise_f1_of_scikit_learn():
    logits, truth = multilabel()
    p = sigmoid(logits.astype(float))
    thresholds = best_thresholds(p, truth)
    for label in range(truth.shape[1]):
        precision, recall, _ = precision_recall_curve(truth[:, label], p[:, label])
        best = np.max(2 * precision * recall / np.maximum(precision + recall, 1e-12))
        assert f1_score(truth[:, label], p[:, label] >= thresholds[label]) == pytest.approx(best)
    micro, macro = f1_scores(p >= thresholds, truth)
    assert micro == pytest.approx(f1_score(truth, p >= thresholds, average="micro"))
    assert macro == pytest.approx(f1_score(truth, p >= thresholds, average="macro"))
    truth[:, 0] = False
    truth[:3, 0] = True
    assert best_thresholds(p, truth)[0] == 0.5  # three images are too few


def test_tuning_improves_cross_fitted_scores():
    logits, labels = single_label()
    found = tune(logits, labels, accuracy=0.7)
    assert found.ece < reliability(softmax(logits), labels).ece / 3
    assert found.nll < log_loss(labels, softmax(logits))
    assert found.abstention.right >= 0.7 and 0 < found.abstention.answered < 1
    assert found.coverage.accuracy[-1] == pytest.approx((logits.argmax(1) == labels).mean())
    again = tune(logits / 0.25, labels, accuracy=0.7, temperature=0.25)
    assert again.temperature == pytest.approx(found.temperature)  # for the raw logits
    assert again.abstention.threshold == pytest.approx(found.abstention.threshold)
    logits, truth = multilabel()
    tuned = tune_multilabel(logits, truth, np.full(6, 0.5))
    again = tune_multilabel(logits / 0.25, truth, np.full(6, 0.5), 0.25)
    assert again.temperature == pytest.approx(tuned.temperature)
    np.testing.assert_allclose(again.thresholds, tuned.thresholds)
    assert tuned.macro_f1 > tuned.macro_f1_before + 0.03
    assert tuned.macro_f1_before == pytest.approx(f1_score(truth, logits >= 0, average="macro"))
