"""The .npz checkpoints of google-research: vision_transformer with its hybrids, big_vision, and BiT ResNets.

A network is written in the layout of the code that implements it. The files do not store non-square image sizes, class
names or preprocessing: all these networks take squashed images with pixels in [-1, 1].
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from vitrail.config import ModelConfig, NetworkConfig, Preprocess, ResNetConfig, Size, StemConfig
from vitrail.errors import UserError
from vitrail.weights.bundle import Card
from vitrail.weights.formats import base, timm
from vitrail.weights.formats.base import (
    ForeignWeights,
    Format,
    convert_tensors,
    first_reason,
    make_card,
    missing_features,
    vitrail_only_features,
    with_position_table,
    with_prefix_rows,
)
from vitrail.weights.formats.shapes import resnet_config, square_image_note, vit_config
from vitrail.weights.formats.table import SAME, TENSOR, Form, Group, Kind, State, Table
from vitrail.weights.reference_models import Reference, ReferenceUnavailable, import_library, loading
from vitrail.weights.tensors import TensorSource

LIBRARY = "Google's code"

# ---- tensors. flax kernels have inputs before outputs, and a separate axis for heads.

FLAT = Form(lambda t: t.flatten(), lambda t: t)
WIDE = Form(lambda t: t.flatten(), lambda t: t.reshape(1, 1, 1, -1))
DENSE: Kind = {  # (in, out) <-> (out, in)
    ".weight": ("/kernel", Form(lambda t: t.flatten(1).T, lambda t: t.T)),
    ".bias": ("/bias", SAME),
}
POINT: Kind = {  # a 1x1 convolution there, a matrix in vitrail
    ".weight": ("/kernel", Form(lambda t: t.flatten(0, 2).T, lambda t: t.T[None, None])),
    ".bias": ("/bias", FLAT),
}
CONV: Kind = {  # (h, w, in, out) <-> (out, in, h, w)
    ".weight": ("/kernel", Form(lambda t: t.permute(3, 2, 0, 1), lambda t: t.permute(2, 3, 1, 0)))
}
CONV_BIAS: Kind = {**CONV, ".bias": ("/bias", SAME)}
NORM: Kind = {".weight": ("/scale", SAME), ".bias": ("/bias", SAME)}
GROUP_NORM: Kind = {".weight": ("/scale", FLAT), ".bias": ("/bias", FLAT)}
WIDE_NORM: Kind = {".weight": ("/scale", WIDE), ".bias": ("/bias", WIDE)}
TF_NORM: Kind = {".weight": ("/gamma", FLAT), ".bias": ("/beta", FLAT)}

ATTENTION, MLP = "MultiHeadDotProductAttention", "MlpBlock"
BLOCK = "Transformer/encoderblock_{0}"
INPUT_TABLE, TABLE = "Transformer/posembed_input/pos_embedding", "pos_embedding"  # vision_transformer's, big_vision's
# Module numbers of attention, MLP and second norm: old flax numbers all modules of a block together, new flax by type.
OLD, NEW = (1, 3, 2), (0, 0, 1)


def flax_vit_table(heads: int, positions: str, numbers: tuple[int, int, int] = NEW) -> Table:
    """The key mapping of a ViT. `positions`: name of the position table; `numbers`: OLD or NEW."""
    split: Kind = {  # (D, heads, D/heads)
        ".weight": ("/kernel", Form(lambda t: t.flatten(1).T, lambda t: t.T.reshape(t.shape[1], heads, -1))),
        ".bias": ("/bias", Form(lambda t: t.flatten(), lambda t: t.reshape(heads, -1))),
    }
    merge: Kind = {  # (heads, D/heads, D)
        ".weight": ("/out/kernel", Form(lambda t: t.flatten(0, -2).T, lambda t: t.T.reshape(heads, -1, len(t)))),
        ".bias": ("/out/bias", SAME),
    }
    attention, mlp = f"{BLOCK}/{ATTENTION}_{numbers[0]}", f"{BLOCK}/{MLP}_{numbers[1]}"
    pool, pool_mlp = f"MAPHead_0/{ATTENTION}_0", f"MAPHead_0/{MLP}_0"
    inputs = {
        "blocks.{0}.attn.qkv": [f"{attention}/{part}" for part in ("query", "key", "value")],
        "attn_pool.q": f"{pool}/query",
        "attn_pool.kv": [f"{pool}/key", f"{pool}/value"],
    }
    norms = {
        "blocks.{0}.norm1": f"{BLOCK}/LayerNorm_0",
        "blocks.{0}.norm2": f"{BLOCK}/LayerNorm_{numbers[2]}",
        "norm": "Transformer/encoder_norm",
        "attn_pool.norm": "MAPHead_0/LayerNorm_0",
    }
    dense = {
        "blocks.{0}.mlp.fc1": f"{mlp}/Dense_0",
        "blocks.{0}.mlp.fc2": f"{mlp}/Dense_1",
        "attn_pool.mlp.fc1": f"{pool_mlp}/Dense_0",
        "attn_pool.mlp.fc2": f"{pool_mlp}/Dense_1",
        "pre_logits.fc": "pre_logits",
        "head": "head",
    }
    stage, unit = "patch_embed.stem.stages.{0}.{1}", "block{0+1}/unit{1+1}"
    return Table(
        (TENSOR, {"cls_token": "cls", "pos_embed.table": positions, "attn_pool.latent": "MAPHead_0/probe"}),
        (CONV_BIAS, {"patch_embed.proj": "embedding"}),
        (split, inputs),
        (merge, {"blocks.{0}.attn.proj": attention, "attn_pool.proj": pool}),
        (NORM, norms),
        (DENSE, dense),
        (CONV, {"patch_embed.stem.root": "conv_root"}),
        (GROUP_NORM, {"patch_embed.stem.norm": "gn_root", f"{stage}.shortcut_norm": f"{unit}/gn_proj"}),
        *_unit(stage, unit, GROUP_NORM),
    )


FLAX_NAMES = ("conv_proj", "conv{}", "gn{}", "123")
TF_NAMES = ("a/proj/standardized_conv2d", "{}/standardized_conv2d", "{}/group_norm", "abc")


def _unit(name: str, foreign: str, norm: Kind, names: tuple[str, str, str, str] = FLAX_NAMES) -> list[Group]:
    """A ResNet block. `names`: of its shortcut, its convolutions, their norms, and the characters for 1, 2 and 3."""
    shortcut, convolution, norm_name, digits = names
    convolutions = {f"{name}.conv{n}": f"{foreign}/{convolution.format(p)}" for n, p in enumerate(digits, start=1)}
    norms = {f"{name}.norm{n}": f"{foreign}/{norm_name.format(p)}" for n, p in enumerate(digits, start=1)}
    return [(CONV, {**convolutions, f"{name}.shortcut": f"{foreign}/{shortcut}"}), (norm, norms)]


BIG_VISION_RESNET = Table(
    (CONV, {"root": "root_block/conv_root"}),
    (WIDE_NORM, {"norm": "norm-pre-head"}),
    (DENSE, {"head": "head"}),
    *_unit("stages.{0}.{1}", "block{0+1}/unit{1+1:02}", WIDE_NORM),
)
# BiT's released files, with TensorFlow's module names.
RELEASED_RESNET = Table(
    (CONV, {"root": "resnet/root_block/standardized_conv2d"}),
    (TF_NORM, {"norm": "resnet/group_norm"}),
    (POINT, {"head": "resnet/head/conv2d"}),
    *_unit("stages.{0}.{1}", "resnet/block{0+1}/unit{1+1:02}", TF_NORM, TF_NAMES),
)

# ---- settings

CONSTANTS = {"gelu": "tanh", "norm_eps": 1e-6}


def default_preprocess(model: NetworkConfig) -> Preprocess:
    """The preprocessing of all these networks, which the files do not store."""
    half = (0.5,) * model.channels
    return Preprocess(size=model.image_size, antialias=False, mean=half, std=half)


# ---- reading

PREFIXES = ("opt/target/", "params/")  # of the parameters in training checkpoints
QUERY = re.compile(rf"Transformer/encoderblock_\d+/{ATTENTION}_0/query/kernel|MAPHead_0/{ATTENTION}_0/query/kernel")
MARKS = ("/query/kernel", "conv_root/kernel", "standardized_conv2d/kernel")
RELEASED_MARK = "resnet/root_block/standardized_conv2d/kernel"
BIG_VISION_MARK = "root_block/conv_root/kernel"


def read(source: TensorSource, image_size: Size | None = None) -> ForeignWeights:
    """Read a checkpoint of google-research."""
    prefix = next((p for p in PREFIXES if any(name.startswith(p) for name in source.shapes)), "")
    source = source.renamed({name.removeprefix(prefix): name for name in source.shapes if name.startswith(prefix)})
    resnet = RELEASED_MARK in source.shapes or BIG_VISION_MARK in source.shapes
    return (_read_resnet if resnet else _read_vit)(source, image_size)


def _read_vit(source: TensorSource, image_size: Size | None) -> ForeignWeights:
    source = source.renamed(_renumbered(source.shapes))
    heads = {shape[1:2] for name, shape in source.shapes.items() if QUERY.fullmatch(name)}
    if len(heads) != 1 or () in heads:
        problem = "has layers with different numbers of heads" if len(heads) > 1 else "is not a google-research network"
        raise UserError(f"{source.where} {problem}, which vitrail cannot read")
    big_vision = INPUT_TABLE not in source.shapes
    learned = INPUT_TABLE in source.shapes or TABLE in source.shapes
    details: dict[str, Any] = {"heads": heads.pop()[0], "positions": "1d" if learned else "sincos", **CONSTANTS}
    table = flax_vit_table(details["heads"], TABLE if big_vision else INPUT_TABLE)

    def configure(meta: State) -> ModelConfig:
        return vit_config(meta, source.where, [], image_size, (not big_vision,), **details)

    model, state = convert_tensors(source, table, configure)
    assumed = square_image_note(model, [], image_size) if learned else ""
    return ForeignWeights(make_card(model, default_preprocess(model)), state, assumed)


def _read_resnet(source: TensorSource, image_size: Size | None) -> ForeignWeights:
    released = RELEASED_MARK in source.shapes
    if released:  # without the optimizer step and other state
        source = source.renamed({name: name for name in source.shapes if name.startswith("resnet/")})
        source = source.renamed({re.sub(r"(standardized_conv2d)_\d+/", r"\1/", name): name for name in source.shapes})

    def configure(meta: State) -> ResNetConfig:
        padding = "zeros" if released else "none"
        return resnet_config(meta, source.where, image_size or (224, 224), pool_padding=padding)

    model, state = convert_tensors(source, RELEASED_RESNET if released else BIG_VISION_RESNET, configure)
    assumed = "" if image_size else "224x224 images, since a ResNet fits any size"
    return ForeignWeights(make_card(model, default_preprocess(model)), state, assumed)


NUMBERED = re.compile(rf"(.*/encoderblock_\d+)/(LayerNorm|{ATTENTION}|{MLP})_(\d{{1,9}})(/.*)")


def _renumbered(names: Iterable[str]) -> dict[str, str]:
    """Names with the modules of each block numbered by type, as in new flax -> names in the file."""
    matches = [match for name in names if (match := NUMBERED.fullmatch(name))]
    numbers: dict[tuple[str, str], set[int]] = {}
    for match in matches:
        numbers.setdefault((match[1], match[2]), set()).add(int(match[3]))
    order = {key: sorted(indices) for key, indices in numbers.items()}
    new = {m[0]: f"{m[1]}/{m[2]}_{order[m[1], m[2]].index(int(m[3]))}{m[4]}" for m in matches}
    return {new.get(name, name): name for name in names}


# ---- writing


def adopt_constants(card: Card) -> Card:
    """Replace constants by those that Google's code hard-codes."""
    model = card.model
    if isinstance(model, ResNetConfig):
        fixed = {key: ResNetConfig.model_fields[key].default for key in ("norm_eps", "weight_eps", "weight_eps_in")}
    else:
        fixed = {**CONSTANTS, "stem": model.stem and StemConfig(blocks=model.stem.blocks, width=model.stem.width)}
    return card.model_copy(update={"model": model.model_copy(update=fixed)})


def unsupported_reason(card: Card) -> str | None:
    """Why Google's code cannot represent the network, or None."""
    model = card.model
    if isinstance(model, ResNetConfig):
        return None
    features = {
        "register tokens": model.registers,
        "LayerScale": model.layer_scale is not None,
        "a norm after pooling": model.norm == "after_pool",
        "a class token together with pooling of the patches": model.class_token and model.pool != "token",
        "attention pooling with a convolutional stem": model.stem and model.pool == "map",
        "sincos positions with a convolutional stem": model.stem and model.positions == "sincos",
    }
    none = {f"has no position embedding, which the networks of {LIBRARY} require": model.positions == "none"}
    return first_reason(vitrail_only_features(model, LIBRARY) | none | missing_features(LIBRARY, features))


def write(path: Path, card: Card, state: State) -> None:
    """Write an .npz file."""
    model, state = with_supported_positions(card.model, state)
    if isinstance(model, ResNetConfig):
        table = RELEASED_RESNET if model.pool_padding == "zeros" else BIG_VISION_RESNET
    elif not model.prefix_positions or model.positions == "sincos" or model.pool == "map":  # big_vision's layout
        table = flax_vit_table(model.heads, TABLE)
    else:
        table = flax_vit_table(model.heads, INPUT_TABLE, OLD)
    with open(path, "wb") as file:
        np.savez(file, allow_pickle=False, **{name: tensor.numpy() for name, tensor in table.write(state).items()})


def with_supported_positions(model: NetworkConfig, state: State) -> tuple[NetworkConfig, State]:
    """The equivalent network with a kind of position embedding that these files can store."""
    if isinstance(model, ResNetConfig):
        return model, state
    if model.positions == "2d":
        model, state = with_position_table(model, state)
    return with_prefix_rows(model, state) if model.stem else (model, state)


def lost_information(card: Card) -> dict[str, object]:
    """Information that these files cannot store -> whether this card has it."""
    size = card.model.image_size
    return {
        "preprocessing": card.preprocess != default_preprocess(card.model),
        "class names": card.classes,
        "the licence": card.licence,
        **base.lost_information(card),
        "the image size (pass --image-size when reading the file)": (
            isinstance(card.model, ResNetConfig) or size[0] != size[1]  # not shown by the position table
        ),
    }


# ---- timm's reader of these files


def reference_model(file: Path, card: Card, _: TensorSource | None) -> Reference:
    """timm's network of the same architecture, loaded from the file with timm's own reader."""
    model, reason = card.model, timm.unsupported_reason(card)
    if isinstance(model, ModelConfig) and model.positions != "1d":
        reason = "has no position table, which timm requires"
    if not isinstance(model, ModelConfig) and model.pool_padding != "zeros":
        reason = "has big_vision's names, and timm only reads the BiT files that Google released"
    if reason:
        raise ReferenceUnavailable(f"this network {reason}")
    library = import_library("timm")
    with loading("timm"):
        network: nn.Module = library.create_model(timm.architecture(model), **timm.model_args(model))
        network.load_pretrained(str(file))  # type: ignore[operator]
    difference = (
        "" if timm.adopt_constants(card).model == model else f"has other constants than {LIBRARY} and differs by"
    )
    return Reference("timm", network.float().eval(), difference)


FORMAT = Format(
    LIBRARY,
    "Google's",
    write,
    unsupported_reason,
    adopt_constants,
    lost_information=lost_information,
    suffix=".npz",
    matches=lambda source: any(name.endswith(MARKS) for name in source.shapes),
    read=read,
    reference_model=reference_model,
    compared_with="timm (reading Google's file)",
    must_load_in_library=False,
    round_trip=with_supported_positions,
)
