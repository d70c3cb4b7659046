"""Weighted k-NN against scikit-learn."""

import numpy as np
import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier

from vitrail.errors import UserError
from vitrail.metrics import knn
from vitrail.metrics.knn import knn_predict


def data(seed=0, n=150, m=90, d=12, k=6):
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(k, d))
    labels, truth = rng.integers(0, k, n), rng.integers(0, k, m)
    known = (centres[labels] + rng.normal(size=(n, d))).astype(np.float32)
    return known, labels, (centres[truth] + rng.normal(size=(m, d))).astype(np.float32)


def test_predictions_equal_scikit_learn(monkeypatch):
    known, labels, features = data()
    monkeypatch.setattr(knn, "VALUES", 150 * 7)  # batches of 7 queries, which do not divide 90
    counts = (1, 5, 20)
    predicted = knn_predict(*map(torch.from_numpy, (known, labels, features)), 6, counts)
    for row, count in zip(predicted, counts, strict=True):
        reference = KNeighborsClassifier(count, metric="cosine", weights=lambda distance: np.exp((1 - distance) / 0.07))
        assert row.tolist() == reference.fit(known, labels).predict(features).tolist()


def test_more_neighbours_than_images_use_all_images():
    known, labels, features = map(torch.from_numpy, data(n=9))
    assert torch.equal(*knn_predict(known, labels, features, 6, (9, 200)))


def test_invalid_arguments_are_errors():
    known, labels, features = map(torch.from_numpy, data())
    with pytest.raises(UserError, match="training image"):
        knn_predict(known[:0], labels[:0], features, 6)
    with pytest.raises(UserError, match=r"neighbours.*0"):
        knn_predict(known, labels, features, 6, (0,))
    with pytest.raises(UserError, match=r"temperature.*-1"):
        knn_predict(known, labels, features, 6, (1,), -1.0)
