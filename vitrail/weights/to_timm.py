"""Networks as folders that timm loads with `timm.create_model("local-dir:FOLDER", pretrained=True)`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from vitrail import strict_json
from vitrail.atomic import whole_file
from vitrail.config import ModelConfig, NetworkConfig, Preprocess, ResNetConfig
from vitrail.models.variants import RESNETS
from vitrail.weights.bundle import Card
from vitrail.weights.target_compat import lacking, ours_alone, side, ungridded
from vitrail.weights.timm import CONVOLUTIONS, GELU, NORM_EPS, POOL, STEM, STEM_ONLY, resnet_layout, vit_layout

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


def adopted(card: Card) -> Card:
    """The card with the constants that timm fixes."""
    preprocess = card.preprocess.model_copy(update={"antialias": True})
    if isinstance(card.model, ResNetConfig):
        fixed: dict[str, Any] = {**CONVOLUTIONS, "pool_padding": "zeros"}
    else:
        stem = card.model.stem and card.model.stem.model_copy(update=CONVOLUTIONS)
        fixed = {"norm_eps": NORM_EPS, "stem": stem}
    return card.model_copy(update={"model": card.model.model_copy(update=fixed), "preprocess": preprocess})


def cannot(card: Card) -> str | None:
    """What of this network timm's cannot be; None if they can be it."""
    model, spec = card.model, card.preprocess
    if spec.resize == "short_side" and spec.size[0] != spec.size[1]:
        size = "x".join(map(str, spec.size))
        return f"takes {size} images cut from pictures that keep their aspect, and timm scales those otherwise"
    if isinstance(model, ResNetConfig):
        known = ", ".join(name.removeprefix("resnetv2_").removesuffix("_bit") for name in BIT.values())
        named = (model.blocks, model.width / STEM_WIDTH) in BIT
        shape = f"has blocks {model.blocks} from {model.width} channels on"
        return None if named else f"{shape}, and of BiT's ResNets timm has {known} alone"
    if strange := ours_alone(model, "timm"):
        return strange
    if model.representation:
        return lacking("a representation layer", "timm")
    if model.stem and (model.stem.blocks not in STEMS or model.stem.width != STEM_WIDTH):
        shape = f"has a stem of {model.stem.width} channels with blocks {model.stem.blocks}"
        return f"{shape}, and timm has stems of {STEM_WIDTH} channels with blocks {', '.join(map(str, STEMS))} alone"
    return None


def write(folder: Path, card: Card, state: Mapping[str, Tensor]) -> None:
    """model.safetensors and config.json of a network that `cannot` has no objection to."""
    model, classes = card.model, list(card.classes)
    if isinstance(model, ResNetConfig):
        tensors = resnet_layout().write(state, heads=1)
    else:
        model, state = ungridded(model, state)
        layout = vit_layout(STEM if model.stem and model.stem.blocks else STEM_ONLY)
        tensors = layout.write(state, model.heads)
    name, args = architecture(model)
    settings: dict[str, Any] = {"architecture": name, "num_classes": model.num_classes, "model_args": args}
    if isinstance(model, ModelConfig):
        settings |= {"num_features": model.width, "global_pool": args["global_pool"]}
    settings |= {"label_names": classes} if classes else {}
    settings["pretrained_cfg"] = _pretrained(card, model)
    with whole_file(folder / "model.safetensors") as temporary:
        save_file(tensors, temporary, metadata={"format": "pt"})
    text = strict_json.dumps(settings, indent=2, ensure_ascii=False)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")


def architecture(model: NetworkConfig) -> tuple[str, dict[str, Any]]:
    """timm's name, and the arguments that make it this network."""
    if isinstance(model, ResNetConfig):
        args = {"in_chans": model.channels, "num_classes": model.num_classes}
        return BIT[model.blocks, model.width // STEM_WIDTH], args
    name = STEMS[model.stem.blocks] if model.stem else "vit_base_patch16_224"
    pool = {ours: theirs for theirs, ours in POOL.items()}[model.pool]
    values: dict[str, Any] = {
        "img_size": list(model.image_size),
        "patch_size": side(model.patch),
        "in_chans": model.channels,
        "num_classes": model.num_classes,
        "global_pool": pool,
        "embed_dim": model.width,
        "depth": model.depth,
        "num_heads": model.heads,
        "mlp_ratio": _ratio(model),
        "class_token": model.class_token,
        "pos_embed": "none" if model.positions == "none" else "learn",
        "no_embed_class": not model.prefix_positions,
        "reg_tokens": model.registers,
        "fc_norm": model.norm == "after_pool",
        "act_layer": {ours: theirs for theirs, ours in GELU.items()}[model.gelu],
    }
    if model.layer_scale is not None:
        values["init_values"] = model.layer_scale
    if model.pool == "map" and model.prefix:
        values["pool_include_prefix"] = True
    return name, values


def _ratio(model: ModelConfig) -> float:
    """timm takes the whole part of width times this, which rounding must not bring below the size of the MLP."""
    ratio = model.mlp_dim / model.width
    return ratio if int(model.width * ratio) == model.mlp_dim else (model.mlp_dim + 0.5) / model.width


def _pretrained(card: Card, model: NetworkConfig) -> dict[str, Any]:
    """What timm's data pipeline and its loading of weights go by."""
    spec: Preprocess = card.preprocess
    squash = spec.resize == "squash"
    resnet = isinstance(model, ResNetConfig)
    values: dict[str, Any] = {
        "num_classes": model.num_classes,
        "input_size": [spec.channels, *spec.size],
        "fixed_input_size": not resnet,
        "interpolation": spec.interpolation,
        "crop_pct": 1.0 if squash else spec.crop_fraction,
        "crop_mode": "squash" if squash else "center",
        "mean": list(spec.mean),
        "std": list(spec.std),
        "classifier": "head.fc" if resnet else "head",
    }
    if model.channels == 3:  # timm would rework the first convolution of any other number, which it is told by this
        stem = None if isinstance(model, ResNetConfig) else model.stem
        hybrid = f"{STEM if stem and stem.blocks else STEM_ONLY}.conv" if stem else "patch_embed.proj"
        values["first_conv"] = "stem.conv" if resnet else hybrid
    return values | ({"license": card.licence} if card.licence else {})
