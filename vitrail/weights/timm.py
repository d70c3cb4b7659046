"""timm's VisionTransformer, its hybrids and BiT's ResNets: a safetensors file, and the config.json beside it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from vitrail.config import ModelConfig, Preprocess, ResNetConfig, Size, validate
from vitrail.errors import UserError
from vitrail.models.variants import SIZES
from vitrail.weights import validate_hf_config as claims
from vitrail.weights.foreign import (
    Foreign,
    State,
    guessed_square,
    joined,
    per_channel,
    pick,
    resnet_config,
    size_of,
    translate,
    vit_config,
)
from vitrail.weights.layout import Form, Layout, Rule, both
from vitrail.weights.tensors import Tensors

MARK = "patch_embed.proj.weight"  # no other layout has a tensor of this name
RESNET_MARK = "stages.0.blocks.0.conv1.weight"
POINT = Form(lambda t: t.flatten(1), lambda t, _: t[:, :, None, None])  # a 1x1 convolution that we have as a matrix


def vit_layout(stem: str) -> Layout:
    """`stem`: where a hybrid has the root of its stem."""
    block, backbone = "blocks.{0}", "patch_embed.backbone"
    ours, stage, unit = "blocks.{0}", "patch_embed.stem.stages.{0}.{1}", f"{backbone}.stages.{{0}}.blocks.{{1}}"
    rules = [
        Rule("cls_token", ("cls_token",)),
        Rule("reg_token", ("reg_token",)),
        Rule("pos_embed.table", ("pos_embed",)),
        *both("patch_embed.proj", "patch_embed.proj"),
        *both(f"{ours}.norm1", f"{block}.norm1"),
        *both(f"{ours}.attn.qkv", f"{block}.attn.qkv"),
        *both(f"{ours}.attn.proj", f"{block}.attn.proj"),
        Rule(f"{ours}.ls1.gamma", (f"{block}.ls1.gamma",)),
        *both(f"{ours}.norm2", f"{block}.norm2"),
        *both(f"{ours}.mlp.fc1", f"{block}.mlp.fc1"),
        *both(f"{ours}.mlp.fc2", f"{block}.mlp.fc2"),
        Rule(f"{ours}.ls2.gamma", (f"{block}.ls2.gamma",)),
        *both("norm", "norm"),
        *both("fc_norm", "fc_norm"),
        Rule("attn_pool.latent", ("attn_pool.latent",)),
        *both("attn_pool.q", "attn_pool.q"),
        *both("attn_pool.kv", "attn_pool.kv"),
        *both("attn_pool.proj", "attn_pool.proj"),
        *both("attn_pool.norm", "attn_pool.norm"),
        *both("attn_pool.mlp.fc1", "attn_pool.mlp.fc1"),
        *both("attn_pool.mlp.fc2", "attn_pool.mlp.fc2"),
        *both("head", "head"),
        Rule("patch_embed.stem.root.weight", (f"{stem}.conv.weight",)),
        *both("patch_embed.stem.norm", f"{stem}.norm"),
        Rule(f"{stage}.shortcut.weight", (f"{unit}.downsample.conv.weight",)),
        *both(f"{stage}.shortcut_norm", f"{unit}.downsample.norm"),
        *_convolutions(stage, unit),
    ]
    return Layout(rules)


def _convolutions(ours: str, theirs: str) -> list[Rule]:
    names = ("conv1", "conv2", "conv3")
    norms = [rule for name in ("norm1", "norm2", "norm3") for rule in both(f"{ours}.{name}", f"{theirs}.{name}")]
    return [Rule(f"{ours}.{name}.weight", (f"{theirs}.{name}.weight",)) for name in names] + norms


def resnet_layout() -> Layout:
    ours, theirs = "stages.{0}.{1}", "stages.{0}.blocks.{1}"
    rules = [
        Rule("root.weight", ("stem.conv.weight",)),
        Rule(f"{ours}.shortcut.weight", (f"{theirs}.downsample.conv.weight",)),
        *_convolutions(ours, theirs),
        *both("norm", "norm"),
        Rule("head.weight", ("head.fc.weight",), POINT),
        Rule("head.bias", ("head.fc.bias",)),
    ]
    return Layout(rules)


STEM, STEM_ONLY = "patch_embed.backbone.stem", "patch_embed.backbone"
NORM_EPS = 1e-6
CONVOLUTIONS: dict[str, Any] = {"norm_eps": 1e-5, "weight_eps": 1e-8, "weight_eps_in": "variance"}

# A timm name stands for settings that leave no trace in the tensors. These are the names whose settings are known:
# erf GELU, and heads by size. The others must state theirs: SigLIP's names, for one, differ in their GELU.
KNOWN = [
    r"(?:vit|deit)_(tiny|small|base|large|huge|giant|gigantic)_patch\d+(?:_gap)?_\d+",
    r"deit3_(small|medium|base|large|huge)_patch\d+_\d+",
    r"vit_(small|base|large)_patch14(?:_reg4)?_dinov2",
    r"vit_(wee|little|medium|mediumd|betwixt|base)_patch16_reg\d_gap_\d+",
    r"vit_(tiny)_r_s16_p8_\d+|vit_(small|base)_r26_s32_\d+|vit_(base)_r50_s16_\d+|vit_(large)_r50_s32_\d+",
    r"flexivit_(small|base|large)|eva_(large)_patch14_\d+",
]
HEADS = {"tiny": 3, "small": 6, "base": 12, "large": 16, "huge": 16, "giant": 16, "gigantic": 16}
HEADS |= {"wee": 4, "little": 5, "medium": 8, "mediumd": 8, "betwixt": 10}
HEADS_BY_NAME = {"vit_base_patch16_gap_224": 16, "test_vit": 2}  # not what their size would tell
HEADS_BY_WIDTH = {width: heads for width, _, _, heads in SIZES.values()}
GELU = {"gelu": "erf", "gelu_tanh": "tanh"}
POOL = {"token": "token", "avg": "gap", "map": "map"}


def read(source: Tensors, config: Mapping[str, Any] | None = None, image_size: Size | None = None) -> Foreign:
    """Weights in timm's names; `config` is timm's config.json, without which sizes of the paper are assumed."""
    where, settings = source.where, dict(config or {})
    trained = settings.get("pretrained_cfg", settings)  # older files have one flat document
    args = settings.get("model_args") or {}
    name = settings.get("architecture")
    if not isinstance(trained, Mapping) or not isinstance(args, Mapping) or not isinstance(name, str | None):
        raise UserError(f"{where}: the config.json beside it is not as timm writes it")
    told = [size_of(args["img_size"], where)] if args.get("img_size") is not None else []
    claims.check_asked(image_size, next(iter(told), None), where)
    if isinstance(trained.get("input_size"), list):
        told.append(size_of(trained["input_size"][1:], where))  # channels, height, width
    if MARK in source.shapes:
        model, state, assumed = _read_vit(source, settings, args, told, image_size)
        defaults = VIT_DEFAULTS
    else:
        model, state, assumed = _read_resnet(source, settings, args, told, image_size)
        defaults = RESNET_DEFAULTS
    classes, misnamed = _classes(settings.get("label_names") or trained.get("label_names"), model.num_classes)
    return Foreign(
        model,
        state,
        _preprocess(trained if config else defaults, model.image_size, model.channels, where),
        classes,
        licence=str(trained.get("license") or ""),
        assumed=joined(assumed, misnamed),
    )


def _read_vit(
    source: Tensors, settings: Mapping[str, Any], args: Mapping[str, Any], told: Sequence[Size], asked: Size | None
) -> tuple[Any, dict[str, Tensor], str]:
    where, shape = source.where, source.shapes[MARK]

    def configure(blank: State) -> ModelConfig:
        details: dict[str, Any] = {"norm_eps": NORM_EPS, "stem": CONVOLUTIONS}
        details |= _hidden(settings.get("architecture"), args, where)
        if "heads" not in details:
            details["heads"] = _heads_by_width(shape[0] if shape else 0, where)
        pool = args.get("global_pool") or settings.get("global_pool")
        if pool:
            details["pool"] = pick(pool, POOL, "pooling", where)
        if "pos_embed" not in source.shapes:
            details["positions"] = "none"
        prefix_rows = [not args["no_embed_class"]] if "no_embed_class" in args else [True, False]
        model = vit_config(blank, where, told, asked, prefix_rows, **details)
        claims.check_timm(args, model, where)
        _check_pooling(model, bool(args.get("pool_include_prefix")), where)
        return model

    layout = vit_layout(STEM if f"{STEM}.conv.weight" in source.shapes else STEM_ONLY)
    model, state = translate(source, layout, configure)
    unsaid = "" if settings else "no config.json: heads, GELU and preprocessing are timm's defaults for a ViT"
    return model, state, joined(unsaid, guessed_square(model, told, asked))


def _check_pooling(model: Any, include_prefix: bool, where: str) -> None:
    """Attention pooling sees all tokens in ours; a mean is over the patches alone."""
    if model.pool == "gap" and model.prefix and include_prefix:
        raise UserError(f"{where} pools the class token with the patches, which vitrail's network does not")
    if model.pool == "map" and model.prefix and not include_prefix:
        raise UserError(f"{where} leaves class token and registers out of attention pooling, which vitrail's does not")


def _read_resnet(
    source: Tensors, settings: Mapping[str, Any], args: Mapping[str, Any], told: Sequence[Size], asked: Size | None
) -> tuple[Any, dict[str, Tensor], str]:
    name = str(settings.get("architecture", "")).partition(".")[0]
    if settings and not re.fullmatch(r"resnetv2_\d+x\d+_bit", name):
        raise UserError(f"{source.where} is timm's '{name}', and of its ResNets vitrail reads those of BiT")
    size = asked or next(iter(told), (224, 224))
    constants = {**CONVOLUTIONS, "pool_padding": "zeros"}

    def configure(blank: State) -> ResNetConfig:
        model = resnet_config(blank, source.where, size, **constants)
        claims.check_timm(args, model, source.where)
        return model

    model, state = translate(source, resnet_layout(), configure)
    assumed = "no config.json: padding, constants and preprocessing are those of timm's BiT"
    return model, state, "" if settings else assumed


def _hidden(architecture: Any, args: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Heads and GELU, which the tensors do not show; the name of the architecture stands for them."""
    if args.get("norm_layer") not in (None, "layernorm"):
        raise UserError(f"{where} has norm layers '{args['norm_layer']}', and vitrail's network has LayerNorm")
    hidden: dict[str, Any] = {}
    if isinstance(args.get("init_values"), float):
        hidden["layer_scale"] = args["init_values"]
    told: dict[str, Any] = {}
    if args.get("num_heads") is not None:
        told["heads"] = claims.whole(args, "num_heads", 0, where)
    if args.get("act_layer"):
        told["gelu"] = pick(args["act_layer"], GELU, "activation", where)
    if architecture is None:
        return {"gelu": "erf", **hidden, **told}
    name = str(architecture).partition(".")[0]  # "vit_base_patch16_224.augreg_in21k": after the dot, the weights
    match = next(filter(None, (re.fullmatch(pattern, name) for pattern in KNOWN)), None)
    if match or name in HEADS_BY_NAME:
        by_size = HEADS[next(filter(None, match.groups()))] if match else 0
        return {"heads": HEADS_BY_NAME.get(name, by_size), "gelu": "erf", **hidden, **told}
    if len(told) < 2:
        raise UserError(
            f"{where}: vitrail does not know the settings of timm's '{name}'; "
            "its config.json must say model_args.num_heads and model_args.act_layer"
        )
    return {**hidden, **told}


def _heads_by_width(width: int, where: str) -> int:
    if width not in HEADS_BY_WIDTH:
        raise UserError(
            f"{where} does not say how many attention heads it has: put timm's config.json, "
            "with model_args.num_heads, beside it"
        )
    return HEADS_BY_WIDTH[width]


# What timm's networks are trained with unless their config says otherwise.
VIT_DEFAULTS = {"mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bicubic", "crop_pct": 0.9}
RESNET_DEFAULTS = {"mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bilinear", "crop_pct": 0.875}
# What timm fills in for a key its config leaves out.
TIMM_DEFAULTS = {
    "mean": [0.485, 0.456, 0.406],
    "std": [0.229, 0.224, 0.225],
    "interpolation": "bicubic",
    "crop_pct": 0.875,
    "crop_mode": "center",
}


def _preprocess(trained: Mapping[str, Any], size: Size, channels: int, where: str) -> Preprocess:
    told = {key: default if trained.get(key) is None else trained[key] for key, default in TIMM_DEFAULTS.items()}
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


def _classes(names: Any, count: int) -> tuple[tuple[str, ...], str]:
    """Label names in the order of the logits; a list, or a mapping from index to name. None when they do not fit,
    and a note that says so."""
    if not names or not count:
        return (), ""
    if isinstance(names, Mapping):
        names = [names.get(str(index)) for index in range(len(names))]
    if not isinstance(names, list) or len(names) != count or None in names:
        return (), f"classes without names, since its label_names are not {count} names"
    return tuple(str(name) for name in names), ""
