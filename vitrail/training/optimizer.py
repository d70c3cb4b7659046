"""Optimizers (AdamW, SGD, Muon), their parameter groups, and frozen parameters."""

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

MATRIX_SUFFIXES = ("weight", "lora_a", "lora_b")  # names of matrices; position embeddings and tokens are not


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Build AdamW (decoupled weight decay, as the paper's Adam in Flax), SGD with momentum, or Muon.

    SGD adds weight decay to the gradient, so momentum includes it, as in torch and in the training of BiT's ResNets.
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
    """torch's fused SGD with support for skipped steps and sharded parameters.

    torch.optim.SGD leaves the momentum buffer uninitialised if its first step is skipped, and its fused kernel rejects
    sharded tensors. Here momentum starts at zero, and the kernel gets the local shards.
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


class _GroupKey(NamedTuple):
    """Parameters with the same key are in the same group. Groups are sorted by it."""

    no_weight_decay: bool
    muon_matrices: int  # matrices stacked in the parameter; 0 if Muon does not train it
    lr_scale: float


def parameter_groups(model: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """Group the trainable parameters by weight decay, learning-rate scale and, for Muon, number of stacked matrices.

    The paper decays all parameters. With `weight_decay_params = "matrices"`, biases, norms, position embeddings and the
    class token are not decayed.
    """
    if config.name == "sgd" and config.weight_decay_scale == "schedule":
        raise UserError(
            "optimizer.weight_decay_scale=schedule is for adamw and muon: "
            "with sgd use --set optimizer.weight_decay_scale=lr"
        )
    depths = param_depths(model)
    last = len(transformer_blocks(model)) + 1
    if config.layer_decay != 1 and not depths:
        raise UserError(
            f"optimizer.layer_decay={config.layer_decay:g} needs a network with Transformer blocks: "
            "use --set optimizer.layer_decay=1"
        )
    matrices = hidden_matrices(model) if config.name == "muon" else {}
    groups: dict[_GroupKey, list[nn.Parameter]] = defaultdict(list)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_matrix = name.endswith(MATRIX_SUFFIXES) and parameter.ndim > 1
            no_weight_decay = config.weight_decay_params == "matrices" and not is_matrix
            lr_scale = config.layer_decay ** (last - depths.get(name, last))
            groups[_GroupKey(no_weight_decay, matrices.get(name, 0), lr_scale)].append(parameter)
    if not groups:
        raise UserError("no parameter is left to train, all are frozen: lower optimizer.freeze")
    if config.name == "muon" and not any(key.muon_matrices for key in groups):
        raise UserError(
            "optimizer.name=muon trains the matrices of Transformer blocks, and none is trainable: "
            "use --set optimizer.name=adamw"
        )
    return [_make_group(key, groups[key], config) for key in sorted(groups)]


def _make_group(key: _GroupKey, parameters: list[nn.Parameter], config: OptimizerConfig) -> dict[str, Any]:
    lr = config.lr * key.lr_scale
    decay = 0.0 if key.no_weight_decay else config.weight_decay
    if config.weight_decay_scale == "schedule":
        decay /= lr  # torch multiplies it by the learning rate of the step, which leaves the factor of the schedule
    group = {"params": parameters, "lr": lr, "lr_scale": key.lr_scale, "weight_decay": decay}
    if config.name == "muon":
        group |= {"muon": key.muon_matrices > 0, "num_matrices": key.muon_matrices or 1}
    return group


def freeze(model: nn.Module, blocks: int | str) -> None:
    """Freeze the first `blocks` blocks and everything before them; 0 freezes nothing, "backbone" all but the head."""
    if blocks == "backbone":
        frozen = [p for name, p in model.named_parameters() if "head" not in name.split(".")]
    else:
        depths, count = param_depths(model), len(transformer_blocks(model))
        if not isinstance(blocks, int) or not 0 <= blocks <= count:
            allowed = f"a number of blocks from 0 to {count}" if count else "0, since this network has no blocks"
            raise UserError(f"optimizer.freeze must be 'backbone' or {allowed}, not {blocks}")
        frozen = [p for name, p in model.named_parameters() if blocks and depths[name] <= blocks]
    for parameter in frozen:
        parameter.requires_grad_(False)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of a step, times the `lr_scale` of each group."""
    for group in optimizer.param_groups:
        rate = float(np.float32(lr * group.get("lr_scale", 1.0)))  # as a CUDA graph reads it
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def learning_rates_to_device(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Make the learning rates tensors on the device, so that a CUDA graph reads the current values."""
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(float(group["lr"]), device=device)
        group["capturable"] = True


def step_if_finite(optimizer: torch.optim.Optimizer, finite: Tensor) -> None:
    """Do an optimizer step, or change nothing (weights, moments, step count) if `finite` is False.

    `finite` is a bool scalar on the device. The host does not wait for it: fused kernels read it as `found_inf`.
    """
    optimizer.found_inf = finite.logical_not().float().reshape(())  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        del optimizer.found_inf  # type: ignore[attr-defined]
