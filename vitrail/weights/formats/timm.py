"""timm's VisionTransformer, its hybrids and BiT's ResNets: a safetensors file, and the config.json beside it.

timm loads what is written here with `timm.create_model("local-dir:FOLDER", pretrained=True)`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.config import ModelConfig, NetworkConfig, Preprocess, ResNetConfig, Size, validate
from vitrail.errors import UserError
from vitrail.models.variants import RESNETS, SIZES
from vitrail.weights.bundle import Card
from vitrail.weights.formats.base import (
    ForeignWeights,
    Format,
    class_names_in_order,
    convert_tensors,
    first_reason,
    join_notes,
    make_card,
    missing_features,
    unsupported_crop,
    vitrail_only_features,
    with_position_table,
    write_folder,
)
from vitrail.weights.formats.json_settings import Settings, size_from_json, size_to_json
from vitrail.weights.formats.shapes import resnet_config, square_image_note, vit_config
from vitrail.weights.formats.table import MODULE, SAME, TENSOR, WEIGHT, Form, State, Table, bottleneck
from vitrail.weights.reference_models import Reference, ReferenceUnavailable, import_library, loading
from vitrail.weights.tensors import TensorSource, read_json

# ---- tensors

MARK = "patch_embed.proj.weight"  # no other layout has a tensor of this name
RESNET_MARK = "stages.0.blocks.0.conv1.weight"
STEM, STEM_ONLY = "patch_embed.backbone.stem", "patch_embed.backbone"  # a hybrid's root, with stages and without


def vit_table(stem: str) -> Table:
    """Nearly all of our names are timm's own."""
    block = ("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2")
    pool = ("q", "kv", "proj", "norm", "mlp.fc1", "mlp.fc2")
    alike = ["patch_embed.proj", "norm", "fc_norm", "head"]
    alike += [f"blocks.{{0}}.{name}" for name in block] + [f"attn_pool.{name}" for name in pool]
    alone = ["cls_token", "reg_token", "attn_pool.latent", "blocks.{0}.ls1.gamma", "blocks.{0}.ls2.gamma"]
    return Table(
        (TENSOR, {**dict(zip(alone, alone, strict=True)), "pos_embed.table": "pos_embed"}),
        (MODULE, {**dict(zip(alike, alike, strict=True)), "patch_embed.stem.norm": f"{stem}.norm"}),
        (WEIGHT, {"patch_embed.stem.root": f"{stem}.conv"}),
        *bottleneck("patch_embed.stem.stages.{0}.{1}", "patch_embed.backbone.stages.{0}.blocks.{1}"),
    )


POINT = Form(lambda t: t.flatten(1), lambda t: t[:, :, None, None])  # a 1x1 convolution that we have as a matrix
RESNET_TABLE = Table(
    (WEIGHT, {"root": "stem.conv"}),
    (MODULE, {"norm": "norm"}),
    ({".weight": (".weight", POINT), ".bias": (".bias", SAME)}, {"head": "head.fc"}),
    *bottleneck("stages.{0}.{1}", "stages.{0}.blocks.{1}"),
)

# ---- settings

NORM_EPS = 1e-6
CONVOLUTIONS: dict[str, Any] = {"norm_eps": 1e-5, "weight_eps": 1e-8, "weight_eps_in": "variance"}
RESNET: dict[str, Any] = {**CONVOLUTIONS, "pool_padding": "zeros"}
GELU = {"gelu": "erf", "gelu_tanh": "tanh"}
POOL = {"token": "token", "avg": "gap", "map": "map"}

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

# timm builds stems and ResNets by name alone, and only these; all else of a Vision Transformer can be said beside it.
STEMS = {
    (): "vit_tiny_r_s16_p8_224",
    (2, 2, 2, 2): "vit_base_r26_s32_224",
    (3, 4, 9): "vit_base_r50_s16_224",
    (3, 4, 6, 3): "vit_large_r50_s32_224",
}
BIT = {(RESNETS[layers], factor): f"resnetv2_{layers}x{factor}_bit" for layers, factor in [
    ("50", 1), ("50", 3), ("101", 1), ("101", 3), ("152", 2), ("152", 4)
]}  # fmt: skip
STEM_WIDTH = 64


def model_args(model: NetworkConfig) -> dict[str, Any]:
    """The arguments with which timm's network is this one."""
    shared = {"in_chans": model.channels, "num_classes": model.num_classes}
    if isinstance(model, ResNetConfig):
        return shared
    ratio = model.mlp_dim / model.width  # of which timm takes the whole part, once multiplied
    args = {
        "img_size": list(model.image_size),
        "patch_size": size_to_json(model.patch),
        **shared,
        "global_pool": _theirs(POOL, model.pool),
        "embed_dim": model.width,
        "depth": model.depth,
        "num_heads": model.heads,
        "mlp_ratio": ratio if int(model.width * ratio) == model.mlp_dim else (model.mlp_dim + 0.5) / model.width,
        "class_token": model.class_token,
        "pos_embed": "none" if model.positions == "none" else "learn",
        "no_embed_class": not model.prefix_positions,
        "reg_tokens": model.registers,
        "fc_norm": model.norm == "after_pool",
        "act_layer": _theirs(GELU, model.gelu),
    }
    scale = {} if model.layer_scale is None else {"init_values": model.layer_scale}
    return args | scale | ({"pool_include_prefix": True} if model.pool == "map" and model.prefix else {})


def architecture(model: NetworkConfig) -> str:
    if isinstance(model, ResNetConfig):
        return BIT[model.blocks, model.width // STEM_WIDTH]
    return STEMS[model.stem.blocks] if model.stem else "vit_base_patch16_224"


def _theirs(words: Mapping[str, str], ours: str) -> str:
    return next(theirs for theirs, word in words.items() if word == ours)


# Arguments that the outputs do not depend on, or that are looked at one by one when a file is read.
FREE = {"num_heads", "act_layer", "norm_layer", "mlp_ratio", "init_values", "fc_norm", "global_pool"}
FREE |= {"no_embed_class", "pool_include_prefix", "weight_init", "fix_init", "dynamic_img_size", "drop_path_rate"}
FREE |= {f"{what}drop_rate" for what in ("", "pos_", "patch_", "proj_", "attn_")}
RESNET_FREE = {"drop_rate", "drop_path_rate"}
# What our networks have one value of.
FIXED = dict.fromkeys(("qkv_bias", "proj_bias", "final_norm"), True)
FIXED |= dict.fromkeys(("qk_norm", "scale_attn_norm", "scale_mlp_norm", "pre_norm", "dynamic_img_pad"), False)


def _check_args(args: Settings, model: NetworkConfig) -> None:
    """`model_args` of a config.json against what the tensors show."""
    free, shown = RESNET_FREE, model_args(model)
    if isinstance(model, ModelConfig):
        free, shown = FREE, shown | FIXED | {"img_size": model.image_size, "patch_size": model.patch}
        args.check_ratio(model)
    if strange := sorted(args.values.keys() - free - shown.keys()):
        raise UserError(f"{args.where}: its config.json has model_args.{strange[0]}, which vitrail does not know")
    args.check({key: value for key, value in shown.items() if key not in free})
    if not isinstance(model, ModelConfig) or not model.prefix:
        return
    if model.pool == "gap" and args.get("pool_include_prefix"):
        raise UserError(f"{args.where} pools the class token with the patches, which vitrail's network does not")
    if model.pool == "map" and not args.get("pool_include_prefix"):
        raise UserError(
            f"{args.where} leaves class token and registers out of attention pooling, which vitrail's does not"
        )


# ---- reading


def read(source: TensorSource, image_size: Size | None = None) -> ForeignWeights:
    """Weights in timm's names; without timm's config.json beside them, sizes of the paper are assumed."""
    where, config = source.where, source.beside("config.json") or {}
    if not config.keys() & {"architecture", "pretrained_cfg"}:
        config = {}
    trained = config.get("pretrained_cfg", config)  # older files have one flat document
    values, name = config.get("model_args") or {}, config.get("architecture")
    if not isinstance(trained, Mapping) or not isinstance(values, Mapping) or not isinstance(name, str | None):
        raise UserError(f"{where}: the config.json beside it is not as timm writes it")
    args = Settings(values, where, "model_args.")
    told = [size] if (size := args.size("img_size", asked=image_size)) else []
    if isinstance(trained.get("input_size"), list):
        told.append(size_from_json(trained["input_size"][1:], where))  # channels, height, width
    vit = MARK in source.shapes
    model, state = (_read_vit if vit else _read_resnet)(source, config, args, told, image_size)
    names, count = config.get("label_names") or trained.get("label_names"), model.num_classes
    classes = class_names_in_order(names, count)
    misnamed = f"classes without names, since its label_names are not {count} names"
    assumed = join_notes(
        "" if config else VIT_UNSAID if vit else RESNET_UNSAID,
        square_image_note(model, told, image_size),
        misnamed if names and count and not classes else "",
    )
    preprocess = _preprocess(trained if config else VIT_DEFAULTS if vit else RESNET_DEFAULTS, model, where)
    card = make_card(model, preprocess, classes=classes, licence=str(trained.get("license") or ""))
    return ForeignWeights(card, state, assumed)


VIT_UNSAID = "no config.json: heads, GELU and preprocessing are timm's defaults for a ViT"
RESNET_UNSAID = "no config.json: padding, constants and preprocessing are those of timm's BiT"


def _read_vit(
    source: TensorSource, config: Mapping[str, Any], args: Settings, told: Sequence[Size], asked: Size | None
) -> tuple[NetworkConfig, dict[str, Tensor]]:
    def configure(blank: State) -> ModelConfig:
        details = {"norm_eps": NORM_EPS, "stem": CONVOLUTIONS, **_hidden(source, config.get("architecture"), args)}
        pool = Settings({"pool": args.get("global_pool") or config.get("global_pool") or ""}, source.where)
        if pool.get("pool"):
            details["pool"] = pool.pick("pool", POOL, "pooling")
        if "pos_embed" not in source.shapes:
            details["positions"] = "none"
        prefix_rows = [not args.get("no_embed_class")] if "no_embed_class" in args.values else [True, False]
        model = vit_config(blank, source.where, told, asked, prefix_rows, **details)
        _check_args(args, model)
        return model

    return convert_tensors(source, vit_table(STEM if f"{STEM}.conv.weight" in source.shapes else STEM_ONLY), configure)


def _read_resnet(
    source: TensorSource, config: Mapping[str, Any], args: Settings, told: Sequence[Size], asked: Size | None
) -> tuple[NetworkConfig, dict[str, Tensor]]:
    name = str(config.get("architecture", "")).partition(".")[0]
    if config and not re.fullmatch(r"resnetv2_\d+x\d+_bit", name):
        raise UserError(f"{source.where} is timm's '{name}', and of its ResNets vitrail reads those of BiT")

    def configure(blank: State) -> ResNetConfig:
        model = resnet_config(blank, source.where, asked or next(iter(told), (224, 224)), **RESNET)
        _check_args(args, model)
        return model

    return convert_tensors(source, RESNET_TABLE, configure)


def _hidden(source: TensorSource, architecture: str | None, args: Settings) -> dict[str, Any]:
    """Heads and GELU, which the tensors do not show; the name of the architecture stands for them."""
    if args.get("norm_layer") not in (None, "layernorm"):
        raise UserError(f"{args.where} has norm layers '{args.get('norm_layer')}', and vitrail's network has LayerNorm")
    told: dict[str, Any] = {}
    if isinstance(args.get("init_values"), float):
        told["layer_scale"] = args.get("init_values")
    if args.get("num_heads") is not None:
        told["heads"] = args.whole("num_heads", 0)
    if args.get("act_layer"):
        told["gelu"] = args.pick("act_layer", GELU, "activation")
    if {"heads", "gelu"} <= told.keys():
        return told
    if architecture is None:
        width = next(iter(source.shapes[MARK]), 0)
        if "heads" not in told and width not in HEADS_BY_WIDTH:
            raise UserError(
                f"{args.where} does not say how many attention heads it has: put timm's config.json, "
                "with model_args.num_heads, beside it"
            )
        return {"heads": HEADS_BY_WIDTH.get(width), "gelu": "erf", **told}
    name = architecture.partition(".")[0]  # "vit_base_patch16_224.augreg_in21k": after the dot, the weights
    match = next(filter(None, (re.fullmatch(pattern, name) for pattern in KNOWN)), None)
    if not match and name not in HEADS_BY_NAME:
        raise UserError(
            f"{args.where}: vitrail does not know the settings of timm's '{name}'; "
            "its config.json must say model_args.num_heads and model_args.act_layer"
        )
    by_size = HEADS[next(filter(None, match.groups()))] if match else 0
    return {"heads": HEADS_BY_NAME.get(name, by_size), "gelu": "erf", **told}


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


def _preprocess(trained: Mapping[str, Any], model: NetworkConfig, where: str) -> Preprocess:
    told = Settings(TIMM_DEFAULTS | {key: value for key, value in trained.items() if value is not None}, where)
    mode, fraction = told.get("crop_mode"), told.get("crop_pct")
    if mode not in ("center", "squash") or (mode == "squash" and fraction != 1):
        raise UserError(
            f"{where} was trained with crop mode '{mode}' and crop_pct {fraction}, "
            "which vitrail's preprocessing cannot express"
        )
    values = {
        "size": model.image_size,
        "resize": "short_side" if mode == "center" else "squash",
        "crop_fraction": fraction,
        "interpolation": told.get("interpolation"),
        "mean": told.per_channel("mean", model.channels),
        "std": told.per_channel("std", model.channels),
    }
    return validate(Preprocess, values, f"{where} preprocessing")


# ---- writing


def adopt_constants(card: Card) -> Card:
    preprocess = card.preprocess.model_copy(update={"antialias": True})
    fixed = RESNET
    if isinstance(card.model, ModelConfig):
        stem = card.model.stem and card.model.stem.model_copy(update=CONVOLUTIONS)
        fixed = {"norm_eps": NORM_EPS, "stem": stem}
    return card.model_copy(update={"model": card.model.model_copy(update=fixed), "preprocess": preprocess})


def unsupported_reason(card: Card) -> str | None:
    model, reasons = card.model, unsupported_crop(card.preprocess, "timm", "scales those otherwise")
    if isinstance(model, ResNetConfig):
        known = ", ".join(name.removeprefix("resnetv2_").removesuffix("_bit") for name in BIT.values())
        named, shape = (model.blocks, model.width / STEM_WIDTH) in BIT, f"has blocks {model.blocks} from {model.width}"
        return first_reason(reasons | {f"{shape} channels on, and of BiT's ResNets timm has {known} alone": not named})
    reasons |= vitrail_only_features(model, "timm") | missing_features(
        "timm", {"a representation layer": model.representation}
    )
    if stem := model.stem:
        known, named = ", ".join(map(str, STEMS)), stem.blocks in STEMS and stem.width == STEM_WIDTH
        shape = f"has a stem of {stem.width} channels with blocks {stem.blocks}"
        reasons[f"{shape}, and timm has stems of {STEM_WIDTH} channels with blocks {known} alone"] = not named
    return first_reason(reasons)


def write(folder: Path, card: Card, state: State) -> None:
    """model.safetensors and config.json."""
    model, spec = card.model, card.preprocess
    if isinstance(model, ResNetConfig):
        tensors, args, features = RESNET_TABLE.write(state), model_args(model), {}
        names = {"classifier": "head.fc", "first_conv": "stem.conv"}
    else:
        model, state = with_position_table(model, state)
        stem = STEM if model.stem and model.stem.blocks else STEM_ONLY
        tensors, args = vit_table(stem).write(state), model_args(model)
        features = {"num_features": model.width, "global_pool": args["global_pool"]}
        names = {"classifier": "head", "first_conv": f"{stem}.conv" if model.stem else "patch_embed.proj"}
    if model.channels != 3:  # timm would rework the first convolution of any other number, if it was told its name
        del names["first_conv"]
    squash = spec.resize == "squash"
    trained = {  # what timm's data pipeline and its loading of weights go by
        "num_classes": model.num_classes,
        "input_size": [spec.channels, *spec.size],
        "fixed_input_size": isinstance(model, ModelConfig),
        "interpolation": spec.interpolation,
        "crop_pct": 1.0 if squash else spec.crop_fraction,
        "crop_mode": "squash" if squash else "center",
        "mean": list(spec.mean),
        "std": list(spec.std),
        **names,
        **({"license": card.licence} if card.licence else {}),
    }
    config = {"architecture": architecture(model), "num_classes": model.num_classes, "model_args": args, **features}
    labels = {"label_names": list(card.classes)} if card.classes else {}
    write_folder(folder, tensors, {"config.json": config | labels | {"pretrained_cfg": trained}})


# ---- timm itself


def reference_model(path: Path, card: Card, source: TensorSource | None) -> Reference:
    """timm's network from a folder with its config.json; with the tensors of a file, its images are of the size in the
    card, of which the folder may not tell."""
    folder = path if path.is_dir() else path.parent
    if not (folder / "config.json").is_file():
        raise ReferenceUnavailable("timm builds no network without its config.json")
    name = read_json(folder / "config.json").get("architecture")
    timm = import_library("timm")
    if not isinstance(name, str) or not timm.is_model(name):
        told = isinstance(name, str)
        raise ReferenceUnavailable(
            f"timm has no architecture '{name}'" if told else "its config.json names no architecture"
        )
    place, options = f"local-dir:{folder}", dict[str, Any]()
    if source and isinstance(card.model, ModelConfig):
        options["img_size"] = card.model.image_size
    with loading(f"timm's {name}"):
        if source is None:
            network: nn.Module = timm.create_model(place, pretrained=True)
        else:
            tensors = source.load()
            with torch.device("meta"):  # what config.json asks for may be larger than any machine
                _check_fits(timm.create_model(place, pretrained=False, **options), tensors)
            network = timm.create_model(place, pretrained=False, **options)
            network.load_state_dict(tensors)
    return Reference("timm", network.float().eval())


def _check_fits(network: nn.Module, tensors: State) -> None:
    for name, tensor in network.state_dict().items():
        if name not in tensors:
            raise ValueError(f"its network has a tensor '{name}', and they do not")
        if tensor.shape != tensors[name].shape:
            shapes = tuple(tensor.shape), tuple(tensors[name].shape)
            raise ValueError(f"tensor '{name}' has shape {shapes[0]} in its network, and {shapes[1]} in them")


FORMAT = Format(
    "timm",
    "timm's",
    write,
    unsupported_reason,
    adopt_constants,
    matches=lambda source: MARK in source.shapes or RESNET_MARK in source.shapes,
    read=read,
    reference_model=reference_model,
    compared_with="timm",
)
