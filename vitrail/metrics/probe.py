"""A linear probe: multinomial logistic regression on cached features, solved to the optimum.

The objective is mean cross-entropy + penalty / 2 * ||W||^2 on standardised features, bias unpenalised. Two changes of
variable make it quick and leave the solution where it is. A rotation onto the principal axes, which the L2 norm does
not see, also drops what lies outside the span of the data when there are more features than images. Dividing each
axis by the square root of its curvature then makes the problem nearly round, so L-BFGS needs tens of steps, not
hundreds.
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

HELD_OUT = 0.2
EXACT = 1e-6  # largest gradient at which to stop: probabilities are within about 1e-5 of the optimum's
ROUGH = 1e-4  # enough to compare penalties on held-out images


@dataclass(frozen=True, eq=False)
class Probe:
    """logits = features @ weight.T + bias, on the features as they were given."""

    weight: Tensor  # (K, D)
    bias: Tensor  # (K,)
    penalty: float
    tried: list[tuple[float, float]]  # (penalty, held-out accuracy); empty when there was nothing to choose or hold out
    unmeasured: int  # classes that these accuracies leave out: all their images are one group
    seconds: float

    def predict(self, features: Tensor) -> Tensor:
        """The classes (M,) of features (M, D)."""
        return (features @ self.weight.T + self.bias).argmax(dim=1)


@torch.inference_mode(False)  # features are often made in inference mode; the solver needs gradients
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
    """Fit on (N, D) features and (N,) labels. The penalty is the one with the best accuracy on a stratified 20 % of
    these features (the largest of equals, and the largest when nothing can be held out); then all are used. Images of
    equal `groups` stand on one side of that split. A class that is all one group is not measured by it."""
    began = time.perf_counter()
    _check(features, labels, num_classes, penalties)
    device = torch.device("cpu") if features.device.type == "mps" else features.device  # MPS has no float64
    x, y = features.detach().to(device, torch.float64, copy=True), labels.detach().to(device, torch.int64, copy=True)
    strongest_first = sorted(set(penalties), reverse=True)  # each solution is a good start for the next, weaker one
    penalty, start = strongest_first[0], None
    tried: list[tuple[float, float]] = []
    held_out, unmeasured = _hold_out(y, groups, seed)
    if len(strongest_first) > 1 and held_out.any():
        solver = _Solver(x[~held_out], y[~held_out], num_classes, iterations)
        for candidate in strongest_first:
            weight, bias = solver.solve(candidate, ROUGH)
            right = (x[held_out] @ weight.T + bias).argmax(dim=1) == y[held_out]
            accuracy = right.double().mean().item()
            if all(accuracy > other for _, other in tried):
                penalty, start = candidate, (weight, bias)
            tried.append((candidate, accuracy))
    solver = _Solver(x, y, num_classes, iterations)
    if start:
        solver.start(*start)
    weight, bias = solver.solve(penalty, EXACT)
    dtype = torch.promote_types(features.dtype, torch.float32)
    weight, bias = weight.to(features.device, dtype), bias.to(features.device, dtype)
    return Probe(weight, bias, penalty, tried, unmeasured if tried else 0, time.perf_counter() - began)


class _Solver:
    """The data on its principal axes; `solve` continues from the previous solution."""

    def __init__(self, x: Tensor, y: Tensor, num_classes: int, iterations: int) -> None:
        self.mean, std = x.mean(dim=0), x.std(dim=0, correction=0)
        constant = std <= 1e-12 * x.abs().amax(dim=0)  # rounding noise is not a feature
        self.scale = torch.where(constant, 0.0, 1 / torch.where(constant, 1.0, std))  # (D,)
        x = (x - self.mean) * self.scale
        self.basis: Tensor | None = None
        if x.shape[1] > x.shape[0]:  # more features than images: onto the span of the images
            self.basis, triangle = torch.linalg.qr(x.T)  # (D, N), (N, N)
            x = triangle.T
        variance, self.axes = torch.linalg.eigh(x.T @ x / len(x))  # (R,), (R, R)
        self.variance = variance.clamp(min=0.0)
        self.x, self.y = x @ self.axes, y  # (N, R)
        self.iterations = iterations
        self.weight = x.new_zeros(self.x.shape[1], num_classes)  # (R, K)
        self.bias = x.new_zeros(num_classes)

    def start(self, weight: Tensor, bias: Tensor) -> None:
        """Continue from a (K, D) weight and (K,) bias that were solved for other images."""
        standard = torch.where(self.scale > 0, weight / self.scale, 0.0).T  # (D, K)
        self.weight = self.axes.T @ (standard if self.basis is None else self.basis.T @ standard)
        self.bias = bias + weight @ self.mean

    def solve(self, penalty: float, tolerance: float) -> tuple[Tensor, Tensor]:
        """The optimal (K, D) weight and (K,) bias for features as given."""
        p = (self.x @ self.weight + self.bias).softmax(dim=1)
        curvature = (p * (1 - p)).mean()  # of the cross-entropy in a logit, at the point we start from
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
        return self._unfold()

    def _unfold(self) -> tuple[Tensor, Tensor]:
        weight = self.axes @ self.weight
        if self.basis is not None:
            weight = self.basis @ weight
        weight = (weight * self.scale[:, None]).T  # (K, D)
        return weight, self.bias - weight @ self.mean


def _hold_out(labels: Tensor, groups: np.ndarray | None, seed: int) -> tuple[Tensor, int]:
    """(N,) mask of a fifth of each class; and how many classes with two images or more have none in it."""
    own = labels.cpu().numpy()
    mask = stratified_group_mask(np.arange(len(own)) if groups is None else groups, own, HELD_OUT, seed)
    names, sizes = np.unique(own, return_counts=True)
    unmeasured = int((~np.isin(names[sizes > 1], own[mask])).sum())
    return torch.from_numpy(mask).to(labels.device), unmeasured


def _check(features: Tensor, labels: Tensor, num_classes: int, penalties: Sequence[float]) -> None:
    if features.ndim != 2 or labels.shape != features.shape[:1]:
        raise ValueError(f"features are {tuple(features.shape)} and labels {tuple(labels.shape)}, not (N, D) and (N,)")
    if len(features) == 0:
        raise UserError("a linear probe needs at least one image")
    if not features.isfinite().all():
        raise UserError("some features are not finite numbers; the weights or the images they come from are broken")
    if labels.min() < 0 or labels.max() >= num_classes:
        raise UserError(f"labels run from {labels.min()} to {labels.max()} but there are {num_classes} classes")
    if not penalties or min(penalties) <= 0:
        raise UserError("the probe needs at least one penalty, and each must be above 0")
