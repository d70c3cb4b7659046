"""Few-shot least squares against the original code and a direct solve."""

from pathlib import Path

import numpy as np
import pytest
import torch

from vitrail.errors import UserError
from vitrail.metrics import fewshot
from vitrail.metrics.fewshot import PENALTY_GRID, LeastSquares, best_mean_rank, sample_shots

FIXTURE = np.load(Path(__file__).parents[1] / "fixtures" / "bigvision_fewshot.npz")


@pytest.mark.parametrize("kind", ["tall", "wide"])
def test_accuracies_equal_the_original_code(kind):
    x, y, x_test, y_test = (torch.from_numpy(FIXTURE[f"{kind}/{name}"]) for name in ("x", "y", "x_test", "y_test"))
    accuracies = LeastSquares(x, y, int(y_test.max()) + 1).count_correct(x_test, y_test, PENALTY_GRID) / len(y_test)
    np.testing.assert_allclose(accuracies, FIXTURE[f"{kind}/accuracy_at_2^-10..2^19"], atol=1e-7)  # stored in float32


def direct(x, y, num_classes, penalty):
    """Ridge regression by lstsq with the penalty as extra rows: more precise than normal equations."""
    x = (x - x.mean(0)) / (x.std(0) + 1e-5)
    x = np.hstack([x, np.full((len(x), 1), 100.0)])
    targets = 2 * np.eye(num_classes)[y] - 1
    rows = np.vstack([x, np.sqrt(penalty) * np.eye(x.shape[1])])
    return np.linalg.lstsq(rows, np.vstack([targets, np.zeros((x.shape[1], num_classes))]))[0]


@pytest.mark.parametrize(("n", "d"), [(200, 32), (33, 32), (32, 32), (20, 48), (6, 64)])
def test_weights_equal_a_direct_solve(n, d):
    rng = np.random.default_rng(n * d)
    x, y = rng.normal(size=(n, d)) * rng.uniform(0.1, 5, d) + 2, rng.integers(0, 5, n)
    problem = LeastSquares(torch.from_numpy(x), torch.from_numpy(y), 5)
    for penalty in PENALTY_GRID:
        np.testing.assert_allclose(problem.weights(penalty).numpy(), direct(x, y, 5, penalty), atol=1e-8)


def test_counts_match_the_weights_in_any_batch_size(monkeypatch):
    rng = np.random.default_rng(0)
    x, y = torch.from_numpy(rng.normal(size=(30, 8))), torch.from_numpy(rng.integers(0, 3, 30))
    x_test, y_test = torch.from_numpy(rng.normal(size=(101, 8))), torch.from_numpy(rng.integers(0, 3, 101))
    problem = LeastSquares(x, y, 3)
    standard = (x_test - x.mean(0)) / (x.std(0, correction=0) + 1e-5)
    standard = torch.hstack([standard, torch.full((101, 1), 100.0, dtype=torch.float64)])
    expected = [int(((standard @ problem.weights(penalty)).argmax(1) == y_test).sum()) for penalty in PENALTY_GRID]
    assert problem.count_correct(x_test, y_test, PENALTY_GRID).tolist() == expected
    monkeypatch.setattr(fewshot, "ROWS", 10)
    assert problem.count_correct(x_test, y_test, PENALTY_GRID).tolist() == expected


def test_one_decomposition_serves_all_penalties(monkeypatch):
    calls = []
    eigh = torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda matrix: calls.append(matrix.shape) or eigh(matrix))
    x, y = torch.randn(12, 40), torch.arange(12) % 4
    LeastSquares(x, y, 4).count_correct(x, y, PENALTY_GRID)
    assert calls == [(12, 12)]


def test_a_class_without_images_is_never_predicted():
    """Its target is -1 for every image."""
    x, y = torch.randn(30, 6), torch.arange(30) % 3
    problem = LeastSquares(x, y, 5)
    assert problem.count_correct(x, torch.full((30,), 4), [1.0]).sum() == 0


def test_nonfinite_and_missing_features_are_errors():
    with pytest.raises(UserError, match="NaN"):
        LeastSquares(torch.tensor([[1.0], [torch.nan]]), torch.tensor([0, 1]), 2)
    with pytest.raises(UserError, match="at least one image"):
        LeastSquares(torch.empty(0, 3), torch.empty(0, dtype=torch.int64), 2)


def test_shots_without_a_seed_are_the_first_of_each_class():
    labels = np.array([2, 0, 0, 1, 2, 0, 2])
    assert sample_shots(labels, 3, 2, None).tolist() == [1, 2, 3, 0, 4]
    assert sample_shots(labels, 3, None, None).tolist() == [1, 2, 5, 3, 0, 4, 6]


def test_seeded_shots_are_nested_and_equal_big_vision():
    labels = np.random.default_rng(1).integers(0, 7, 200)
    rng = np.random.default_rng(2)
    expected = [rng.permutation(np.where(labels == label)[0])[:5] for label in range(7)]
    five = sample_shots(labels, 7, 5, 2)
    assert five.tolist() == np.concatenate(expected).tolist()
    assert set(sample_shots(labels, 7, 1, 2)) < set(five)
    assert set(five) != set(sample_shots(labels, 7, 5, 3))


def test_the_penalty_of_the_best_mean_rank_is_not_that_of_the_best_mean():
    a = np.array([0.50, 0.51, 0.40])  # ranks 1, 2, 0
    b = np.array([0.30, 0.29, 0.90])  # ranks 1, 0, 2
    c = np.array([0.60, 0.61, 0.50])  # ranks 1, 2, 0
    assert best_mean_rank({"a": a, "b": b, "c": c}) == 1 != int((a + b + c).argmax())
