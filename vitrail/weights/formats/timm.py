"""timm's layout of Vision Transformers, hybrids and BiT ResNets: a safetensors file next to a config.json.

timm loads a converted folder with `timm.create_model("local-dir:FOLDER", pretrained=True)`.
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

MARK = "patch_embed.proj.weight"  # a tensor name that no other layout has
RESNET_MARK = "stages.0.blocks.0.conv1.weight"
STEM, STEM_ONLY = "patch_embed.backbone.stem", "patch_embed.backbone"  # prefix of a hybrid's root with stages, without


def timm_vit_table(stem: str) -> Table:
    """The key mapping of a ViT or hybrid. Most names are the same in both libraries."""
    block = ("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2")
    pool = ("q", "kv", "proj", "norm", "mlp.fc1", "mlp.fc2")
    same_modules = ["patch_embed.proj", "norm", "fc_norm", "head"]
    same_modules += [f"blocks.{{0}}.{name}" for name in block] + [f"attn_pool.{name}" for name in pool]
    same_tensors = ["cls_token", "reg_token", "attn_pool.latent", "blocks.{0}.ls1.gamma", "blocks.{0}.ls2.gamma"]
    return Table(
        (TENSOR, {**dict(zip(same_tensors, same_tensors, strict=True)), "pos_embed.table": "pos_embed"}),
        (MODULE, {**dict(zip(same_modules, same_modules, strict=True)), "patch_embed.stem.norm": f"{stem}.norm"}),
        (WEIGHT, {"patch_embed.stem.root": f"{stem}.conv"}),
        *bottleneck("patch_embed.stem.stages.{0}.{1}", "patch_embed.backbone.stages.{0}.blocks.{1}"),
    )


POINT = Form(lambda t: t.flatten(1), lambda t: t[:, :, None, None])  # a 1x1 convolution in timm, a matrix in vitrail
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

# timm's model names imply settings that the tensors do not show. For names that match one of these patterns they are
# known: erf GELU, and heads by size. For others, config.json must state them (SigLIP's GELU differs, for example).
KNOWN_NAMES = [
    r"(?:vit|deit)_(tiny|small|base|large|huge|giant|gigantic)_patch\d+(?:_gap)?_\d+",
    r"deit3_(small|medium|base|large|huge)_patch\d+_\d+",
    r"vit_(small|base|large)_patch14(?:_reg4)?_dinov2",
    r"vit_(wee|little|medium|mediumd|betwixt|base)_patch16_reg\d_gap_\d+",
    r"vit_(tiny)_r_s16_p8_\d+|vit_(small|base)_r26_s32_\d+|vit_(base)_r50_s16_\d+|vit_(large)_r50_s32_\d+",
    r"flexivit_(small|base|large)|eva_(large)_patch14_\d+",
]
HEADS = {"tiny": 3, "small": 6, "base": 12, "large": 16, "huge": 16, "giant": 16, "gigantic": 16}
HEADS |= {"wee": 4, "little": 5, "medium": 8, "mediumd": 8, "betwixt": 10}
HEADS_BY_NAME = {"vit_base_patch16_gap_224": 16, "test_vit": 2}  # exceptions from HEADS
HEADS_BY_WIDTH = {width: heads for width, _, _, heads in SIZES.values()}

# timm builds stems and ResNets by model name only, and only these; other settings of a ViT are model_args.
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
    """Arguments of `timm.create_model` that build the same network."""
    shared = {"in_chans": model.channels, "num_classes": model.num_classes}
    if isinstance(model, ResNetConfig):
        return shared
    ratio = model.mlp_dim / model.width  # timm uses int(width * mlp_ratio)
    args = {
        "img_size": list(model.image_size),
        "patch_size": size_to_json(model.patch),
        **shared,
        "global_pool": _timm_name(POOL, model.pool),
        "embed_dim": model.width,
        "depth": model.depth,
        "num_heads": model.heads,
        "mlp_ratio": ratio if int(model.width * ratio) == model.mlp_dim else (model.mlp_dim + 0.5) / model.width,
        "class_token": model.class_token,
        "pos_embed": "none" if model.positions == "none" else "learn",
        "no_embed_class": not model.prefix_positions,
        "reg_tokens": model.registers,
        "fc_norm": model.norm == "after_pool",
        "act_layer": _timm_name(GELU, model.gelu),
    }
    scale = {} if model.layer_scale is None else {"init_values": model.layer_scale}
    return args | scale | ({"pool_include_prefix": True} if model.pool == "map" and model.prefix else {})


def architecture(model: NetworkConfig) -> str:
    """The timm model name to build the network from."""
    if isinstance(model, ResNetConfig):
        return BIT[model.blocks, model.width // STEM_WIDTH]
    return STEMS[model.stem.blocks] if model.stem else "vit_base_patch16_224"


def _timm_name(names: Mapping[str, str], option: str) -> str:
    return next(name for name, vitrail_option in names.items() if vitrail_option == option)


# model_args that do not affect outputs, or that `read` handles one by one.
FREE = {"num_heads", "act_layer", "norm_layer", "mlp_ratio", "init_values", "fc_norm", "global_pool"}
FREE |= {"no_embed_class", "pool_include_prefix", "weight_init", "fix_init", "dynamic_img_size", "drop_path_rate"}
FREE |= {f"{what}drop_rate" for what in ("", "pos_", "patch_", "proj_", "attn_")}
RESNET_FREE = {"drop_rate", "drop_path_rate"}
# model_args for which vitrail supports one value.
FIXED = dict.fromkeys(("qkv_bias", "proj_bias", "final_norm"), True)
FIXED |= dict.fromkeys(("qk_norm", "scale_attn_norm", "scale_mlp_norm", "pre_norm", "dynamic_img_pad"), False)


def _check_args(args: Settings, model: NetworkConfig) -> None:
    """Raise UserError if `model_args` of a config.json contradict the tensors or are not supported."""
    free, expected = RESNET_FREE, model_args(model)
    if isinstance(model, ModelConfig):
        free, expected = FREE, expected | FIXED | {"img_size": model.image_size, "patch_size": model.patch}
        args.check_ratio(model)
    if unknown := sorted(args.values.keys() - free - expected.keys()):
        raise UserError(f"{args.where}: its config.json has model_args.{unknown[0]}, which vitrail does not support")
    args.check({key: value for key, value in expected.items() if key not in free})
    if not isinstance(model, ModelConfig) or not model.prefix:
        return
    if model.pool == "gap" and args.get("pool_include_prefix"):
        raise UserError(f"{args.where} has pool_include_prefix with global_pool=avg, which vitrail does not support")
    if model.pool == "map" and not args.get("pool_include_prefix"):
        raise UserError(
            f"{args.where} has attention pooling without class token and registers, which vitrail does not support"
        )


# ---- reading


def read(source: TensorSource, image_size: Size | None = None) -> ForeignWeights:
    """Read weights in timm's layout; without timm's config.json, timm's defaults are assumed."""
    where, config = source.where, source.sibling_json("config.json") or {}
    if not config.keys() & {"architecture", "pretrained_cfg"}:
        config = {}
    trained = config.get("pretrained_cfg", config)  # older files have one flat document
    values, name = config.get("model_args") or {}, config.get("architecture")
    if not isinstance(trained, Mapping) or not isinstance(values, Mapping) or not isinstance(name, str | None):
        raise UserError(
            f"{where}: its config.json does not have timm's format (architecture, model_args, pretrained_cfg)"
        )
    args = Settings(values, where, "model_args.")
    known_sizes = [size] if (size := args.size("img_size", requested=image_size)) else []
    if isinstance(trained.get("input_size"), list):
        known_sizes.append(size_from_json(trained["input_size"][1:], where))  # channels, height, width
    vit = MARK in source.shapes
    model, state = (_read_vit if vit else _read_resnet)(source, config, args, known_sizes, image_size)
    names, count = config.get("label_names") or trained.get("label_names"), model.num_classes
    classes = class_names_in_order(names, count)
    no_names = f"no class names, since its label_names are not {count} names"
    assumed = join_notes(
        "" if config else VIT_ASSUMED if vit else RESNET_ASSUMED,
        square_image_note(model, known_sizes, image_size),
        no_names if names and count and not classes else "",
    )
    preprocess = _preprocess(trained if config else VIT_DEFAULTS if vit else RESNET_DEFAULTS, model, where)
    card = make_card(model, preprocess, classes=classes, licence=str(trained.get("license") or ""))
    return ForeignWeights(card, state, assumed)


VIT_ASSUMED = "no config.json: heads, GELU and preprocessing are timm's defaults for a ViT"
RESNET_ASSUMED = "no config.json: padding, constants and preprocessing are those of timm's BiT"


def _read_vit(
    source: TensorSource, config: Mapping[str, Any], args: Settings, known_sizes: Sequence[Size], requested: Size | None
) -> tuple[NetworkConfig, dict[str, Tensor]]:
    def configure(meta: State) -> ModelConfig:
        details = {
            "norm_eps": NORM_EPS,
            "stem": CONVOLUTIONS,
            **_settings_not_in_tensors(source, config.get("architecture"), args),
        }
        pool = Settings({"pool": args.get("global_pool") or config.get("global_pool") or ""}, source.where)
        if pool.get("pool"):
            details["pool"] = pool.pick("pool", POOL, "pooling")
        if "pos_embed" not in source.shapes:
            details["positions"] = "none"
        prefix_rows = [not args.get("no_embed_class")] if "no_embed_class" in args.values else [True, False]
        model = vit_config(meta, source.where, known_sizes, requested, prefix_rows, **details)
        _check_args(args, model)
        return model

    return convert_tensors(
        source, timm_vit_table(STEM if f"{STEM}.conv.weight" in source.shapes else STEM_ONLY), configure
    )


def _read_resnet(
    source: TensorSource, config: Mapping[str, Any], args: Settings, known_sizes: Sequence[Size], requested: Size | None
) -> tuple[NetworkConfig, dict[str, Tensor]]:
    name = str(config.get("architecture", "")).partition(".")[0]
    if config and not re.fullmatch(r"resnetv2_\d+x\d+_bit", name):
        raise UserError(
            f"{source.where} is timm's '{name}'; of timm's ResNets, vitrail reads only BiT (resnetv2_..._bit)"
        )

    def configure(meta: State) -> ResNetConfig:
        model = resnet_config(meta, source.where, requested or next(iter(known_sizes), (224, 224)), **RESNET)
        _check_args(args, model)
        return model

    return convert_tensors(source, RESNET_TABLE, configure)


def _settings_not_in_tensors(source: TensorSource, architecture: str | None, args: Settings) -> dict[str, Any]:
    """Heads and GELU, which the tensors do not show, from model_args or the architecture name."""
    if args.get("norm_layer") not in (None, "layernorm"):
        raise UserError(f"{args.where} has norm_layer '{args.get('norm_layer')}', and vitrail only supports layernorm")
    settings: dict[str, Any] = {}
    if isinstance(args.get("init_values"), float):
        settings["layer_scale"] = args.get("init_values")
    if args.get("num_heads") is not None:
        settings["heads"] = args.whole("num_heads", 0)
    if args.get("act_layer"):
        settings["gelu"] = args.pick("act_layer", GELU, "activation")
    if {"heads", "gelu"} <= settings.keys():
        return settings
    if architecture is None:
        width = next(iter(source.shapes[MARK]), 0)
        if "heads" not in settings and width not in HEADS_BY_WIDTH:
            raise UserError(
                f"{args.where} does not show its number of attention heads: put timm's config.json with "
                "model_args.num_heads next to it"
            )
        return {"heads": HEADS_BY_WIDTH.get(width), "gelu": "erf", **settings}
    name = architecture.partition(".")[0]  # vit_base_patch16_224.augreg_in21k: without the tag
    match = next(filter(None, (re.fullmatch(pattern, name) for pattern in KNOWN_NAMES)), None)
    if not match and name not in HEADS_BY_NAME:
        raise UserError(
            f"{args.where}: vitrail does not know the heads and GELU of timm's '{name}'; add model_args.num_heads and "
            "model_args.act_layer to its config.json"
        )
    by_size = HEADS[next(filter(None, match.groups()))] if match else 0
    return {"heads": HEADS_BY_NAME.get(name, by_size), "gelu": "erf", **settings}


# timm's preprocessing of these networks if there is no config.json.
VIT_DEFAULTS = {"mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bicubic", "crop_pct": 0.9}
RESNET_DEFAULTS = {"mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bilinear", "crop_pct": 0.875}
# timm's defaults for keys that are missing from a config.json.
TIMM_DEFAULTS = {
    "mean": [0.485, 0.456, 0.406],
    "std": [0.229, 0.224, 0.225],
    "interpolation": "bicubic",
    "crop_pct": 0.875,
    "crop_mode": "center",
}


def _preprocess(trained: Mapping[str, Any], model: NetworkConfig, where: str) -> Preprocess:
    settings = Settings(TIMM_DEFAULTS | {key: value for key, value in trained.items() if value is not None}, where)
    mode, fraction = settings.get("crop_mode"), settings.get("crop_pct")
    if mode not in ("center", "squash") or (mode == "squash" and fraction != 1):
        raise UserError(
            f"{where} has crop_mode '{mode}' with crop_pct {fraction}, which vitrail's preprocessing does not support"
        )
    values = {
        "size": model.image_size,
        "resize": "short_side" if mode == "center" else "squash",
        "crop_fraction": fraction,
        "interpolation": settings.get("interpolation"),
        "mean": settings.per_channel("mean", model.channels),
        "std": settings.per_channel("std", model.channels),
    }
    return validate(Preprocess, values, f"{where} preprocessing")


# ---- writing


def adopt_constants(card: Card) -> Card:
    """Replace constants by those that timm hard-codes."""
    preprocess = card.preprocess.model_copy(update={"antialias": True})
    fixed = RESNET
    if isinstance(card.model, ModelConfig):
        stem = card.model.stem and card.model.stem.model_copy(update=CONVOLUTIONS)
        fixed = {"norm_eps": NORM_EPS, "stem": stem}
    return card.model_copy(update={"model": card.model.model_copy(update=fixed), "preprocess": preprocess})


def unsupported_reason(card: Card) -> str | None:
    """Why timm cannot represent the network, or None."""
    model, reasons = card.model, unsupported_crop(card.preprocess, "timm", "resizes those differently")
    if isinstance(model, ResNetConfig):
        known = ", ".join(name.removeprefix("resnetv2_").removesuffix("_bit") for name in BIT.values())
        named, shape = (model.blocks, model.width / STEM_WIDTH) in BIT, f"has blocks {model.blocks} from {model.width}"
        return first_reason(reasons | {f"{shape} channels, and timm only has the BiT ResNets {known}": not named})
    reasons |= vitrail_only_features(model, "timm") | missing_features(
        "timm", {"a representation layer": model.representation}
    )
    if stem := model.stem:
        known, named = ", ".join(map(str, STEMS)), stem.blocks in STEMS and stem.width == STEM_WIDTH
        shape = f"has a stem of {stem.width} channels with blocks {stem.blocks}"
        reasons[f"{shape}, and timm only has stems of {STEM_WIDTH} channels with blocks {known}"] = not named
    return first_reason(reasons)


def write(folder: Path, card: Card, state: State) -> None:
    """Write model.safetensors and config.json."""
    model, spec = card.model, card.preprocess
    if isinstance(model, ResNetConfig):
        tensors, args, features = RESNET_TABLE.write(state), model_args(model), {}
        names = {"classifier": "head.fc", "first_conv": "stem.conv"}
    else:
        model, state = with_position_table(model, state)
        stem = STEM if model.stem and model.stem.blocks else STEM_ONLY
        tensors, args = timm_vit_table(stem).write(state), model_args(model)
        features = {"num_features": model.width, "global_pool": args["global_pool"]}
        names = {"classifier": "head", "first_conv": f"{stem}.conv" if model.stem else "patch_embed.proj"}
    if model.channels != 3:  # timm converts the first convolution to 3 channels if first_conv is given
        del names["first_conv"]
    squash = spec.resize == "squash"
    trained = {  # read by timm's data pipeline and weight loading
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
    """timm's network, built from the config.json of a folder. With `source`, its tensors and the image size of the card
    are used."""
    folder = path if path.is_dir() else path.parent
    if not (folder / "config.json").is_file():
        raise ReferenceUnavailable("timm needs its config.json to build the network")
    name = read_json(folder / "config.json").get("architecture")
    timm = import_library("timm")
    if not isinstance(name, str) or not timm.is_model(name):
        raise ReferenceUnavailable(
            f"timm has no architecture '{name}'" if isinstance(name, str) else "its config.json has no architecture"
        )
    local_dir, options = f"local-dir:{folder}", dict[str, Any]()
    if source and isinstance(card.model, ModelConfig):
        options["img_size"] = card.model.image_size
    with loading(f"timm's {name}"):
        if source is None:
            network: nn.Module = timm.create_model(local_dir, pretrained=True)
        else:
            tensors = source.load()
            with torch.device("meta"):  # config.json may describe a network that does not fit in memory
                _check_fits(timm.create_model(local_dir, pretrained=False, **options), tensors)
            network = timm.create_model(local_dir, pretrained=False, **options)
            network.load_state_dict(tensors)
    return Reference("timm", network.float().eval())


def _check_fits(network: nn.Module, tensors: State) -> None:
    for name, tensor in network.state_dict().items():
        if name not in tensors:
            raise ValueError(f"tensor '{name}' of its network is missing")
        if tensor.shape != tensors[name].shape:
            shapes = tuple(tensor.shape), tuple(tensors[name].shape)
            raise ValueError(f"tensor '{name}' has shape {shapes[1]}, and its network needs {shapes[0]}")


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
