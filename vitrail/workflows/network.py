"""The network that a run's settings ask for: a new one by name, or that of the starting weights."""

from __future__ import annotations

from typing import Any

from vitrail.config import ModelChoice, NetworkConfig, ResNetConfig, network_config
from vitrail.errors import UserError
from vitrail.models.variants import configure, parse

# Of a ModelChoice: what must be as the starting weights have it, and what may be different.
SHAPE = (
    "channels",
    "pool",
    "norm",
    "positions",
    "positions_at",
    "prefix_positions",
    "registers",
    "layer_scale",
    "gelu",
)
TRAINING = ("dropout", "drop_path", "head_bias")


def new_network(choice: ModelChoice, num_classes: int) -> NetworkConfig:
    options = _given(choice, SHAPE) | _training(choice)
    if parse(choice.name).get("kind") == "resnet":
        for key in [*options, *(["representation"] if choice.representation else [])]:
            if key not in ResNetConfig.model_fields:
                raise UserError(f"model.{key} is for Vision Transformers, and {choice.name} is a ResNet")
    model = configure(choice.name, num_classes, choice.image_size or (224, 224), **options)
    return model.model_copy(update={"representation": model.width}) if choice.representation else model


def network_from_weights(start: NetworkConfig, choice: ModelChoice, num_classes: int) -> NetworkConfig:
    """The network of the starting weights, with a plain head for the new classes."""
    _check_name(choice.name, start)
    if choice.channels not in (None, start.channels):
        raise UserError(
            f"the starting weights are for images of {start.channels} channels, not {choice.channels}: "
            "leave out model.channels, or train without them"
        )
    for key, value in _given(choice, SHAPE).items():
        if getattr(start, key, None) != value:
            raise UserError(f"the starting weights have {key} '{getattr(start, key, None)}': leave out model.{key}")
    if choice.representation:
        raise UserError("fine-tuning gives the starting weights a plain head: leave out model.representation")
    values = start.model_dump()
    reset = {"representation": 0, "dropout": 0.0, "drop_path": 0.0, "head_bias": 0.0}
    changes: dict[str, Any] = {key: value for key, value in reset.items() if key in values}
    changes |= _training(choice) | {"num_classes": num_classes}
    if choice.image_size is not None:
        changes["image_size"] = choice.image_size
    return network_config({**values, **changes}, "model")


def _given(choice: ModelChoice, keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: value for key in keys if (value := getattr(choice, key)) is not None}


def _training(choice: ModelChoice) -> dict[str, Any]:
    """Rates that are not zero: a ResNet has none of them, and need not be told so."""
    return {key: value for key, value in _given(choice, TRAINING).items() if value}


def _check_name(name: str, start: NetworkConfig) -> None:
    """A model named beside starting weights must be the one the weights are for."""
    if not name:
        return
    there = start.model_dump()
    asked = {"kind": "vit", "stem": None, "axial": False, **parse(name)}
    for key in ("kind", "width", "depth", "mlp_dim", "heads", "patch", "blocks", "stem", "axial"):
        wanted, found = asked.get(key), there.get(key)
        if key == "stem":  # its epsilons are those of the weights' origin, not of the name
            wanted, found = (stem and tuple(stem["blocks"]) for stem in (wanted, found))
        if wanted != found:
            raise UserError(
                f"the starting weights are not a {name}: their {key} is {found}, not {wanted}; "
                "leave --model out to use theirs"
            )
