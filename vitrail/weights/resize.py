"""Fit starting weights to a new network: another image size, other classes, no representation layer."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from vitrail.config import ModelConfig, NetworkConfig, Resampling
from vitrail.errors import UserError
from vitrail.models.pos_embed import resample_axis, resample_offsets, resample_pos_embed

# What may differ between the network that was and the one to be; all else must be equal.
FREE = {"image_size", "num_classes", "representation", "dropout", "drop_path", "head_bias"}


def adapt_state_dict(
    state: Mapping[str, Tensor], old: NetworkConfig, new: NetworkConfig, how: Resampling = "paper"
) -> tuple[dict[str, Tensor], list[str]]:
    """The part of `state` that the new network starts from, and a sentence for each change.

    What is left out keeps the new network's own initialisation: the head starts at zero, as the paper fine-tunes.
    """
    _check_same(old, new)
    adapted, changes = dict(state), []
    if isinstance(old, ModelConfig) and isinstance(new, ModelConfig):
        if old.grid != new.grid:
            adapted = {name: _moved(name, tensor, old, new, how) for name, tensor in adapted.items()}
            changes.append(f"{_positions(old, how)}: grid {_text(old.grid)} -> {_text(new.grid)}")
        if old.representation != new.representation:
            _drop(adapted, "pre_logits.")
            fate = f"starts fresh with {new.representation} values" if new.representation else "left out"
            changes.append(f"representation layer: {fate}")
    _drop(adapted, "head.")
    if new.num_classes:
        before = f"{old.num_classes} -> " if old.num_classes not in (0, new.num_classes) else ""
        changes.append(f"head: new, {before}{new.num_classes} classes")
    elif old.num_classes:
        changes.append("head: left out")
    return adapted, changes


def _check_same(old: NetworkConfig, new: NetworkConfig) -> None:
    before, after = old.model_dump(), new.model_dump()
    for key in {**before, **after}:
        if key not in FREE and before.get(key) != after.get(key):
            raise UserError(
                f"the starting weights have {key} {_text(before.get(key))}, "
                f"and the network asked for has {_text(after.get(key))}"
            )


def _moved(name: str, tensor: Tensor, old: ModelConfig, new: ModelConfig, how: Resampling) -> Tensor:
    """A tensor of positions for the new grid; any other as it is."""
    if name.startswith("pos_embed.") and name.endswith("table"):
        return resample_pos_embed(tensor, old.grid, new.grid, how)
    if name.startswith("pos_embed.") and name.endswith("rows"):
        return resample_axis(tensor, new.grid[0], how)
    if name.startswith("pos_embed.") and name.endswith("columns"):
        return resample_axis(tensor, new.grid[1], how)
    if name.endswith("attn.relative.table"):
        before = 2 * old.grid[0] * old.grid[1] - 1
        return torch.cat([resample_offsets(tensor[:before], old.grid, new.grid), tensor[before:]])
    return tensor


def _positions(config: ModelConfig, how: Resampling) -> str:
    if config.positions == "none":
        return "no positions"
    if config.positions == "sincos":
        return "positions computed anew"
    if config.positions == "relative":
        return "relative positions resampled by rows and columns of their steps"
    return "positions resampled, " + {"paper": "bilinear as in the paper", "bicubic": "bicubic as in DeiT"}.get(
        how, "bicubic as in timm"
    )


def _drop(state: dict[str, Tensor], prefix: str) -> None:
    for name in [name for name in state if name.startswith(prefix)]:
        del state[name]


def _text(value: object) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)
