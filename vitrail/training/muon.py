"""Muon: momentum made orthogonal, for the matrices inside a Transformer; AdamW for all other parameters.

The maths is that of torch.optim.Muon. But matrices of one shape are stacked and made orthogonal together, in a few
large products where torch's loop launches dozens of small ones for every matrix.
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

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic that takes singular values from (0, 1] to about 0.7 to 1.2
ITERATIONS = 5
SMALLEST_NORM = 1e-7
ADAMW_RMS = 0.2  # the usual size of an entry of AdamW's update: Muon's is scaled to it, and one rate serves both


@dataclass(frozen=True)
class _Matrix:
    """Views (rows, columns) of one matrix, or of one of those that are stored as one."""

    group: dict[str, Any]
    parameter: Tensor
    gradient: Tensor
    momentum: Tensor

    def kind(self) -> tuple[object, ...]:
        """Matrices that share this are updated together."""
        here = self.parameter
        return here.shape, here.dtype, here.device, self.group["momentum"], self.group["nesterov"]


class Muon(torch.optim.Optimizer):
    """Groups with `muon = True` hold matrices; `parts` says how many are stacked in each (3 in a fused qkv).

    As with torch's fused optimizers, a step changes nothing where the attribute `found_inf`, a scalar there, is 1.
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
        shared = {"lr": lr, "weight_decay": weight_decay, "muon": False, "parts": 1, "fused": True}
        super().__init__(params, {**shared, "momentum": momentum, "nesterov": nesterov, "betas": betas, "eps": eps})
        for group in self.param_groups:
            for parameter in group["params"]:
                # Only a tensor that is divided among processes has placements; its class takes long to import.
                if hasattr(parameter, "placements"):
                    raise UserError("optimizer.name=muon needs whole matrices: use train.parallel=ddp")
                if group["muon"] and (parameter.ndim != 2 or len(parameter) % group["parts"]):
                    shape = tuple(parameter.shape)
                    raise ValueError(f"a parameter of shape {shape} is not {group['parts']} matrices")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        alike: dict[tuple[object, ...], list[_Matrix]] = defaultdict(list)
        for group in self.param_groups:
            if group["muon"]:
                for matrix in self._matrices(group):
                    alike[matrix.kind()].append(matrix)
            else:
                self._step_adamw(group, found_inf)
        for matrices in alike.values():
            _step_together(matrices, found_inf)
        return loss

    def _matrices(self, group: dict[str, Any]) -> Iterable[_Matrix]:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            shape = (group["parts"], -1, parameter.shape[1])
            stored = (parameter.view(shape), parameter.grad.reshape(shape), state["momentum_buffer"].view(shape))
            for views in zip(*stored, strict=True):
                yield _Matrix(group, *views)

    def _step_adamw(self, group: dict[str, Any], found_inf: Tensor | None) -> None:
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        states = [self.state[parameter] for parameter in parameters]
        for parameter, state in zip(parameters, states, strict=True):
            if not state:
                state["step"] = torch.zeros((), device=parameter.device)  # float32, as torch's kernel wants it
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


def _step_together(matrices: list[_Matrix], found_inf: Tensor | None) -> None:
    """Update matrices of one shape; nothing here waits for the device."""
    first = matrices[0]
    share = first.group["momentum"]
    gradient = torch.stack([matrix.gradient for matrix in matrices])  # (n, rows, columns)
    momentum = torch.stack([matrix.momentum for matrix in matrices])
    if found_inf is not None:  # a mean of the momentum with itself leaves it as it is
        gradient = torch.where(found_inf == 0, gradient, momentum)
    momentum.lerp_(gradient, 1 - share)
    torch._foreach_copy_([matrix.momentum for matrix in matrices], momentum.unbind())
    direction = gradient.lerp_(momentum, share) if first.group["nesterov"] else momentum
    update = orthogonal(direction).to(first.parameter.dtype)
    if found_inf is not None:
        update = torch.where(found_inf == 0, update, 0)
    updates = iter(update.unbind())
    for _, members in groupby(matrices, key=lambda matrix: id(matrix.group)):
        _apply([(matrix, next(updates)) for matrix in members], found_inf)


def _apply(updates: list[tuple[_Matrix, Tensor]], found_inf: Tensor | None) -> None:
    """Decay and move the matrices of one group."""
    matrix, update = updates[0]
    lr, decay = matrix.group["lr"], matrix.group["weight_decay"]
    if isinstance(lr, Tensor):  # in the precision that the host computes with, or the last bits would be others
        lr = lr.double()
    scale = ADAMW_RMS * max(update.shape) ** 0.5  # an orthogonal matrix has entries of 1 / sqrt(longer side)
    shrink, rate = 1 - lr * decay, -lr * scale
    if found_inf is not None:
        shrink = torch.where(found_inf == 0, shrink, 1.0)
    shrink, rate = (value.float() if isinstance(value, Tensor) else value for value in (shrink, rate))
    parameters = [matrix.parameter for matrix, _ in updates]
    if decay:
        torch._foreach_mul_(parameters, shrink)
    torch._foreach_add_(parameters, torch._foreach_mul([update for _, update in updates], rate))


def orthogonal(matrices: Tensor) -> Tensor:
    """(n, rows, columns) -> the same with singular values near 1, by five Newton-Schulz iterations for all at once."""
    a, b, c = COEFFICIENTS
    x = matrices.to(number_format(matrices.device))
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x  # the products below are then of the shorter side
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=SMALLEST_NORM)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


@functools.cache
def number_format(device: torch.device) -> torch.dtype:
    """bfloat16 is all the iteration needs, where a GPU has it. A CPU may list its instructions and then die of them."""
    if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.bfloat16
    return torch.float32
