"""Fit starting weights to a new network: another image size, other classes, no representation layer."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from vitrail.config import ModelConfig
from vitrail.errors import UserError
from vitrail.model.positions import resample

# What may differ between the network that was and the one to be; all else must be equal.
FREE = {"image_size", "num_classes", "representation", "dropout", "head_bias"}


def adapt(
    state: Mapping[str, Tensor], old: ModelConfig, new: ModelConfig, *, keep_head: bool = False
) -> tuple[dict[str, Tensor], list[str]]:
    """The part of `state` that the new network starts from, and a sentence for each change.

    What is left out keeps the new network's own initialisation: the head starts at zero, as the paper fine-tunes.
    """
    for key in ModelConfig.model_fields:
        before, after = getattr(old, key), getattr(new, key)
        if key not in FREE and before != after:
            raise UserError(
                f"the starting weights have {key} {_text(before)}, and the network asked for has {_text(after)}"
            )
    adapted, changes = dict(state), []
    if old.grid != new.grid:
        adapted["positions.table"] = resample(adapted["positions.table"], old.grid, new.grid)
        changes.append(f"positions {_text(old.grid)} -> {_text(new.grid)}")
    same_features = old.representation == new.representation
    if not same_features:
        _drop(adapted, "representation.")
        fate = f"starts fresh with {new.representation} values" if new.representation else "left out"
        changes.append(f"representation layer: {fate}")
    if keep_head and same_features and old.num_classes == new.num_classes:
        return adapted, changes
    _drop(adapted, "head.")
    if new.num_classes:
        before = f"{old.num_classes} -> " if old.num_classes not in (0, new.num_classes) else ""
        changes.append(f"head: {before}{new.num_classes} classes, starts at zero")
    elif old.num_classes:
        changes.append("head: left out")
    return adapted, changes


def _drop(state: dict[str, Tensor], prefix: str) -> None:
    for name in [name for name in state if name.startswith(prefix)]:
        del state[name]


def _text(value: object) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)
