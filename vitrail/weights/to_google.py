"""Networks as .npz checkpoints of google-research, each in the layout of the code that has it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from torch import Tensor

from vitrail.config import NetworkConfig, ResNetConfig, StemConfig
from vitrail.weights.bundle import Card
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
from vitrail.weights.target_compat import lacking, ours_alone, prefix_rows, ungridded

LIBRARY = "Google's code"


def adopted(card: Card) -> Card:
    """The card with the constants that Google's code fixes."""
    if isinstance(card.model, ResNetConfig):
        plain = ResNetConfig(**card.model.model_dump(include={"kind", "blocks", "width", "image_size", "num_classes"}))
        fixed = {key: getattr(plain, key) for key in ("norm_eps", "weight_eps", "weight_eps_in")}
        return card.model_copy(update={"model": card.model.model_copy(update=fixed)})
    stem = card.model.stem and StemConfig(blocks=card.model.stem.blocks, width=card.model.stem.width)
    return card.model_copy(update={"model": card.model.model_copy(update={**CONSTANTS, "stem": stem})})


def cannot(card: Card) -> str | None:
    """What of this network Google's cannot be; None if they can be it."""
    model = card.model
    if isinstance(model, ResNetConfig):
        return None
    things = {
        "register tokens": model.registers > 0,
        "LayerScale": model.layer_scale is not None,
        "a norm after pooling": model.norm == "after_pool",
        "a class token beside pooling of the patches": model.class_token and model.pool != "token",
        "attention pooling over a convolutional stem": model.stem and model.pool == "map",
        "fixed positions over a convolutional stem": model.stem and model.positions == "sincos",
    }
    if strange := ours_alone(model, LIBRARY):
        return strange
    if model.positions == "none":
        return f"has no positions, and the networks of {LIBRARY} all have some"
    return next((lacking(thing, LIBRARY) for thing, there in things.items() if there), None)


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
