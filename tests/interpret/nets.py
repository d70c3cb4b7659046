"""Small networks of every kind that explanations must support, and networks with known maps."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vitrail.config import ModelConfig
from vitrail.models.vit import VisionTransformer

SMALL: dict[str, Any] = {
    "width": 24, "depth": 3, "mlp_dim": 40, "heads": 3, "patch": (4, 4), "image_size": (8, 12), "num_classes": 5
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "token": {},
    "mean": {"pool": "gap", "class_token": False},
    "mean with class token": {"pool": "gap"},
    "map": {"pool": "map", "class_token": False},
    "registers": {"registers": 2, "layer_scale": 0.3},
    "relative": {"positions": "relative"},
    "every layer": {"positions_at": "layers"},
    "axial": {"axial": True, "pool": "gap", "class_token": False},
    "hybrid": {"stem": {"blocks": (1,), "width": 32}, "patch": (1, 1)},
    "representation": {"representation": 16},
}


def random_net(seed: int = 0, **options: Any) -> VisionTransformer:
    """A network with random weights, none of them zero."""
    net = VisionTransformer(ModelConfig(**{**SMALL, **options}))
    generator = torch.Generator().manual_seed(seed)
    for parameter in net.parameters():
        parameter.data.normal_(std=0.3, generator=generator)
    return net.eval().requires_grad_(False)


def noise(count: int = 2, size: tuple[int, int] = (8, 12)) -> Tensor:
    return torch.randn(count, 3, *size, generator=torch.Generator().manual_seed(1))


def brightness_net() -> VisionTransformer:
    """Two classes: the second logit is the mean pixel, the first is 0. Every patch contributes its own brightness."""
    shape: dict[str, Any] = {"width": 2, "depth": 1, "mlp_dim": 2, "heads": 1, "patch": (2, 2), "channels": 1}
    net = VisionTransformer(ModelConfig(**shape, image_size=(8, 8), num_classes=2, pool="gap", class_token=False))
    for parameter in net.parameters():
        parameter.data.zero_()
    net.norm = nn.Identity()
    net.patch_embed.proj.weight.data[0] = 1 / 4
    net.head.weight.data[1, 0] = 1
    return net.eval()


def attending_net() -> VisionTransformer:
    """The class token attends to bright patches, and their brightness is the second logit."""
    shape: dict[str, Any] = {"width": 2, "depth": 1, "mlp_dim": 2, "heads": 1, "patch": (2, 2), "channels": 1}
    net = VisionTransformer(ModelConfig(**shape, image_size=(8, 8), num_classes=2))
    for parameter in net.parameters():
        parameter.data.zero_()
    block = net.blocks[0]
    block.norm1 = block.norm2 = net.norm = nn.Identity()
    net.cls_token.data[..., 0] = 1
    net.patch_embed.proj.weight.data[1] = 1 / 4  # a patch of brightness p is (0, p)
    query, key, value = [[1.0, 0.0], [0.0, 0.0]], [[0.0, 4.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 1.0]]
    block.attn.qkv.weight.data = torch.tensor([*query, *key, *value])
    block.attn.proj.weight.data = torch.eye(2)
    net.head.weight.data[1, 1] = 1
    return net.eval()


def dark_and_bright(count: int = 16) -> Tensor:
    half = torch.full((count, 1, 8, 8), -0.2), torch.full((count, 1, 8, 8), 1.0)
    return torch.cat(half) + 0.02 * torch.rand(2 * count, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def patches_of(pixels: Tensor, net: VisionTransformer) -> np.ndarray:
    """The mean of each patch, (B, h*w)."""
    (rows, columns), (height, width) = net.config.grid, net.config.cell
    return pixels[:, 0].reshape(-1, rows, height, columns, width).mean((2, 4)).flatten(1).numpy()
