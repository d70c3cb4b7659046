"""Networks as .npz checkpoints of google-research, each in the layout of the code that has it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from torch import Tensor

from vitrail.config import NetworkConfig, ResNetConfig, StemConfig
from vitrail.weights.bundle import Card
from vitrail.weights.express import prefix_rows, ungridded
from vitrail.weights.google import (
    CONSTANTS,
    INPUT_TABLE,
    NEW,
    OLD,
    TABLE,
    big_vision_resnet,
    released_resnet,
    vit_layout,
)


def adopted(card: Card) -> Card:
    """The card with the constants that Google's code fixes."""
    if isinstance(card.model, ResNetConfig):
        plain = ResNetConfig(**card.model.model_dump(include={"kind", "blocks", "width", "image_size", "num_classes"}))
        fixed = {key: getattr(plain, key) for key in ("norm_eps", "weight_eps", "weight_eps_in")}
        return card.model_copy(update={"model": card.model.model_copy(update=fixed)})
    stem = card.model.stem and StemConfig(blocks=card.model.stem.blocks, width=card.model.stem.width)
    return card.model_copy(update={"model": card.model.model_copy(update={**CONSTANTS, "stem": stem})})


def cannot(card: Card) -> str | None:
    """Why Google's networks cannot be this one; None if they can."""
    model = card.model
    if isinstance(model, ResNetConfig):
        return None
    if model.positions in ("none", "relative") or model.positions_at != "stem" or model.axial:
        return "its attention and its positions are of other kinds"
    for thing, there in {"register tokens": model.registers, "LayerScale": model.layer_scale is not None}.items():
        if there:
            return f"it has no {thing}"
    if model.norm == "after_pool":
        return "it has no norm after pooling"
    if model.class_token and model.pool != "token":
        return f"it has no class token beside pooling '{model.pool}'"
    if model.stem and (model.pool == "map" or model.positions == "sincos"):
        return "its hybrids have neither attention pooling nor fixed positions"
    return None


def write(path: Path, card: Card, state: Mapping[str, Tensor]) -> None:
    """A network that `cannot` has no objection to."""
    model, state = expressed(card.model, state)
    if isinstance(model, ResNetConfig):
        layout = released_resnet() if model.pool_padding == "zeros" else big_vision_resnet()
        tensors = layout.write(state, heads=1)
    else:
        big_vision = not model.prefix_positions or model.positions == "sincos" or model.pool == "map"
        layout = vit_layout(TABLE, NEW) if big_vision else vit_layout(INPUT_TABLE, OLD)
        tensors = layout.write(state, model.heads)
    with open(path, "wb") as file:
        np.savez(file, allow_pickle=False, **{name: tensor.numpy() for name, tensor in tensors.items()})


def expressed(model: NetworkConfig, state: Mapping[str, Tensor]) -> tuple[NetworkConfig, Mapping[str, Tensor]]:
    """The same network with positions as these files have them."""
    if isinstance(model, ResNetConfig):
        return model, state
    if model.positions == "2d":
        model, state = ungridded(model, state)
    return prefix_rows(model, state) if model.stem else (model, state)
