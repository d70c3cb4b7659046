"""Suspected labels against the paper's definition, written out image by image, and against cleanlab's answers."""

from __future__ import annotations

import numpy as np
import pytest

from vitrail.errors import UserError
from vitrail.metrics import accuracy as metrics
from vitrail.metrics.accuracy import softmax
from vitrail.metrics.label_errors import class_thresholds, find_label_issues


def noisy(seed: int, k: int, n: int, strength: float = 3.0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Probabilities of a classifier, labels of which some were replaced by others, and the true ones."""
    rng = np.random.default_rng(seed)
    true = rng.integers(k, size=n)
    given = np.where(rng.random(n) < 0.15, rng.integers(k, size=n), true)
    return softmax(rng.normal(size=(n, k)) + strength * np.eye(k)[true]), given, true


def by_hand(p: list[list[float]], labels: list[int]) -> list[tuple[float, int, int]]:
    """(margin, image, rather) by the formulas of the paper: thresholds (2), the confident joint (1), the margin."""
    k = len(p[0])
    least = []
    for j in range(k):
        own = [row[j] for row, label in zip(p, labels, strict=True) if label == j]
        least.append(sum(own) / len(own) if own else 2.0)
    found = []
    for index, (row, label) in enumerate(zip(p, labels, strict=True)):
        confident = [j for j in range(k) if row[j] >= least[j] - 1e-6]
        if not confident:
            continue
        rather = max(confident, key=lambda j: row[j])
        answer = max(range(k), key=lambda j: row[j])
        if rather != label and answer != label:
            found.append((row[label] - max(row[j] for j in range(k) if j != label), index, rather))
    return sorted(found)


def test_thresholds_and_suspects_of_four_images() -> None:
    p = np.array([[0.9, 0.1], [0.7, 0.3], [0.2, 0.8], [0.85, 0.15]])
    labels = np.array([0, 0, 1, 1])
    np.testing.assert_allclose(class_thresholds(p, labels), [0.8, 0.475])
    found = find_label_issues(p, labels)
    assert found.row.tolist() == [3] and found.rather.tolist() == [0]
    np.testing.assert_allclose(found.margin, [0.15 - 0.85])


def test_a_class_that_is_never_sure_asks_for_less() -> None:
    """Both images are labelled 0 and called 1 with 0.5: that is much for class 1 where its own have 0.45, and little
    where they have 0.9."""
    shy = np.array([[0.9, 0.1, 0.0], [0.2, 0.5, 0.3], [0.3, 0.45, 0.25], [0.1, 0.1, 0.8]])
    sure = np.array([[0.9, 0.1, 0.0], [0.2, 0.5, 0.3], [0.05, 0.9, 0.05], [0.1, 0.1, 0.8]])
    labels = np.array([0, 0, 1, 2])
    assert find_label_issues(shy, labels).row.tolist() == [1]
    assert find_label_issues(sure, labels).row.tolist() == []


@pytest.mark.parametrize("seed", range(12))
def test_the_definition_written_out(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "CHUNK_VALUES", 100)  # several parts
    p, labels, _ = noisy(seed, 2 + seed % 6, 60 + 10 * seed, strength=1 + seed / 4)
    found = find_label_issues(p, labels)
    expected = by_hand(p.tolist(), labels.tolist())
    assert expected
    assert list(zip(found.row.tolist(), found.rather.tolist(), strict=True)) == [one[1:] for one in expected]
    np.testing.assert_allclose(found.margin, [margin for margin, _, _ in expected])


def test_what_cleanlab_finds() -> None:
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
    assert (found.rather == true[found.row]).mean() > 0.97


def test_right_labels_and_classes_without_images_are_not_suspected() -> None:
    p, _, true = noisy(0, 6, 300, strength=12)
    assert not len(find_label_issues(p, true).row)
    p, labels, _ = noisy(0, 4, 100)
    seen = labels != 2
    assert 2 not in find_label_issues(p[seen], labels[seen]).rather
    assert class_thresholds(p[seen], labels[seen])[2] == np.inf


def test_inputs_that_do_not_fit() -> None:
    with pytest.raises(UserError, match="at least one image"):
        find_label_issues(np.empty((0, 3)), np.empty(0, int))
    with pytest.raises(ValueError, match=r"not \(N, K\) and \(N,\)"):
        find_label_issues(np.ones((4, 3)), np.zeros(3, int))
