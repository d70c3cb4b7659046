"""Network configs derived from the shapes of a state dict."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from vitrail.config import ModelConfig, NetworkConfig, ResNetConfig, Size, StemConfig, validate
from vitrail.errors import UserError
from vitrail.weights.formats.table import State, missing_qkv_bias


def vit_config(
    state: State,
    where: str,
    known_sizes: Sequence[Size],
    requested: Size | None,
    prefix_rows: Sequence[bool] = (True,),
    **details: Any,
) -> ModelConfig:
    """The config of a Vision Transformer with these tensors.

    Parameters
    ----------
    state
        Tensors with vitrail's names; only their shapes are used.
    where
        Name of the file in error messages.
    known_sizes
        Image sizes that other metadata mentions, in order of preference.
    requested
        Image size that the caller passed, or None.
    prefix_rows
        Which of the two forms of the position table are allowed: with rows for class token and registers, without.
    details
        Settings that leave no trace in shapes: heads, GELU, constants.
    """
    projection = state.get("patch_embed.proj.weight")
    if projection is None or projection.ndim != 4 or 0 in projection.shape:
        raise UserError(f"{where} has no patch embedding (patch_embed.proj.weight), so it is not a Vision Transformer")
    up, down = (state.get(f"blocks.0.mlp.{name}.weight") for name in ("fc1", "fc2"))
    if up is None or down is None:
        raise UserError(f"{where} has no encoder blocks (blocks.0)")
    if 2 * down.shape[-1] == len(up):
        raise UserError(f"{where} has a gated MLP, which vitrail does not support")
    if "blocks.0.attn.qkv.bias" not in state:
        raise missing_qkv_bias(where)
    root = state.get("patch_embed.stem.root.weight")
    constants = details.pop("stem", {})
    blocks = _stages(state, "patch_embed.stem.stages", where)
    stem = None if root is None else validate(StemConfig, {"width": len(root), "blocks": blocks, **constants}, where)
    class_token, registers = "cls_token" in state, _length(state, "reg_token")
    after_pool = "fc_norm.weight" in state
    pool = "map" if "attn_pool.latent" in state else "token" if class_token and not after_pool else "gap"
    values: dict[str, Any] = {
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
    cell = values["patch"][0] * stride, values["patch"][1] * stride
    values |= _grid(state, cell, class_token + registers, known_sizes, requested, prefix_rows, where)
    return validate(ModelConfig, {**values, **details}, where)


def resnet_config(state: State, where: str, image_size: Size, **constants: Any) -> ResNetConfig:
    """The config of a ResNet with these tensors."""
    root = state.get("root.weight")
    if root is None or root.ndim != 4:
        raise UserError(f"{where} has no root convolution (root.weight), so it is not a ResNet")
    values = {
        "kind": "resnet",
        "blocks": _stages(state, "stages", where),
        "width": len(root),
        "image_size": image_size,
        "num_classes": len(state.get("head.weight", ())),
        "channels": root.shape[1],
    }
    return validate(ResNetConfig, {**values, **constants}, where)


def _grid(
    state: State,
    cell: Size,
    prefix: int,
    known_sizes: Sequence[Size],
    requested: Size | None,
    prefix_rows: Sequence[bool],
    where: str,
) -> dict[str, Any]:
    """`image_size` and `prefix_positions`, from the number of rows of the position table."""
    table = state.get("pos_embed.table")
    if table is None:
        if not requested and not known_sizes:
            raise UserError(f"{where} has no position embedding, so its image size is unknown: {SIZE_HINT}")
        return {"image_size": requested or known_sizes[0]}
    if table.ndim != 3:
        raise UserError(f"{where}: its position embedding has shape {tuple(table.shape)}, not (1, tokens, width)")
    counts = {rows: table.shape[1] - (prefix if rows else 0) for rows in prefix_rows}
    for size in [requested] if requested else known_sizes:
        fits = size[0] % cell[0] == 0 and size[1] % cell[1] == 0
        for rows, count in counts.items():
            if fits and (size[0] // cell[0]) * (size[1] // cell[1]) == count > 0:
                return {"image_size": size, "prefix_positions": rows}
    count = next(iter(counts.values()))
    if requested:
        raise UserError(
            f"{where} has position embeddings for {count} patches of {cell[0]}x{cell[1]} pixels, which do not make up "
            f"an image of {requested[0]}x{requested[1]}"
        )
    for rows, count in counts.items():
        side = math.isqrt(max(count, 0))
        if side * side == count > 0:
            return {"image_size": (side * cell[0], side * cell[1]), "prefix_positions": rows}
    raise UserError(f"{where} has position embeddings for {count} patches, which is not a square grid: {SIZE_HINT}")


SIZE_HINT = "pass --image-size HxW (image_size=(height, width) in Python)"


def square_image_note(model: NetworkConfig, known_sizes: Sequence[Size], requested: Size | None) -> str:
    """The note that a square image was assumed, if only the position table shows the size: 4x4 and 2x8 look alike."""
    if requested or not isinstance(model, ModelConfig) or model.image_size in known_sizes or model.grid == (1, 1):
        return ""
    height, width = model.image_size
    return f"square {height}x{width} images, since the position embedding does not show the aspect ratio"


def _stages(state: State, prefix: str, where: str) -> tuple[int, ...]:
    """Number of blocks in each stage of a ResNet."""
    prefix = re.escape(prefix)
    count = _count(state, rf"{prefix}\.(\d+)\.")
    if count > len(state):
        raise UserError(f"{where}: {len(state)} tensors are too few for a ResNet of {count} stages")
    return tuple(_count(state, rf"{prefix}\.{stage}\.(\d+)\.") for stage in range(count))


def _count(state: State, pattern: str) -> int:
    """One more than the largest index that the pattern captures."""
    return max((int(match[1]) + 1 for match in map(re.compile(pattern).match, state) if match), default=0)


def _length(state: State, name: str) -> int:
    return state[name].shape[1] if name in state and state[name].ndim == 3 else 0
