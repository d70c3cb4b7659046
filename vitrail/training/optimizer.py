"""The optimizers of the paper in torch's implementations, and Muon; what is trained, and how fast each part of it."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.sgd import sgd

from vitrail.config import OptimizerConfig
from vitrail.errors import UserError
from vitrail.training.blocks import hidden_matrices, param_depths, transformer_blocks
from vitrail.training.muon import Muon
from vitrail.training.parallel import local_shard

MATRICES = ("weight", "lora_a", "lora_b")  # how names of matrices end; tables of positions and tokens are none


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW as the paper's flax Adam (decay times the learning rate), SGD with plain momentum, or Muon.

    SGD adds its decay to the gradient, as torch and the ResNets of the time have it, so that momentum gathers it too.
    """
    groups = parameter_groups(model, config)
    if config.name == "adamw":
        return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
    if config.name == "muon":
        momentum = 0.95 if config.momentum is None else config.momentum
        return Muon(groups, config.lr, momentum=momentum, betas=config.betas, eps=config.eps)
    momentum = 0.9 if config.momentum is None else config.momentum
    return SGD(groups, lr=config.lr, momentum=momentum, fused=True)


class SGD(torch.optim.SGD):
    """Torch's fused SGD, for steps that may be left out and parameters that are divided among processes.

    Torch's own takes whatever is in memory for a first momentum, which a step that is left out would keep, and its
    kernel knows no divided tensors; here momentum starts at zero and the kernel sees the part of this process.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            momenta: list[Tensor | None] = []
            for parameter in parameters if group["momentum"] else ():
                state = self.state[parameter]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                momenta.append(local_shard(state["momentum_buffer"]))
            sgd(
                [local_shard(parameter) for parameter in parameters],
                [local_shard(parameter.grad) for parameter in parameters],
                momenta,
                fused=True,
                found_inf=getattr(self, "found_inf", None),
                weight_decay=group["weight_decay"],
                momentum=group["momentum"],
                lr=group["lr"],
                dampening=0.0,
                nesterov=False,
                maximize=False,
            )


class _Kind(NamedTuple):
    """What parameters of one group share, in the order of groups."""

    spared: bool  # from weight decay
    parts: int  # matrices that Muon finds in one parameter; 0: not Muon's
    scale: float  # of the learning rate


def parameter_groups(model: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """Trained parameters by weight decay, scale of the learning rate and, for Muon, kind of matrix.

    The paper decays every parameter; `weight_decay_params = "matrices"` skips biases, norms, position embeddings
    and the class token.
    """
    if config.name == "sgd" and config.weight_decay_scale == "schedule":
        raise UserError(
            "optimizer.weight_decay_scale=schedule is for adamw and muon: use --set optimizer.weight_decay_scale=lr"
        )
    depths = param_depths(model)
    last = len(transformer_blocks(model)) + 1
    if config.layer_decay != 1 and not depths:
        raise UserError("this network has no Transformer blocks to slow down: use --set optimizer.layer_decay=1")
    matrices = hidden_matrices(model) if config.name == "muon" else {}
    kinds: dict[_Kind, list[nn.Parameter]] = defaultdict(list)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            spared = config.weight_decay_params == "matrices" and not (name.endswith(MATRICES) and parameter.ndim > 1)
            scale = config.layer_decay ** (last - depths.get(name, last))
            kinds[_Kind(spared, matrices.get(name, 0), scale)].append(parameter)
    if not kinds:
        raise UserError("nothing is left to train: every parameter is frozen; use a smaller optimizer.freeze")
    if config.name == "muon" and not any(kind.parts for kind in kinds):
        raise UserError("no matrix of a Transformer block is trained here: use --set optimizer.name=adamw")
    return [_group(kind, kinds[kind], config) for kind in sorted(kinds)]


def _group(kind: _Kind, parameters: list[nn.Parameter], config: OptimizerConfig) -> dict[str, Any]:
    lr = config.lr * kind.scale
    decay = 0.0 if kind.spared else config.weight_decay
    if config.weight_decay_scale == "schedule":
        decay /= lr  # torch multiplies by the rate of the step: what remains is the schedule's share
    group = {"params": parameters, "lr": lr, "lr_scale": kind.scale, "weight_decay": decay}
    return group if config.name != "muon" else {**group, "muon": kind.parts > 0, "parts": kind.parts or 1}


def freeze(model: nn.Module, what: int | str) -> None:
    """Stop training the first blocks and all before them, or ("backbone") everything but the head; 0: nothing."""
    if what == "backbone":
        frozen = [p for name, p in model.named_parameters() if "head" not in name.split(".")]
    else:
        depths, count = param_depths(model), len(transformer_blocks(model))
        if not isinstance(what, int) or not 0 <= what <= count:
            blocks = f" or a number of blocks from 0 to {count}" if count else ", since a ResNet has no blocks"
            raise UserError(f"optimizer.freeze is 'backbone'{blocks}; not {what}")
        frozen = [p for name, p in model.named_parameters() if what and depths[name] <= what]
    for parameter in frozen:
        parameter.requires_grad_(False)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """The rate of a step; each group takes its own share of it."""
    for group in optimizer.param_groups:
        rate = float(np.float32(lr * group.get("lr_scale", 1.0)))  # the number that a CUDA graph reads, too
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def learning_rates_to_device(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Keep learning rates where a CUDA graph reads them: one that is recorded with numbers would keep those."""
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(float(group["lr"]), device=device)
        group["capturable"] = True


def step_if_finite(optimizer: torch.optim.Optimizer, finite: Tensor) -> None:
    """A step that changes nothing - weights, moments, count of steps - where `finite`, a bool scalar on the device, is
    false. The host does not wait to see it: the kernels themselves look at `found_inf`."""
    optimizer.found_inf = finite.logical_not().float().reshape(())  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        del optimizer.found_inf  # type: ignore[attr-defined]
