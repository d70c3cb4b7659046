"""Linear probe: multinomial logistic regression on cached features, solved to the optimum.

The objective is mean cross-entropy + penalty / 2 * ||W||^2 on standardised features, bias unpenalised. Two changes of
variables speed up L-BFGS without changing the solution: a rotation onto the principal axes (also a projection onto the
span of the data when there are more features than images), and scaling of each axis by its curvature
(preconditioning).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.errors import UserError
from vitrail.metrics.group_split import stratified_group_mask

VAL_FRACTION = 0.2
TOLERANCE = 1e-6  # largest gradient at which to stop: probabilities are within about 1e-5 of the optimum's
ROUGH_TOLERANCE = 1e-4  # enough to compare penalties on validation images


@dataclass(frozen=True, eq=False)
class Probe:
    """A fitted linear classifier: logits = features @ weight.T + bias, on features that are not standardised."""

    weight: Tensor  # (K, D)
    bias: Tensor  # (K,)
    penalty: float
    tried: list[tuple[float, float]]  # (penalty, validation accuracy); empty if there was nothing to choose or hold out
    unmeasured: int  # classes without validation images, because all their images are one group
    seconds: float

    def predict(self, features: Tensor) -> Tensor:
        """Predict the classes (M,) of features (M, D)."""
        return (features @ self.weight.T + self.bias).argmax(dim=1)


@torch.inference_mode(False)  # features are often computed in inference mode; the solver needs gradients
def fit_probe(
    features: Tensor,
    labels: Tensor,
    num_classes: int,
    *,
    penalties: Sequence[float],
    iterations: int,
    seed: int = 0,
    groups: np.ndarray | None = None,
) -> Probe:
    """Fit a probe on (N, D) features and (N,) labels.

    Chooses the penalty with the best accuracy on a stratified validation split of 20 %, then fits on all images. Of
    equal accuracies, or if nothing can be held out, the largest penalty wins. Images with equal `groups` are on one
    side of the split; a class that is a single group has no validation images.
    """
    start_time = time.perf_counter()
    _validate(features, labels, num_classes, penalties)
    device = torch.device("cpu") if features.device.type == "mps" else features.device  # MPS has no float64
    x, y = features.detach().to(device, torch.float64, copy=True), labels.detach().to(device, torch.int64, copy=True)
    strongest_first = sorted(set(penalties), reverse=True)  # each solution is a warm start for the next penalty
    penalty, start = strongest_first[0], None
    tried: list[tuple[float, float]] = []
    val, unmeasured = _val_mask(y, groups, seed)
    if len(strongest_first) > 1 and val.any():
        solver = _Solver(x[~val], y[~val], num_classes, iterations)
        for candidate in strongest_first:
            weight, bias = solver.solve(candidate, ROUGH_TOLERANCE)
            correct = (x[val] @ weight.T + bias).argmax(dim=1) == y[val]
            accuracy = correct.double().mean().item()
            if all(accuracy > earlier for _, earlier in tried):
                penalty, start = candidate, (weight, bias)
            tried.append((candidate, accuracy))
    solver = _Solver(x, y, num_classes, iterations)
    if start:
        solver.start(*start)
    weight, bias = solver.solve(penalty, TOLERANCE)
    dtype = torch.promote_types(features.dtype, torch.float32)
    weight, bias = weight.to(features.device, dtype), bias.to(features.device, dtype)
    return Probe(weight, bias, penalty, tried, unmeasured if tried else 0, time.perf_counter() - start_time)


class _Solver:
    """L-BFGS on the principal axes of the data; `solve` starts from the previous solution."""

    def __init__(self, x: Tensor, y: Tensor, num_classes: int, iterations: int) -> None:
        self.mean, std = x.mean(dim=0), x.std(dim=0, correction=0)
        constant = std <= 1e-12 * x.abs().amax(dim=0)  # rounding noise is not a feature
        self.scale = torch.where(constant, 0.0, 1 / torch.where(constant, 1.0, std))  # (D,)
        x = (x - self.mean) * self.scale
        self.basis: Tensor | None = None
        if x.shape[1] > x.shape[0]:  # more features than images: project onto their span
            self.basis, r = torch.linalg.qr(x.T)  # (D, N), (N, N)
            x = r.T
        variance, self.axes = torch.linalg.eigh(x.T @ x / len(x))  # (R,), (R, R)
        self.variance = variance.clamp(min=0.0)
        self.x, self.y = x @ self.axes, y  # (N, R)
        self.iterations = iterations
        self.weight = x.new_zeros(self.x.shape[1], num_classes)  # (R, K)
        self.bias = x.new_zeros(num_classes)

    def start(self, weight: Tensor, bias: Tensor) -> None:
        """Start from a (K, D) weight and (K,) bias that were fitted on other images."""
        standard = torch.where(self.scale > 0, weight / self.scale, 0.0).T  # (D, K)
        self.weight = self.axes.T @ (standard if self.basis is None else self.basis.T @ standard)
        self.bias = bias + weight @ self.mean

    def solve(self, penalty: float, tolerance: float) -> tuple[Tensor, Tensor]:
        """Return the optimal (K, D) weight and (K,) bias for features that are not standardised."""
        p = (self.x @ self.weight + self.bias).softmax(dim=1)
        curvature = (p * (1 - p)).mean()  # of the cross-entropy per logit, at the starting point
        scale = (curvature * self.variance + penalty).rsqrt()[:, None]  # (R, 1)
        bias_scale = (curvature + penalty).rsqrt()
        x = self.x * scale.T
        weight = (self.weight / scale).requires_grad_()
        bias = (self.bias / bias_scale).requires_grad_()
        optimizer = torch.optim.LBFGS(
            [weight, bias],
            max_iter=self.iterations,
            max_eval=4 * self.iterations,
            history_size=20,
            tolerance_grad=tolerance,
            tolerance_change=0.0,
            line_search_fn="strong_wolfe",
        )

        def closure() -> Tensor:
            optimizer.zero_grad()
            ridge = penalty / 2 * (weight * scale).square().sum()
            loss = F.cross_entropy(x @ weight + bias * bias_scale, self.y) + ridge
            loss.backward()
            return loss

        with torch.enable_grad():
            optimizer.step(closure)
        self.weight, self.bias = (weight * scale).detach(), (bias * bias_scale).detach()
        return self._to_features()

    def _to_features(self) -> tuple[Tensor, Tensor]:
        """The solution for features that are neither rotated nor standardised."""
        weight = self.axes @ self.weight
        if self.basis is not None:
            weight = self.basis @ weight
        weight = (weight * self.scale[:, None]).T  # (K, D)
        return weight, self.bias - weight @ self.mean


def _val_mask(labels: Tensor, groups: np.ndarray | None, seed: int) -> tuple[Tensor, int]:
    """(N,) mask of the validation images, and the number of classes of two or more images that have none."""
    y = labels.cpu().numpy()
    mask = stratified_group_mask(np.arange(len(y)) if groups is None else groups, y, VAL_FRACTION, seed)
    classes, sizes = np.unique(y, return_counts=True)
    unmeasured = int((~np.isin(classes[sizes > 1], y[mask])).sum())
    return torch.from_numpy(mask).to(labels.device), unmeasured


def _validate(features: Tensor, labels: Tensor, num_classes: int, penalties: Sequence[float]) -> None:
    if features.ndim != 2 or labels.shape != features.shape[:1]:
        raise ValueError(f"features are {tuple(features.shape)} and labels {tuple(labels.shape)}, not (N, D) and (N,)")
    if len(features) == 0:
        raise UserError("a linear probe needs at least one image")
    if not features.isfinite().all():
        raise UserError("some features are NaN or infinite; check the weights and the images")
    if labels.min() < 0 or labels.max() >= num_classes:
        raise UserError(f"labels run from {labels.min()} to {labels.max()}, but there are {num_classes} classes")
    if not penalties or min(penalties) <= 0:
        raise UserError(f"probe.penalties needs at least one value, all above 0, not {list(penalties)}")
