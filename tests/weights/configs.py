"""Small networks of every kind, for properties that hold for all of them."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from vitrail.config import ModelConfig, NetworkConfig, Preprocess, ResNetConfig, StemConfig
from vitrail.models.build import build_model
from vitrail.weights.bundle import Card

SMALL: dict[str, Any] = {
    "width": 48, "depth": 2, "mlp_dim": 96, "heads": 3, "patch": (8, 8), "image_size": (32, 32), "num_classes": 5
}  # fmt: skip
PATHS = {"vitrail": "{}.safetensors", "google": "{}.npz", "timm": "{}", "huggingface": "{}"}  # file or folder


def card_of(model: NetworkConfig, **options: Any) -> Card:
    channels = (0.5,) * model.channels
    preprocess = Preprocess(size=model.image_size, mean=channels, std=channels)
    return Card(**{"model": model, "preprocess": preprocess, "created_with": "a test", **options})


def random_state(model: NetworkConfig, seed: int = 0) -> dict[str, Tensor]:
    """Random weights in all tensors, so that a swapped or missing tensor changes the outputs."""
    generator = torch.Generator().manual_seed(seed)
    state = build_model(model).state_dict()
    for name, tensor in state.items():
        fan_in = tensor[0].numel() if tensor.ndim in (2, 4) else 25
        tensor.normal_(std=fan_in**-0.5, generator=generator)
        if ("norm" in name and name.endswith("weight")) or name.endswith("gain"):
            tensor += 1
    return state


@torch.inference_mode()
def outputs(model: NetworkConfig, state: dict[str, Tensor], pixels: Tensor) -> Tensor:
    net = build_model(model).eval()
    net.load_state_dict(state)
    return net(pixels)


def pixels_for(model: NetworkConfig) -> Tensor:
    return torch.randn(2, model.channels, *model.image_size, generator=torch.Generator().manual_seed(1))


@st.composite
def vits(draw: st.DrawFn, **fixed: Any) -> ModelConfig:
    """Small Vision Transformers with random options, except those in `fixed`."""
    heads = draw(st.integers(1, 3))
    pool = fixed.get("pool") or draw(st.sampled_from(["token", "token", "gap", "map"]))
    stem = draw(st.sampled_from([None, None, StemConfig(), StemConfig(blocks=(1,), width=32)]))
    stem = fixed.get("stem", stem)
    patch = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    stride = stem.stride if stem else 1
    grid = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    width = 4 * heads * draw(st.integers(1, 3))
    values = {
        "width": width,
        "depth": draw(st.integers(1, 2)),
        "mlp_dim": draw(st.sampled_from([width, 2 * width, 7, 10])),
        "heads": heads,
        "patch": patch,
        "image_size": (grid[0] * patch[0] * stride, grid[1] * patch[1] * stride),
        "num_classes": draw(st.integers(0, 3)),
        "channels": draw(st.sampled_from([3, 1, 2])),
        "stem": stem,
        "class_token": pool == "token" or draw(st.booleans()),
        "registers": draw(st.sampled_from([0, 0, 2])),
        "positions": draw(st.sampled_from(["1d", "1d", "sincos", "2d", "none", "relative"])),
        "prefix_positions": draw(st.booleans()),
        "pool": pool,
        "norm": "before_pool" if pool == "map" else draw(st.sampled_from(["before_pool", "after_pool"])),
        "representation": draw(st.sampled_from([0, 0, 5])),
        "layer_scale": draw(st.sampled_from([None, None, 0.5])),
        "gelu": draw(st.sampled_from(["tanh", "erf"])),
        "norm_eps": draw(st.sampled_from([1e-6, 1e-12])),
    }
    return ModelConfig(**{**values, **fixed})


@st.composite
def resnets(draw: st.DrawFn) -> ResNetConfig:
    return ResNetConfig(
        kind="resnet",
        blocks=draw(st.sampled_from([(1,), (2, 1)])),
        width=32,
        image_size=(32, 40),
        num_classes=draw(st.integers(0, 3)),
        pool_padding=draw(st.sampled_from(["zeros", "none"])),
        channels=draw(st.sampled_from([3, 1])),
    )
