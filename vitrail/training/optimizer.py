"""The optimizers of the paper, in torch's implementations."""

from __future__ import annotations

import torch
from torch import nn

from vitrail.config import OptimizerConfig


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW as the paper's flax Adam (decay times the learning rate), or SGD with plain momentum."""
    groups = parameter_groups(model, config)
    if config.name == "adamw":
        return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
    return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, fused=True)


def parameter_groups(model: nn.Module, config: OptimizerConfig) -> list[dict[str, object]]:
    """The paper decays every parameter; `decay = "matrices"` leaves out biases, norms, positions and class token."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if config.decay == "all":
        return [{"params": [p for _, p in trained], "weight_decay": config.weight_decay}]
    matrices = [p for name, p in trained if name.endswith("weight") and p.ndim > 1]
    others = [p for name, p in trained if not (name.endswith("weight") and p.ndim > 1)]
    return [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
