"""timm's VisionTransformer: a safetensors file, and the config.json that timm writes beside it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitrail.config import Preprocess, Size, validate
from vitrail.errors import UserError
from vitrail.model.variants import SIZES
from vitrail.weights.foreign import Foreign, Layout, convert, load_tensors, per_channel, pick, size_of

LAYOUT = Layout(
    parameters={"tokens.class_token": "cls_token", "positions.table": "pos_embed"},
    modules={
        "tokens.projection": "patch_embed.proj",
        "encoder.norm": "norm",
        "pool.norm": "fc_norm",
        "head": "head",
    },
    block="blocks.{}.",
    block_modules={
        "norm1": ("norm1",),
        "attention.qkv": ("attn.qkv",),
        "attention.out": ("attn.proj",),
        "norm2": ("norm2",),
        "mlp.up": ("mlp.fc1",),
        "mlp.down": ("mlp.fc2",),
    },
)
MARK = "patch_embed.proj.weight"  # no other layout has a tensor of this name

# A timm name stands for settings that leave no trace in the tensors. These are the names whose settings are known:
# erf GELU, and heads by size. The others must state theirs: SigLIP's names, for one, differ in their GELU.
KNOWN = re.compile(
    r"(?:vit|deit)_(?P<size>tiny|small|base|large|huge|giant|gigantic)_patch\d+(?:_gap)?_\d+"
    r"|flexivit_(?P<flexi>small|base|large)|eva_(?P<eva>large)_patch14_\d+"
)
HEADS = {"tiny": 3, "small": 6, "base": 12, "large": 16, "huge": 16, "giant": 16, "gigantic": 16}
HEADS_BY_NAME = {"vit_base_patch16_gap_224": 16, "test_vit": 2}  # not what their size would tell
HEADS_BY_WIDTH = {width: heads for width, _, _, heads in SIZES.values()}
GELU = {"gelu": "erf", "gelu_tanh": "tanh"}
POOL = {"token": "token", "avg": "gap"}


def read(path: Path, config: Mapping[str, Any] | None = None, image_size: Size | None = None) -> Foreign:
    """Weights in timm's names; `config` is timm's config.json, without which sizes of the paper are assumed."""
    tensors = load_tensors(path)
    where = f"'{path}'"
    settings = dict(config or {})
    trained = settings.get("pretrained_cfg", settings)  # older files have one flat document
    args = settings.get("model_args") or {}
    if not isinstance(trained, Mapping) or not isinstance(args, Mapping):
        raise UserError(f"{where}: the config.json beside it is not as timm writes it")
    told = [size_of(args["img_size"], where)] if args.get("img_size") else []
    if isinstance(trained.get("input_size"), list):
        told.append(size_of(trained["input_size"][1:], where))  # channels, height, width
    details: dict[str, Any] = {"norm_eps": 1e-6, **_hidden(settings.get("architecture"), args, where)}
    if "heads" not in details:
        details["heads"] = _heads_by_width(len(tensors[MARK]) if tensors[MARK].ndim else 0, where)
    pool = args.get("global_pool") or settings.get("global_pool")
    if pool:
        details["pool"] = pick(pool, POOL, "pooling", where)
    flexi = str(settings.get("architecture")).startswith("flexivit")
    class_row = not args.get("no_embed_class", flexi)
    model, state = convert(tensors, LAYOUT, where, told, image_size, class_row, **details)
    return Foreign(
        model,
        state,
        _preprocess(trained if config else VIT_DEFAULTS, model.image_size, model.channels, where),
        _classes(settings.get("label_names") or trained.get("label_names"), model.num_classes),
        licence=str(trained.get("license") or ""),
        assumed="" if config else "no config.json: heads, GELU and preprocessing are timm's defaults for a ViT",
    )


def _hidden(architecture: Any, args: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Heads and GELU, which the tensors do not show; the name of the architecture stands for them."""
    if args.get("norm_layer") not in (None, "layernorm"):
        raise UserError(f"{where} has norm layers '{args['norm_layer']}', and vitrail's network has LayerNorm")
    if args.get("pool_include_prefix"):
        raise UserError(f"{where} pools the class token with the patches, which vitrail's network does not")
    hidden: dict[str, Any] = {}
    if args.get("num_heads"):
        hidden["heads"] = args["num_heads"]
    if args.get("act_layer"):
        hidden["gelu"] = pick(args["act_layer"], GELU, "activation", where)
    if architecture is None:
        return {"gelu": "erf", **hidden}
    name = str(architecture).partition(".")[0]  # "vit_base_patch16_224.augreg_in21k": after the dot, the weights
    match = KNOWN.fullmatch(name)
    if match or name in HEADS_BY_NAME:
        by_size = HEADS[next(filter(None, match.groups()))] if match else 0
        return {"heads": HEADS_BY_NAME.get(name, by_size), "gelu": "erf", **hidden}
    if len(hidden) < 2:
        raise UserError(
            f"{where}: vitrail does not know the settings of timm's '{name}'; "
            "its config.json must say model_args.num_heads and model_args.act_layer"
        )
    return hidden


def _heads_by_width(width: int, where: str) -> int:
    if width not in HEADS_BY_WIDTH:
        raise UserError(
            f"{where} does not say how many attention heads it has: put timm's config.json, "
            "with model_args.num_heads, beside it"
        )
    return HEADS_BY_WIDTH[width]


# What timm's ViTs are trained with unless their config says otherwise.
VIT_DEFAULTS = {"mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bicubic", "crop_pct": 0.9}
# What timm fills in for a key its config leaves out.
TIMM_DEFAULTS = {
    "mean": [0.485, 0.456, 0.406],
    "std": [0.229, 0.224, 0.225],
    "interpolation": "bicubic",
    "crop_pct": 0.875,
    "crop_mode": "center",
}


def _preprocess(trained: Mapping[str, Any], size: Size, channels: int, where: str) -> Preprocess:
    told = {key: trained.get(key) or default for key, default in TIMM_DEFAULTS.items()}
    if told["crop_mode"] not in ("center", "squash") or (told["crop_mode"] == "squash" and told["crop_pct"] != 1):
        raise UserError(
            f"{where} was trained with crop mode '{told['crop_mode']}' and crop_pct {told['crop_pct']}, "
            "which vitrail's preprocessing cannot express"
        )
    values = {
        "size": size,
        "resize": "short_side" if told["crop_mode"] == "center" else "squash",
        "crop_fraction": told["crop_pct"],
        "interpolation": told["interpolation"],
        "mean": per_channel(told["mean"], channels, where),
        "std": per_channel(told["std"], channels, where),
    }
    return validate(Preprocess, values, f"{where} preprocessing")


def _classes(names: Any, count: int) -> tuple[str, ...]:
    """Label names in the order of the logits; a list, or a mapping from index to name. None when they do not fit."""
    if isinstance(names, Mapping):
        names = [names.get(str(index)) for index in range(len(names))]
    if not isinstance(names, list) or len(names) != count or None in names:
        return ()
    return tuple(str(name) for name in names)
