"""Muon (momentum with orthogonalised updates) for the matrices of Transformer blocks, AdamW for all other parameters.

The maths is that of torch.optim.Muon. It is faster: matrices of the same shape are orthogonalised in one batch, with
few large products, where torch launches dozens of small ones for each matrix.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from vitrail.errors import UserError

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of a quintic that maps singular values in (0, 1] to about 0.7 to 1.2
ITERATIONS = 5
MIN_NORM = 1e-7
ADAMW_RMS = 0.2  # typical RMS of AdamW's update; Muon's is scaled to it, so that both can share a learning rate


@dataclass(frozen=True)
class _Matrix:
    """Views (rows, columns) of one matrix of a parameter, its gradient and momentum."""

    group: dict[str, Any]
    parameter: Tensor
    gradient: Tensor
    momentum: Tensor

    def batch_key(self) -> tuple[object, ...]:
        """Matrices with the same key are updated in one batch."""
        weight = self.parameter
        return weight.shape, weight.dtype, weight.device, self.group["momentum"], self.group["nesterov"]


class Muon(torch.optim.Optimizer):
    """Muon for parameter groups with `muon = True`, AdamW for the others.

    A Muon group has `num_matrices`, the number of matrices stacked in each parameter (3 for a fused qkv). As in torch's
    fused optimizers, a step changes nothing if the attribute `found_inf`, a scalar on the device, is 1.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float,
        *,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        nesterov: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ):
        shared = {"lr": lr, "weight_decay": weight_decay, "muon": False, "num_matrices": 1, "fused": True}
        super().__init__(params, {**shared, "momentum": momentum, "nesterov": nesterov, "betas": betas, "eps": eps})
        for group in self.param_groups:
            for parameter in group["params"]:
                # Only sharded tensors (DTensor, which is slow to import) have placements.
                if hasattr(parameter, "placements"):
                    raise UserError("optimizer.name=muon cannot train sharded weights: use train.parallel=ddp")
                if group["muon"] and (parameter.ndim != 2 or len(parameter) % group["num_matrices"]):
                    shape = tuple(parameter.shape)
                    raise ValueError(f"a parameter of shape {shape} cannot hold {group['num_matrices']} matrices")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        batches: dict[tuple[object, ...], list[_Matrix]] = defaultdict(list)
        for group in self.param_groups:
            if group["muon"]:
                for matrix in self._matrices(group):
                    batches[matrix.batch_key()].append(matrix)
            else:
                self._step_adamw(group, found_inf)
        for matrices in batches.values():
            _step_batch(matrices, found_inf)
        return loss

    def _matrices(self, group: dict[str, Any]) -> Iterable[_Matrix]:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            shape = (group["num_matrices"], -1, parameter.shape[1])
            stored = (parameter.view(shape), parameter.grad.reshape(shape), state["momentum_buffer"].view(shape))
            for views in zip(*stored, strict=True):
                yield _Matrix(group, *views)

    def _step_adamw(self, group: dict[str, Any], found_inf: Tensor | None) -> None:
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        states = [self.state[parameter] for parameter in parameters]
        for parameter, state in zip(parameters, states, strict=True):
            if not state:
                state["step"] = torch.zeros((), device=parameter.device)  # float32, as torch's kernel needs
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        adamw(
            parameters,
            [parameter.grad for parameter in parameters],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            found_inf=found_inf,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def _step_batch(matrices: list[_Matrix], found_inf: Tensor | None) -> None:
    """Update matrices of the same shape, without waiting for the device."""
    first = matrices[0]
    beta = first.group["momentum"]
    gradient = torch.stack([matrix.gradient for matrix in matrices])  # (n, rows, columns)
    momentum = torch.stack([matrix.momentum for matrix in matrices])
    if found_inf is not None:  # interpolating the momentum with itself does not change it
        gradient = torch.where(found_inf == 0, gradient, momentum)
    momentum.lerp_(gradient, 1 - beta)
    torch._foreach_copy_([matrix.momentum for matrix in matrices], momentum.unbind())
    direction = gradient.lerp_(momentum, beta) if first.group["nesterov"] else momentum
    update = orthogonalize(direction).to(first.parameter.dtype)
    if found_inf is not None:
        update = torch.where(found_inf == 0, update, 0)
    updates = iter(update.unbind())
    for _, members in groupby(matrices, key=lambda matrix: id(matrix.group)):
        _apply([(matrix, next(updates)) for matrix in members], found_inf)


def _apply(updates: list[tuple[_Matrix, Tensor]], found_inf: Tensor | None) -> None:
    """Apply weight decay and the updates to the matrices of one group."""
    matrix, update = updates[0]
    lr, decay = matrix.group["lr"], matrix.group["weight_decay"]
    if isinstance(lr, Tensor):  # float64 as on the host, for the same bits
        lr = lr.double()
    scale = ADAMW_RMS * max(update.shape) ** 0.5  # the entries of an orthogonal matrix have RMS 1 / sqrt(longer side)
    shrink, rate = 1 - lr * decay, -lr * scale
    if found_inf is not None:
        shrink = torch.where(found_inf == 0, shrink, 1.0)
    shrink, rate = (value.float() if isinstance(value, Tensor) else value for value in (shrink, rate))
    parameters = [matrix.parameter for matrix, _ in updates]
    if decay:
        torch._foreach_mul_(parameters, shrink)
    torch._foreach_add_(parameters, torch._foreach_mul([update for _, update in updates], rate))


def orthogonalize(matrices: Tensor) -> Tensor:
    """Move the singular values of (n, rows, columns) matrices close to 1, by five Newton-Schulz iterations."""
    a, b, c = COEFFICIENTS
    x = matrices.to(newton_schulz_dtype(matrices.device))
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x  # so that the products below have the size of the shorter side
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=MIN_NORM)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


@functools.cache
def newton_schulz_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 on GPUs that support it: the iteration needs no more. float32 on CPUs, where bfloat16 instructions may
    be listed and still crash."""
    if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.bfloat16
    return torch.float32
