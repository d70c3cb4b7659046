"""What the readers of foreign layouts share: the network that tensors show, and the values of their side files."""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from vitrail import strict_json
from vitrail.config import ModelConfig, NetworkConfig, Preprocess, ResNetConfig, Size, StemConfig, validate
from vitrail.errors import UserError
from vitrail.weights.bundle import check_tensors
from vitrail.weights.layout import Layout, without_bias
from vitrail.weights.safetensors_file import check_regular
from vitrail.weights.tensors import Tensors

State = Mapping[str, Tensor]
MAX_SIDE_FILE = 32_000_000  # bytes; a config.json with the names of 20,000 classes has one


@dataclass(frozen=True)
class Foreign:
    """A foreign file in our terms, with what it says about its preprocessing and classes."""

    model: NetworkConfig
    state: dict[str, Tensor]
    preprocess: Preprocess
    classes: tuple[str, ...] = ()
    licence: str = ""
    assumed: str = ""  # what the file does not say and the reader had to take for granted


def translate(
    source: Tensors,
    layout: Layout,
    configure: Callable[[State], NetworkConfig],
    adjust: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict,
) -> tuple[NetworkConfig, dict[str, Tensor]]:
    """Our config and our tensors. All is tried on shapes first: the contents are read only when everything fits.

    `configure` reads the config off the shapes; `adjust` changes tensors once they have our names.
    """
    blank = adjust(layout.read(source.blank(), source.where, source.called))
    source.check_floats()
    config = configure(blank)
    shapes = {name: tuple(tensor.shape) for name, tensor in blank.items()}
    check_tensors(shapes, config, source.where, lambda name: source.called(layout.theirs(name)))
    return config, adjust(layout.read(source.load(), source.where))


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
    projection = state.get("tokens.projection.weight")
    if projection is None or projection.ndim != 4 or 0 in projection.shape:
        raise UserError(f"{where} has no patch projection, so it is no Vision Transformer")
    up, down = (state.get(f"encoder.blocks.0.mlp.{name}.weight") for name in ("up", "down"))
    if up is None or down is None:
        raise UserError(f"{where} has no encoder blocks")
    if 2 * down.shape[-1] == len(up):
        raise UserError(f"{where} has a gated MLP, which vitrail's networks have not")
    if "encoder.blocks.0.attention.qkv.bias" not in state:
        raise without_bias(where)
    root = state.get("tokens.stem.root.weight")
    constants = details.pop("stem", {})
    blocks = _stages(state, "tokens.stem.stages", where)
    stem = None if root is None else validate(StemConfig, {"width": len(root), "blocks": blocks, **constants}, where)
    class_token, registers = "tokens.class_token" in state, _length(state, "tokens.registers")
    after_pool = "pool.norm.weight" in state
    pool = "map" if "pool.probe" in state else "token" if class_token and not after_pool else "gap"
    seen: dict[str, Any] = {
        "width": len(projection),
        "depth": _count(state, r"encoder\.blocks\.(\d+)\."),
        "mlp_dim": len(up),
        "patch": tuple(projection.shape[2:]),
        "num_classes": len(state.get("head.weight", ())),
        "channels": (projection if root is None else root).shape[1],
        "stem": stem,
        "class_token": class_token,
        "registers": registers,
        "layer_scale": 1e-5 if "encoder.blocks.0.scale1.gain" in state else None,
        "pool": pool,
        "norm": "after_pool" if after_pool else "before_pool",
        "representation": len(state.get("representation.layer.weight", ())),
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
    table = state.get("positions.table")
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


def guessed_square(model: NetworkConfig, told: Sequence[Size], asked: Size | None) -> str:
    """What to say where a table of positions alone told the image size: 4x4 patches and 2x8 have the same table."""
    if asked or not isinstance(model, ModelConfig) or model.image_size in told or model.grid == (1, 1):
        return ""
    height, width = model.image_size
    return f"images of {height}x{width}, since positions do not tell rows from columns"


def joined(*notes: str) -> str:
    return "; ".join(filter(None, notes))


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


def read_json(path: Path) -> dict[str, Any]:
    try:
        check_regular(path)
        if path.stat().st_size > MAX_SIDE_FILE:
            raise UserError(f"'{path}' has {path.stat().st_size:,} bytes, far more than a file beside weights needs")
        values = strict_json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"cannot read '{path}': {error.strerror}") from None
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise UserError(f"'{path}' is not a JSON document with keys")
    return values


def size_of(value: Any, where: str) -> Size:
    """224 or [224, 320] as (height, width)."""
    pair = (value, value) if isinstance(value, int) else tuple(value) if isinstance(value, list) else ()
    if len(pair) != 2 or not all(type(side) is int and side > 0 for side in pair):
        raise UserError(f"{where}: {reprlib.repr(value)} is not a size in pixels")
    return pair[0], pair[1]


def pick(word: Any, known: Mapping[Any, str], what: str, where: str) -> str:
    """Our word for one of theirs."""
    if not isinstance(word, str | int) or word not in known:
        raise UserError(f"{where} has {what} '{word}', and vitrail knows {', '.join(map(str, known))}")
    return known[word]


def per_channel(values: Any, channels: int, where: str) -> tuple[float, ...]:
    """A mean or deviation for each channel; one value that all channels share is repeated."""
    numbers = isinstance(values, list) and all(type(value) in (int, float) and math.isfinite(value) for value in values)
    if not values or not numbers:
        raise UserError(f"{where}: {reprlib.repr(values)} is not a value for each channel")
    if len(values) != channels and len(set(values)) == 1:
        return (values[0],) * channels
    if len(values) != channels:
        raise UserError(f"{where}: its preprocessing has {len(values)} channels and its network {channels}")
    return tuple(values)
