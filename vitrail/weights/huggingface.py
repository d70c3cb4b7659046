"""Hugging Face transformers' ViT and DINOv2: config.json, model.safetensors (whole or in shards), and
preprocessor_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail.config import Preprocess, Size, validate
from vitrail.errors import UserError
from vitrail.weights.foreign import Foreign, per_channel, pick, read_json, size_of, translate, vit_config
from vitrail.weights.layout import Layout, Rule, both, concatenate
from vitrail.weights.tensors import Tensors

PREFIXES = ("vit.", "dinov2_with_registers.", "dinov2.")  # what a classifier's names begin with
MARK = "embeddings.patch_embeddings.projection.weight"
MASK = "embeddings.mask_token"  # of masked pre-training; nothing reads it afterwards

# Parts of attention: query, key, value, out. transformers 5 has shorter names inside; it writes the old ones unless
# told otherwise.
OLD = ("attention.attention.query", "attention.attention.key", "attention.attention.value", "attention.output.dense")
NEW = ("attention.q_proj", "attention.k_proj", "attention.v_proj", "attention.o_proj")
OLD_VIT = ("layernorm_before", "layernorm_after", "intermediate.dense", "output.dense")  # norms and MLP
NEW_VIT = ("layernorm_before", "layernorm_after", "mlp.fc1", "mlp.fc2")
DINO = ("norm1", "norm2", "mlp.fc1", "mlp.fc2")


def _layout(block: str, attention: tuple[str, ...], others: tuple[str, ...]) -> Layout:
    ours, (*parts, out), (norm1, norm2, up, down) = "encoder.blocks.{0}", attention, others
    rules = [
        Rule("tokens.class_token", ("embeddings.cls_token",)),
        Rule("tokens.registers", ("embeddings.register_tokens",)),
        Rule("positions.table", ("embeddings.position_embeddings",)),
        *both("tokens.projection", "embeddings.patch_embeddings.projection"),
        *both(f"{ours}.norm1", f"{block}.{norm1}"),
        *both(f"{ours}.attention.qkv", *(f"{block}.{part}" for part in parts)),
        *both(f"{ours}.attention.out", f"{block}.{out}"),
        Rule(f"{ours}.scale1.gain", (f"{block}.layer_scale1.lambda1",)),
        *both(f"{ours}.norm2", f"{block}.{norm2}"),
        *both(f"{ours}.mlp.up", f"{block}.{up}"),
        *both(f"{ours}.mlp.down", f"{block}.{down}"),
        Rule(f"{ours}.scale2.gain", (f"{block}.layer_scale2.lambda1",)),
        *both("encoder.norm", "layernorm"),
        *both("representation.layer", "pooler.dense"),
        *both("head", "classifier"),
    ]
    return Layout(rules)


def layout_of(kind: str, new: bool = False) -> Layout:
    if kind != "vit":
        return _layout("encoder.layer.{0}", NEW if new else OLD, DINO)
    return _layout("layers.{0}", NEW, NEW_VIT) if new else _layout("encoder.layer.{0}", OLD, OLD_VIT)


GELU = {"gelu": "erf", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}
INTERPOLATION = {2: "bilinear", 3: "bicubic"}  # Pillow's numbers
KINDS = ("vit", "dinov2", "dinov2_with_registers")
NORM_EPS = {"vit": 1e-12, "dinov2": 1e-6, "dinov2_with_registers": 1e-6}  # where config.json does not say


def read(source: Tensors, config: Mapping[str, Any], folder: Path, image_size: Size | None = None) -> Foreign:
    """Weights in transformers' names; `config` is the config.json that stands beside them, in `folder`."""
    where, kind = source.where, config.get("model_type")
    if kind not in KINDS:
        raise UserError(f"{where} is a '{kind}' model of transformers, and vitrail reads {', '.join(KINDS)}")
    source = source.without_prefix(*PREFIXES)
    source = source.named({name: name for name in source.shapes if _is_read(name, source, kind)})
    if "pooler.dense.weight" in source.shapes and config.get("pooler_act", "tanh") != "tanh":
        raise UserError(f"{where} has a pooler with '{config['pooler_act']}', and the representation layer is tanh")
    if kind != "vit" and "classifier.weight" in source.shapes:
        raise UserError(
            f"{where} classifies by the class token beside the mean of the patches, which no network of vitrail does; "
            "its backbone alone can be read"
        )
    details = {
        "heads": config.get("num_attention_heads", 12),
        "gelu": pick(config.get("hidden_act", "gelu"), GELU, "activation", where),
        "norm_eps": config.get("layer_norm_eps", NORM_EPS[kind]),
    }
    if isinstance(config.get("layerscale_value"), float):
        details["layer_scale"] = config["layerscale_value"]
    told = [size_of(config.get("image_size", 224), where)]
    new = any(".q_proj." in name for name in source.shapes)
    model, state = translate(
        source,
        layout_of(kind, new),
        lambda blank: vit_config(blank, where, told, image_size, **details),
        _register_rows,
    )
    file = folder / "preprocessor_config.json"
    settings = read_json(file) if file.is_file() else {}
    return Foreign(
        model,
        state,
        _preprocess(settings, model.image_size, model.channels, where),
        _classes(config.get("id2label"), model.num_classes),
        licence=str(config.get("license") or ""),
        assumed="" if settings else "no preprocessor_config.json: preprocessing is transformers' default for ViT",
    )


def _is_read(name: str, source: Tensors, kind: str) -> bool:
    """Whether the network's answer depends on it: a classifier looks at the class token, never at the pooler."""
    if name == MASK:
        return kind == "vit"  # where it is the mark of another network, and not just left over
    return not (name.startswith("pooler.") and "classifier.weight" in source.shapes)


def _register_rows(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Registers have no positions there, and rows of zeros, which add nothing, in ours."""
    table, registers = state.get("positions.table"), state.get("tokens.registers")
    if table is None or registers is None or table.ndim != 3 or registers.ndim != 3:
        return state
    zeros = torch.zeros(1, registers.shape[1], table.shape[2], device=table.device)
    return {**state, "positions.table": concatenate([table[:, :1], zeros, table[:, 1:]], dim=1)}


def _preprocess(told: Mapping[str, Any], size: Size, channels: int, where: str) -> Preprocess:
    """The image processor's steps; what it leaves out is the default of transformers' ViTImageProcessor."""
    if not told.get("do_rescale", True) or told.get("rescale_factor", 1 / 255) != 1 / 255:
        raise UserError(f"{where}: its preprocessing does not scale pixels by 1/255, which vitrail's always does")
    normalise = told.get("do_normalize", True)
    mean = told.get("image_mean", [0.5] * 3) if normalise else [0.0]
    std = told.get("image_std", [0.5] * 3) if normalise else [1.0]
    values = dict(
        size=size,
        interpolation=pick(told.get("resample", 2), INTERPOLATION, "resampling", where),
        mean=per_channel(mean, channels, where),
        std=per_channel(std, channels, where),
        **_resize(told, size, where),
    )
    return validate(Preprocess, values, f"{where} preprocessing")


def _resize(told: Mapping[str, Any], size: Size, where: str) -> dict[str, Any]:
    """Squash to the size, or scale the short side and crop the centre."""
    target = told.get("size", {})
    short_side = target.get("shortest_edge") if isinstance(target, Mapping) else None
    crops = told.get("do_center_crop", False)
    if short_side is None and not crops:
        return {"resize": "squash"}
    if short_side is None or not crops or short_side < min(size):
        raise UserError(f"{where}: vitrail's preprocessing cannot express its resizing to {target} and cropping")
    return {"resize": "short_side", "crop_fraction": min(size) / short_side}


def _classes(names: Any, count: int) -> tuple[str, ...]:
    """`id2label` in the order of the logits."""
    if not isinstance(names, Mapping) or {str(index) for index in range(count)} != set(names):
        return ()
    return tuple(str(names[str(index)]) for index in range(count))
