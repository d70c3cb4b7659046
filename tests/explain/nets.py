"""Small networks of every kind that explanations have to work for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vitrail.config import ModelConfig
from vitrail.model.vit import VisionTransformer

SMALL: dict[str, Any] = {
    "width": 24, "depth": 3, "mlp_dim": 40, "heads": 3, "patch": (4, 4), "image_size": (8, 12), "num_classes": 5
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "token": {},
    "mean": {"pool": "gap", "class_token": False},
    "mean beside a class token": {"pool": "gap"},
    "map": {"pool": "map", "class_token": False},
    "registers": {"registers": 2, "layer_scale": 0.3},
    "relative": {"positions": "relative"},
    "every layer": {"positions_at": "layers"},
    "axial": {"axial": True, "pool": "gap", "class_token": False},
    "hybrid": {"stem": {"blocks": (1,), "width": 32}, "patch": (1, 1)},
    "representation": {"representation": 16},
}


def random_net(seed: int = 0, **options: Any) -> VisionTransformer:
    """Weights that all matter."""
    net = VisionTransformer(ModelConfig(**{**SMALL, **options}))
    generator = torch.Generator().manual_seed(seed)
    for parameter in net.parameters():
        parameter.data.normal_(std=0.3, generator=generator)
    return net.eval().requires_grad_(False)


def noise(count: int = 2, size: tuple[int, int] = (8, 12)) -> Tensor:
    return torch.randn(count, 3, *size, generator=torch.Generator().manual_seed(1))
