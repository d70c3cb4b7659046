"""Label issues against the definition of the paper, computed image by image, and against cleanlab."""

from __future__ import annotations

import numpy as np
import pytest

from vitrail.errors import UserError
from vitrail.metrics import accuracy
from vitrail.metrics.accuracy import softmax
from vitrail.metrics.label_errors import class_thresholds, find_label_issues


def noisy(seed: int, k: int, n: int, strength: float = 3.0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Probabilities of a classifier, labels with 15 % replaced at random, and the true labels."""
    rng = np.random.default_rng(seed)
    true = rng.integers(k, size=n)
    noisy_labels = np.where(rng.random(n) < 0.15, rng.integers(k, size=n), true)
    return softmax(rng.normal(size=(n, k)) + strength * np.eye(k)[true]), noisy_labels, true


def by_hand(p: list[list[float]], labels: list[int]) -> list[tuple[float, int, int]]:
    """(margin, image, suggested class) by the formulas of the paper: thresholds (2), confident joint (1), margin."""
    k = len(p[0])
    thresholds = []
    for j in range(k):
        values = [row[j] for row, label in zip(p, labels, strict=True) if label == j]
        thresholds.append(sum(values) / len(values) if values else 2.0)
    issues = []
    for index, (row, label) in enumerate(zip(p, labels, strict=True)):
        confident = [j for j in range(k) if row[j] >= thresholds[j] - 1e-6]
        if not confident:
            continue
        suggested = max(confident, key=lambda j: row[j])
        predicted = max(range(k), key=lambda j: row[j])
        if suggested != label and predicted != label:
            issues.append((row[label] - max(row[j] for j in range(k) if j != label), index, suggested))
    return sorted(issues)


def test_thresholds_and_issues_of_four_images() -> None:
    p = np.array([[0.9, 0.1], [0.7, 0.3], [0.2, 0.8], [0.85, 0.15]])
    labels = np.array([0, 0, 1, 1])
    np.testing.assert_allclose(class_thresholds(p, labels), [0.8, 0.475])
    found = find_label_issues(p, labels)
    assert found.row.tolist() == [3] and found.suggested.tolist() == [0]
    np.testing.assert_allclose(found.margin, [0.15 - 0.85])


def test_a_class_with_low_probabilities_has_a_low_threshold() -> None:
    """Image 1 is labelled 0 and has 0.5 for class 1: above that class's threshold of 0.45, below that of 0.9."""
    low = np.array([[0.9, 0.1, 0.0], [0.2, 0.5, 0.3], [0.3, 0.45, 0.25], [0.1, 0.1, 0.8]])
    high = np.array([[0.9, 0.1, 0.0], [0.2, 0.5, 0.3], [0.05, 0.9, 0.05], [0.1, 0.1, 0.8]])
    labels = np.array([0, 0, 1, 2])
    assert find_label_issues(low, labels).row.tolist() == [1]
    assert find_label_issues(high, labels).row.tolist() == []


@pytest.mark.parametrize("seed", range(12))
def test_equals_the_definition(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy, "CHUNK_VALUES", 100)  # several chunks
    p, labels, _ = noisy(seed, 2 + seed % 6, 60 + 10 * seed, strength=1 + seed / 4)
    found = find_label_issues(p, labels)
    expected = by_hand(p.tolist(), labels.tolist())
    assert expected
    assert list(zip(found.row.tolist(), found.suggested.tolist(), strict=True)) == [issue[1:] for issue in expected]
    np.testing.assert_allclose(found.margin, [margin for margin, _, _ in expected])


def test_equals_cleanlab() -> None:
    """cleanlab 2.9.0, by find_label_issues with filter_by="confident_learning", ranked by "normalized_margin"."""
    p, labels, _ = noisy(7, 5, 200)
    np.testing.assert_allclose(
        class_thresholds(p, labels), [0.619221, 0.616693, 0.669684, 0.703126, 0.68803], atol=1e-6
    )
    ranked = [74, 86, 63, 118, 85, 163, 176, 59, 112, 160, 190, 87, 135, 46, 92, 109]
    assert find_label_issues(p, labels).row.tolist() == ranked


def test_planted_wrong_labels_are_found_first() -> None:
    p, labels, true = noisy(3, 8, 2000, strength=6)
    wrong = np.flatnonzero(labels != true)
    found = find_label_issues(p, labels)
    assert np.isin(found.row[:100], wrong).all()
    assert np.isin(wrong, found.row).mean() > 0.85
    assert (found.suggested == true[found.row]).mean() > 0.97


def test_correct_labels_and_classes_without_images_give_no_issues() -> None:
    p, _, true = noisy(0, 6, 300, strength=12)
    assert not len(find_label_issues(p, true).row)
    p, labels, _ = noisy(0, 4, 100)
    seen = labels != 2
    assert 2 not in find_label_issues(p[seen], labels[seen]).suggested
    assert class_thresholds(p[seen], labels[seen])[2] == np.inf


def test_invalid_inputs_are_errors() -> None:
    with pytest.raises(UserError, match="at least one image"):
        find_label_issues(np.empty((0, 3)), np.empty(0, int))
    with pytest.raises(ValueError, match=r"not \(N, K\) and \(N,\)"):
        find_label_issues(np.ones((4, 3)), np.zeros(3, int))
