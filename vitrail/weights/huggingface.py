"""Hugging Face transformers' ViT: config.json, model.safetensors (whole or in shards), preprocessor_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitrail.config import Preprocess, Size, validate
from vitrail.errors import UserError
from vitrail.weights.foreign import Foreign, Layout, convert, load_tensors, per_channel, pick, read_json, size_of

MARK = "embeddings.patch_embeddings.projection.weight"  # after the "vit." that a classifier's names begin with
LAYOUT = Layout(
    parameters={"tokens.class_token": "embeddings.cls_token", "positions.table": "embeddings.position_embeddings"},
    modules={
        "tokens.projection": "embeddings.patch_embeddings.projection",
        "encoder.norm": "layernorm",
        "representation.layer": "pooler.dense",
        "head": "classifier",
    },
    block="encoder.layer.{}.",
    block_modules={
        "norm1": ("layernorm_before",),
        "attention.qkv": ("attention.attention.query", "attention.attention.key", "attention.attention.value"),
        "attention.out": ("attention.output.dense",),
        "norm2": ("layernorm_after",),
        "mlp.up": ("intermediate.dense",),
        "mlp.down": ("output.dense",),
    },
)
# transformers 5 has shorter names inside; it writes the old ones unless told otherwise.
NEW_LAYOUT = Layout(
    parameters=LAYOUT.parameters,
    modules=LAYOUT.modules,
    block="layers.{}.",
    block_modules={
        "norm1": ("layernorm_before",),
        "attention.qkv": ("attention.q_proj", "attention.k_proj", "attention.v_proj"),
        "attention.out": ("attention.o_proj",),
        "norm2": ("layernorm_after",),
        "mlp.up": ("mlp.fc1",),
        "mlp.down": ("mlp.fc2",),
    },
)
GELU = {"gelu": "erf", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}
INTERPOLATION = {2: "bilinear", 3: "bicubic"}  # Pillow's numbers


def read(path: Path, config: Mapping[str, Any], image_size: Size | None = None) -> Foreign:
    """Weights in transformers' names; `config` is the config.json that stands beside them."""
    where = f"'{path}'"
    kind = config.get("model_type")
    if kind != "vit":
        raise UserError(f"{where} is a '{kind}' model of transformers, and vitrail reads 'vit'")
    gelu = pick(config.get("hidden_act", "gelu"), GELU, "activation", where)
    tensors = {name.removeprefix("vit."): tensor for name, tensor in load_tensors(path).items()}
    if "classifier.weight" in tensors:  # a classifier looks at the class token itself, never at the pooler
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("pooler.")}
    elif "pooler.dense.weight" in tensors and config.get("pooler_act", "tanh") != "tanh":
        raise UserError(f"{where} has a pooler with '{config['pooler_act']}', and the representation layer is tanh")
    model, state = convert(
        tensors,
        LAYOUT if LAYOUT.depth(tensors) else NEW_LAYOUT,
        where,
        [size_of(config.get("image_size", 224), where)],
        image_size,
        heads=config.get("num_attention_heads", 12),
        gelu=gelu,
        norm_eps=config.get("layer_norm_eps", 1e-12),
    )
    file = path.with_name("preprocessor_config.json")
    told = read_json(file) if file.is_file() else {}
    preprocess = _preprocess(told, model.image_size, model.channels, where)
    return Foreign(
        model,
        state,
        preprocess,
        _classes(config.get("id2label"), model.num_classes),
        assumed="" if told else "no preprocessor_config.json: preprocessing is transformers' default for ViT",
    )


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
