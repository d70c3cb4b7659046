"""The network's config, from the `model` settings of a run.

In: `ModelChoice` and, if there are starting weights, their config. Out: a `NetworkConfig`, for a new network by name or
for the network of the starting weights with a new head.
"""

from __future__ import annotations

from typing import Any

from vitrail.config import ModelChoice, NetworkConfig, ResNetConfig, network_config
from vitrail.errors import UserError
from vitrail.models.variants import config_from_name, parse_name

# Fields of ModelChoice: SHAPE must match the starting weights, TRAINING may differ.
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
    """The config of a network by name, such as "B/16"."""
    options = _set_fields(choice, SHAPE) | _nonzero_rates(choice)
    if parse_name(choice.name).get("kind") == "resnet":
        for key in [*options, *(["representation"] if choice.representation else [])]:
            if key not in ResNetConfig.model_fields:
                raise UserError(f"model.{key} has no effect on a ResNet such as {choice.name}: leave it out")
    model = config_from_name(choice.name, num_classes, choice.image_size or (224, 224), **options)
    return model.model_copy(update={"representation": model.width}) if choice.representation else model


def network_from_weights(start: NetworkConfig, choice: ModelChoice, num_classes: int) -> NetworkConfig:
    """The config of the starting weights, with a linear head for the new classes."""
    _check_name(choice.name, start)
    if choice.channels not in (None, start.channels):
        raise UserError(
            f"model.channels={choice.channels}, but the starting weights take images of {start.channels} channels: "
            "leave out model.channels, or train from random weights (--recipe scratch)"
        )
    for key, value in _set_fields(choice, SHAPE).items():
        if getattr(start, key, None) != value:
            raise UserError(
                f"model.{key}={value}, but the starting weights have '{getattr(start, key, None)}': "
                f"leave out model.{key}"
            )
    if choice.representation:
        raise UserError("starting weights get a linear head: leave out model.representation")
    values = start.model_dump()
    reset = {"representation": 0, "dropout": 0.0, "drop_path": 0.0, "head_bias": 0.0}
    changes: dict[str, Any] = {key: value for key, value in reset.items() if key in values}
    changes |= _nonzero_rates(choice) | {"num_classes": num_classes}
    if choice.image_size is not None:
        changes["image_size"] = choice.image_size
    return network_config({**values, **changes}, "model")


def _set_fields(choice: ModelChoice, keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: value for key in keys if (value := getattr(choice, key)) is not None}


def _nonzero_rates(choice: ModelChoice) -> dict[str, Any]:
    """Rates that are not zero. Zero is left out because a ResNet config has no such fields."""
    return {key: value for key, value in _set_fields(choice, TRAINING).items() if value}


def _check_name(name: str, start: NetworkConfig) -> None:
    """Raise UserError if --model is not the network of the starting weights."""
    if not name:
        return
    actual = start.model_dump()
    named = {"kind": "vit", "stem": None, "axial": False, **parse_name(name)}
    for key in ("kind", "width", "depth", "mlp_dim", "heads", "patch", "blocks", "stem", "axial"):
        expected, value = named.get(key), actual.get(key)
        if key == "stem":  # compare the blocks alone: epsilons depend on where the weights come from, not on the name
            expected, value = (stem and tuple(stem["blocks"]) for stem in (expected, value))
        if expected != value:
            raise UserError(
                f"the starting weights are not a {name}: their {key} is {value}, not {expected}; "
                "leave --model out to use their network"
            )
