"""Adapting pretrained weights to a new image size, other classes, or no representation layer."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from vitrail.config import ModelConfig, NetworkConfig, Resampling
from vitrail.errors import UserError
from vitrail.models.pos_embed import resample_axis, resample_offsets, resample_pos_embed

# Settings that may differ between the pretrained network and the new one.
FREE = {"image_size", "num_classes", "representation", "dropout", "drop_path", "head_bias"}


def adapt_state_dict(
    state: Mapping[str, Tensor], old: NetworkConfig, new: NetworkConfig, how: Resampling = "paper"
) -> tuple[dict[str, Tensor], list[str]]:
    """Return the part of `state` that the new network loads, and a description of each change.

    Parameters that are missing from it keep the initialization of the new network.
    """
    _check_compatible(old, new)
    adapted, changes = dict(state), []
    if isinstance(old, ModelConfig) and isinstance(new, ModelConfig):
        if old.grid != new.grid:
            adapted = {name: _resampled(name, tensor, old, new, how) for name, tensor in adapted.items()}
            changes.append(f"{_positions(old, how)}: grid {_text(old.grid)} -> {_text(new.grid)}")
        if old.representation != new.representation:
            _drop(adapted, "pre_logits.")
            what = f"new, {new.representation} values" if new.representation else "dropped"
            changes.append(f"representation layer: {what}")
    _drop(adapted, "head.")
    if new.num_classes:
        before = f"{old.num_classes} -> " if old.num_classes not in (0, new.num_classes) else ""
        changes.append(f"head: new, {before}{new.num_classes} classes")
    elif old.num_classes:
        changes.append("head: dropped")
    return adapted, changes


def _check_compatible(old: NetworkConfig, new: NetworkConfig) -> None:
    before, after = old.model_dump(), new.model_dump()
    for key in {**before, **after}:
        if key not in FREE and before.get(key) != after.get(key):
            raise UserError(
                f"{key} {_text(after.get(key))} does not fit the pretrained weights, which have {key} "
                f"{_text(before.get(key))}; remove the setting or choose other weights"
            )


def _resampled(name: str, tensor: Tensor, old: ModelConfig, new: ModelConfig, how: Resampling) -> Tensor:
    """A position embedding resampled to the new grid; any other tensor unchanged."""
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
        return "no position embedding"
    if config.positions == "sincos":
        return "position embedding recomputed"
    if config.positions == "relative":
        return "relative position embedding resampled by row and column offset"
    return "position embedding resampled, " + {
        "paper": "bilinear as in the paper",
        "bicubic": "bicubic as in DeiT",
    }.get(how, "bicubic as in timm")


def _drop(state: dict[str, Tensor], prefix: str) -> None:
    for name in [name for name in state if name.startswith(prefix)]:
        del state[name]


def _text(value: object) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)
