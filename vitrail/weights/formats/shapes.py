"""The config of a network, as far as the shapes of its tensors show it."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from vitrail.config import ModelConfig, NetworkConfig, ResNetConfig, Size, StemConfig, validate
from vitrail.errors import UserError
from vitrail.weights.formats.table import State, without_bias


def vit_config(
    state: State,
    where: str,
    told: Sequence[Size],
    asked: Size | None,
    prefix_rows: Sequence[bool] = (True,),
    **details: Any,
) -> ModelConfig:
    """The config that shapes tell; `details` are what they cannot (heads, GELU, constants).

    `prefix_rows`: whether the position table may have rows for class token and registers, may not, or either.
    """
    projection = state.get("patch_embed.proj.weight")
    if projection is None or projection.ndim != 4 or 0 in projection.shape:
        raise UserError(f"{where} has no patch projection, so it is no Vision Transformer")
    up, down = (state.get(f"blocks.0.mlp.{name}.weight") for name in ("fc1", "fc2"))
    if up is None or down is None:
        raise UserError(f"{where} has no encoder blocks")
    if 2 * down.shape[-1] == len(up):
        raise UserError(f"{where} has a gated MLP, which vitrail's networks have not")
    if "blocks.0.attn.qkv.bias" not in state:
        raise without_bias(where)
    root = state.get("patch_embed.stem.root.weight")
    constants = details.pop("stem", {})
    blocks = _stages(state, "patch_embed.stem.stages", where)
    stem = None if root is None else validate(StemConfig, {"width": len(root), "blocks": blocks, **constants}, where)
    class_token, registers = "cls_token" in state, _length(state, "reg_token")
    after_pool = "fc_norm.weight" in state
    pool = "map" if "attn_pool.latent" in state else "token" if class_token and not after_pool else "gap"
    seen: dict[str, Any] = {
        "width": len(projection),
        "depth": _count(state, r"blocks\.(\d+)\."),
        "mlp_dim": len(up),
        "patch": tuple(projection.shape[2:]),
        "num_classes": len(state.get("head.weight", ())),
        "channels": (projection if root is None else root).shape[1],
        "stem": stem,
        "class_token": class_token,
        "registers": registers,
        "layer_scale": 1e-5 if "blocks.0.ls1.gamma" in state else None,
        "pool": pool,
        "norm": "after_pool" if after_pool else "before_pool",
        "representation": len(state.get("pre_logits.fc.weight", ())),
    }
    stride = stem.stride if stem else 1
    cell = seen["patch"][0] * stride, seen["patch"][1] * stride
    seen |= _grid(state, cell, class_token + registers, told, asked, prefix_rows, where)
    return validate(ModelConfig, {**seen, **details}, where)


def resnet_config(state: State, where: str, image_size: Size, **constants: Any) -> ResNetConfig:
    root = state.get("root.weight")
    if root is None or root.ndim != 4:
        raise UserError(f"{where} has no root convolution, so it is no ResNet")
    seen = {
        "kind": "resnet",
        "blocks": _stages(state, "stages", where),
        "width": len(root),
        "image_size": image_size,
        "num_classes": len(state.get("head.weight", ())),
        "channels": root.shape[1],
    }
    return validate(ResNetConfig, {**seen, **constants}, where)


def _grid(
    state: State,
    cell: Size,
    prefix: int,
    told: Sequence[Size],
    asked: Size | None,
    prefix_rows: Sequence[bool],
    where: str,
) -> dict[str, Any]:
    """Image size, and whether class token and registers have rows in the position table."""
    table = state.get("pos_embed.table")
    if table is None:
        if not asked and not told:
            raise UserError(f"{where} has no table of positions, which would show its image size: {ASK}")
        return {"image_size": asked or told[0]}
    if table.ndim != 3:
        raise UserError(f"{where}: its table of positions has shape {tuple(table.shape)}, not (1, tokens, width)")
    counts = {rows: table.shape[1] - (prefix if rows else 0) for rows in prefix_rows}
    for size in [asked] if asked else told:
        whole = size[0] % cell[0] == 0 and size[1] % cell[1] == 0
        for rows, count in counts.items():
            if whole and (size[0] // cell[0]) * (size[1] // cell[1]) == count > 0:
                return {"image_size": size, "prefix_positions": rows}
    count = next(iter(counts.values()))
    if asked:
        raise UserError(
            f"{where} has positions for {count} patches of {cell[0]}x{cell[1]}, "
            f"which is not an image of {asked[0]}x{asked[1]}"
        )
    for rows, count in counts.items():
        side = math.isqrt(max(count, 0))
        if side * side == count > 0:
            return {"image_size": (side * cell[0], side * cell[1]), "prefix_positions": rows}
    raise UserError(f"{where} has positions for {count} patches, which is not a square: {ASK}")


ASK = "give the size with --image-size HxW, or image_size=(height, width) in Python"


def square_image_note(model: NetworkConfig, told: Sequence[Size], asked: Size | None) -> str:
    """What to say where a table of positions alone told the image size: 4x4 patches and 2x8 have the same table."""
    if asked or not isinstance(model, ModelConfig) or model.image_size in told or model.grid == (1, 1):
        return ""
    height, width = model.image_size
    return f"images of {height}x{width}, since positions do not tell rows from columns"


def _stages(state: State, start: str, where: str) -> tuple[int, ...]:
    """Blocks of each stage of a ResNet."""
    start = re.escape(start)
    count = _count(state, rf"{start}\.(\d+)\.")
    if count > len(state):
        raise UserError(f"{where}: {len(state)} tensors are too few for a ResNet of {count} stages")
    return tuple(_count(state, rf"{start}\.{stage}\.(\d+)\.") for stage in range(count))


def _count(state: State, pattern: str) -> int:
    """One more than the largest number that names have there."""
    return max((int(match[1]) + 1 for match in map(re.compile(pattern).match, state) if match), default=0)


def _length(state: State, name: str) -> int:
    return state[name].shape[1] if name in state and state[name].ndim == 3 else 0
