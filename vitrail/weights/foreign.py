"""What the readers of foreign layouts share: rename their tensors to ours, and read the network off the shapes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail.config import ModelConfig, Preprocess, Size, validate
from vitrail.errors import UserError
from vitrail.weights.bundle import check_tensors, load_float32


@dataclass(frozen=True)
class Foreign:
    """A foreign file in our terms, with what it says about its preprocessing and classes."""

    model: ModelConfig
    state: dict[str, Tensor]
    preprocess: Preprocess
    classes: tuple[str, ...] = ()
    licence: str = ""
    assumed: str = ""  # what the file does not say and the reader had to take for granted


@dataclass(frozen=True)
class Layout:
    """Where a layout keeps our modules: our name to theirs; several of theirs are stacked, as query, key and value."""

    parameters: Mapping[str, str]
    modules: Mapping[str, str]
    block: str  # how the names of block {} begin
    block_modules: Mapping[str, tuple[str, ...]]

    def places(self, depth: int) -> dict[str, tuple[str, ...]]:
        """Each tensor of our network to the names it has there."""
        modules: dict[str, tuple[str, ...]] = {ours: (theirs,) for ours, theirs in self.modules.items()}
        for index in range(depth):
            start = self.block.format(index)
            for ours, theirs in self.block_modules.items():
                modules[f"encoder.blocks.{index}.{ours}"] = tuple(start + name for name in theirs)
        places: dict[str, tuple[str, ...]] = {ours: (theirs,) for ours, theirs in self.parameters.items()}
        for ours, names in modules.items():
            for kind in ("weight", "bias"):
                places[f"{ours}.{kind}"] = tuple(f"{name}.{kind}" for name in names)
        return places

    def depth(self, names: Mapping[str, Any]) -> int:
        pattern = re.compile(re.escape(self.block).replace(re.escape("{}"), r"(\d+)"))
        return len({match[1] for match in map(pattern.match, names) if match})


# Part of a tensor's name to the thing a plain Vision Transformer does not have.
UNSUPPORTED = {
    "ls1.": "LayerScale",
    "ls2.": "LayerScale",
    "gamma": "LayerScale",
    "layer_scale": "LayerScale",
    "reg_token": "register tokens",
    "register_token": "register tokens",
    "dist_token": "a distillation token",
    "distillation": "a distillation token",
    "head_dist": "a distillation head",
    "q_norm": "normalised queries and keys",
    "k_norm": "normalised queries and keys",
    "norm_pre": "a norm before the encoder",
    "attn_pool": "attention pooling",
    "MAPHead": "attention pooling",
    "rope": "rotary positions",
    "freqs": "rotary positions",
    "rel_pos": "relative positions",
    "relative_position": "relative positions",
    "backbone": "a convolutional stem (hybrid)",
    "conv_root": "a convolutional stem (hybrid)",
    "block1.": "a convolutional stem (hybrid)",
    "mlp.fc1_g": "a gated MLP",
    "mlp.w12": "a gated MLP",
    "mlp.norm": "norms inside attention and MLP",
    "attn.norm": "norms inside attention and MLP",
    "mask_token": "a mask token",
    "decoder": "a decoder",
}
REQUIRED = ("tokens.projection", "positions", "encoder.blocks.")


def convert(
    tensors: Mapping[str, Tensor],
    layout: Layout,
    where: str,
    told_sizes: Sequence[Size],
    image_size: Size | None,
    class_row: bool = True,
    **details: Any,
) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Our config and our names. Shapes tell most of the config; `details` are what they cannot tell (heads, GELU).

    `class_row` says whether the position table has a row for the class token, where there is one.
    """
    state = _rename(tensors, layout, where)
    projection = state["tokens.projection.weight"]
    if projection.ndim != 4 or 0 in projection.shape or state["positions.table"].ndim != 3:
        raise UserError(f"{where}: its patch projection or positions do not have the shape of a Vision Transformer")
    class_token = "tokens.class_token" in state
    patch = (projection.shape[2], projection.shape[3])
    patches = state["positions.table"].shape[1] - int(class_token and class_row)
    size = find_image_size(patches, patch, told_sizes, image_size, where)
    if class_token and not class_row:
        # The class token's row in ours is then zero, which adds nothing.
        zero = torch.zeros_like(state["positions.table"][:, :1])
        state["positions.table"] = torch.cat([zero, state["positions.table"]], dim=1)
    after_pool = "pool.norm.weight" in state
    seen: dict[str, Any] = {
        "width": projection.shape[0],
        "depth": layout.depth(tensors),
        "mlp_dim": len(state["encoder.blocks.0.mlp.up.weight"]),
        "patch": patch,
        "image_size": size,
        "num_classes": len(state.get("head.weight", ())),
        "channels": projection.shape[1],
        "class_token": class_token,
        "pool": "token" if class_token and not after_pool else "gap",
        "norm": "after_pool" if after_pool else "before_pool",
        "representation": len(state.get("representation.layer.weight", ())),
    }
    config = validate(ModelConfig, {**seen, **details}, where)
    if 2 * state["encoder.blocks.0.mlp.down.weight"].shape[-1] == config.mlp_dim:
        raise UserError(f"{where} has a gated MLP, which a plain Vision Transformer has not")
    check_tensors({name: tuple(tensor.shape) for name, tensor in state.items()}, config, where)
    return config, state


def _rename(tensors: Mapping[str, Tensor], layout: Layout, where: str) -> dict[str, Tensor]:
    places = layout.places(layout.depth(tensors))
    known = {name for names in places.values() for name in names}
    for name, tensor in tensors.items():
        if tensor.ndim == 0:
            raise UserError(f"{where}: tensor '{name}' is a single number")
        if name not in known:
            thing = next((words for part, words in UNSUPPORTED.items() if part in name), f"a tensor '{name}'")
            raise UserError(f"{where} has {thing}, which a plain Vision Transformer has not")
    state: dict[str, Tensor] = {}
    for ours, theirs in places.items():
        missing = [name for name in theirs if name not in tensors]
        if not missing:
            state[ours] = torch.cat([tensors[name] for name in theirs]) if len(theirs) > 1 else tensors[theirs[0]]
        elif ours.endswith("qkv.bias"):
            raise UserError(f"{where} has queries, keys and values without bias, and vitrail's network has biases")
        elif ours == "positions.table":
            raise UserError(f"{where} has no learned positions, and vitrail's network has them")
        elif ours.startswith(REQUIRED):
            raise UserError(f"{where}: tensor '{missing[0]}' is missing")
    if "encoder.blocks.0.norm1.weight" not in state:
        raise UserError(f"{where} has no encoder blocks")
    return state


def find_image_size(patches: int, patch: Size, told: Sequence[Size], asked: Size | None, where: str) -> Size:
    """The image size that makes this many patches: the one asked for, one the file tells, or a square."""

    def fits(size: Size) -> bool:
        whole = size[0] % patch[0] == 0 and size[1] % patch[1] == 0
        return whole and (size[0] // patch[0]) * (size[1] // patch[1]) == patches > 0

    if asked:
        if not fits(asked):
            raise UserError(
                f"{where} has positions for {patches} patches of {patch[0]}x{patch[1]}, "
                f"which is not an image of {asked[0]}x{asked[1]}"
            )
        return asked
    side = math.isqrt(patches)
    for size in (*told, (side * patch[0], side * patch[1])):
        if fits(size):
            return size
    raise UserError(
        f"{where} has positions for {patches} patches, which is not a square: "
        "load it with vitrail.load(path, image_size=(height, width))"
    )


def load_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, or of the shards a `model.safetensors.index.json` names."""
    tensors: dict[str, Tensor] = {}
    for shard in shards(path):
        tensors |= load_float32(shard)
    return tensors


def shards(path: Path) -> list[Path]:
    """The files that hold the tensors: the file itself, or those an index names in its own folder."""
    if path.suffix != ".json":
        return [path]
    names = read_json(path).get("weight_map")
    if not isinstance(names, dict) or not all(Path(str(name)).name == name for name in names.values()):
        raise UserError(f"'{path}' is not an index of safetensors files")
    return [path.with_name(name) for name in sorted(set(names.values()))]


def read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"cannot read '{path}': {error.strerror}") from None
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise UserError(f"'{path}' is not a JSON document with keys")
    return values


def size_of(value: Any, where: str) -> Size:
    """224 or [224, 320] as (height, width)."""
    pair = (value, value) if isinstance(value, int) else tuple(value) if isinstance(value, list) else ()
    if len(pair) != 2 or not all(isinstance(side, int) and side > 0 for side in pair):
        raise UserError(f"{where}: {value!r} is not a size in pixels")
    return pair[0], pair[1]


def pick(word: Any, known: Mapping[Any, str], what: str, where: str) -> str:
    """Our word for one of theirs."""
    if not isinstance(word, str | int) or word not in known:
        raise UserError(f"{where} has {what} '{word}', and vitrail knows {', '.join(map(str, known))}")
    return known[word]


def per_channel(values: Any, channels: int, where: str) -> tuple[float, ...]:
    """A mean or deviation for each channel; one value that all channels share is repeated."""
    if not isinstance(values, list) or not values or not all(isinstance(value, int | float) for value in values):
        raise UserError(f"{where}: {values!r} is not a value for each channel")
    if len(values) != channels and len(set(values)) == 1:
        return (values[0],) * channels
    if len(values) != channels:
        raise UserError(f"{where}: its preprocessing has {len(values)} channels and its network {channels}")
    return tuple(values)
