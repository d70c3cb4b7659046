"""Few-shot accuracy of frozen features: ridge regression to targets of -1 and 1, in closed form (section 4.1).

Matches big_vision. X (N, D) is standardised by its own mean and deviation and gets a constant feature at the end.
With targets Y (N, K) the solution is

    W = (X'X + l I)^-1 X'Y    if there are more images than features,
    W = X' (XX' + l I)^-1 Y   otherwise.

Either matrix is Q diag(e) Q', so W = left diag(1 / (e + l)) right: one decomposition serves every penalty l.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from vitrail.errors import UserError

PENALTY_GRID = tuple(2.0**power for power in range(-10, 20))  # penalties tried by the paper's code
FIXED_PENALTY = 2.0**10  # the default of big_vision
SHOTS = (1, 5, 10, 25)
CONSTANT = 100.0  # value of the last feature: large, so that the bias is hardly penalised
EPS = 1e-5  # added to every standard deviation
ROWS = 4096  # images scored per batch


class LeastSquares:
    """Ridge regression of (N,) labels on (N, D) features in float64, for any number of penalties."""

    def __init__(self, features: Tensor, labels: Tensor, num_classes: int) -> None:
        if features.ndim != 2 or labels.shape != features.shape[:1]:
            raise ValueError(f"features are {tuple(features.shape)} and labels {tuple(labels.shape)}, not (N, D), (N,)")
        if not len(features):
            raise UserError("few-shot least squares needs at least one image")
        if not features.isfinite().all():
            raise UserError("some features are NaN or infinite; check the weights and the images")
        x = features.double()
        self.mean, self.deviation = x.mean(dim=0), x.std(dim=0, correction=0) + EPS
        x = self._standardize(x)
        if len(x) >= x.shape[1]:
            self.eigenvalues, q = torch.linalg.eigh(x.T @ x)
            # X'Y without building Y: targets are -1 everywhere, plus 2 at the class.
            sums = x.new_zeros(num_classes, x.shape[1]).index_add_(0, labels, x)
            self.left, self.right = q, q.T @ (2 * sums - x.sum(dim=0)).T
        else:
            self.eigenvalues, q = torch.linalg.eigh(x @ x.T)
            sums = x.new_zeros(num_classes, len(x)).index_add_(0, labels, q)
            self.left, self.right = x.T @ q, (2 * sums - q.sum(dim=0)).T

    def weights(self, penalty: float) -> Tensor:
        """(D + 1, K) weights of the standardised features and the constant."""
        return (self.left / (self.eigenvalues + penalty)) @ self.right

    def count_correct(self, features: Tensor, labels: Tensor, penalties: Sequence[float]) -> np.ndarray:
        """Number of correct predictions on (M, D) features, int64 for each penalty."""
        counts = np.zeros(len(penalties), np.int64)
        for start in range(0, len(features), ROWS):
            rows = slice(start, start + ROWS)
            projected = self._standardize(features[rows].double()) @ self.left
            for index, penalty in enumerate(penalties):
                predicted = (projected / (self.eigenvalues + penalty) @ self.right).argmax(dim=1)
                counts[index] += int((predicted == labels[rows]).sum())
        return counts

    def _standardize(self, x: Tensor) -> Tensor:
        return torch.nn.functional.pad((x - self.mean) / self.deviation, (0, 1), value=CONSTANT)


def sample_shots(labels: np.ndarray, num_classes: int, shots: int | None, seed: int | None) -> np.ndarray:
    """Indices of the training images, class by class: at most `shots` of each class, or all if None.

    Without a seed, the first of each class (the paper's code). With a seed, the first of a permutation (big_vision), so
    that fewer shots are a subset of more.
    """
    rng = None if seed is None else np.random.default_rng(seed)
    members = (np.flatnonzero(labels == label) for label in range(num_classes))
    return np.concatenate([(rows if rng is None else rng.permutation(rows))[:shots] for rows in members])


def best_mean_rank(accuracies: Mapping[str, np.ndarray]) -> int:
    """Index of the penalty with the best mean rank over the datasets. Of equal accuracies the stronger one wins."""
    ranks = [np.argsort(np.argsort(values, kind="stable"), kind="stable") for values in accuracies.values()]
    return int(np.mean(ranks, axis=0).argmax())
