"""Few-shot accuracy of frozen features: regularised least squares to targets of -1 and 1, in closed form.

The paper's measure (section 4.1), as its authors' code has it. With X (N, D), standardised by its own mean and
deviation and with a constant feature at the end, and Y (N, K), the solution is

    W = (X'X + l I)^-1 X'Y    if there are more images than features,
    W = X' (XX' + l I)^-1 Y   if there are fewer.

Either matrix is Q diag(e) Q', so W = left diag(1 / (e + l)) right, and one decomposition serves every penalty l.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from vitrail.errors import UserError

PENALTY_GRID = tuple(2.0**power for power in range(-10, 20))  # the penalties that the paper's code tries
FIXED_PENALTY = 2.0**10  # the one that big_vision takes
SHOTS = (1, 5, 10, 25)
CONSTANT = 100.0  # the last feature: so large that the bias is hardly penalised
LEAST_DEVIATION = 1e-5  # added to every deviation
ROWS = 4096  # images scored at a time


class LeastSquares:
    """The problem of (N, D) features and (N,) labels, solved for as many penalties as are asked for, in float64."""

    def __init__(self, features: Tensor, labels: Tensor, num_classes: int) -> None:
        if features.ndim != 2 or labels.shape != features.shape[:1]:
            raise ValueError(f"features are {tuple(features.shape)} and labels {tuple(labels.shape)}, not (N, D), (N,)")
        if not len(features):
            raise UserError("least squares need at least one image")
        if not features.isfinite().all():
            raise UserError("some features are not finite numbers; the weights or the images they come from are broken")
        x = features.double()
        self.mean, self.deviation = x.mean(dim=0), x.std(dim=0, correction=0) + LEAST_DEVIATION
        x = self._standard(x)
        if len(x) >= x.shape[1]:
            self.eigenvalues, q = torch.linalg.eigh(x.T @ x)
            # X'Y without Y, which has a column for every class: targets are 2 at the class and -1 everywhere.
            sums = x.new_zeros(num_classes, x.shape[1]).index_add_(0, labels, x)
            self.left, self.right = q, q.T @ (2 * sums - x.sum(dim=0)).T
        else:
            self.eigenvalues, q = torch.linalg.eigh(x @ x.T)
            sums = x.new_zeros(num_classes, len(x)).index_add_(0, labels, q)
            self.left, self.right = x.T @ q, (2 * sums - q.sum(dim=0)).T

    def weights(self, penalty: float) -> Tensor:
        """(D + 1, K), for standardised features and the constant one."""
        return (self.left / (self.eigenvalues + penalty)) @ self.right

    def count_right(self, features: Tensor, labels: Tensor, penalties: Sequence[float]) -> np.ndarray:
        """How many of (M, D) features are given their label, int64 for each penalty."""
        found = np.zeros(len(penalties), np.int64)
        for start in range(0, len(features), ROWS):
            rows = slice(start, start + ROWS)
            on_axes = self._standard(features[rows].double()) @ self.left
            for place, penalty in enumerate(penalties):
                said = (on_axes / (self.eigenvalues + penalty) @ self.right).argmax(dim=1)
                found[place] += int((said == labels[rows]).sum())
        return found

    def _standard(self, x: Tensor) -> Tensor:
        return torch.nn.functional.pad((x - self.mean) / self.deviation, (0, 1), value=CONSTANT)


def sample_shots(labels: np.ndarray, num_classes: int, shots: int | None, seed: int | None) -> np.ndarray:
    """Which images to learn from, class by class: at most `shots` of each, or all.

    Without a seed they are the first of each class, as the paper's code has it; with one the first of a permutation, as
    big_vision has it, so that fewer shots are part of more.
    """
    rng = None if seed is None else np.random.default_rng(seed)
    members = (np.flatnonzero(labels == label) for label in range(num_classes))
    return np.concatenate([(own if rng is None else rng.permutation(own))[:shots] for own in members])


def best_mean_rank(accuracies: Mapping[str, np.ndarray]) -> int:
    """Which penalty serves several data sets: that of the best mean rank over them, each ranking its own accuracies.

    Of equal accuracies the stronger penalty ranks higher.
    """
    ranks = [np.argsort(np.argsort(found, kind="stable"), kind="stable") for found in accuracies.values()]
    return int(np.mean(ranks, axis=0).argmax())
