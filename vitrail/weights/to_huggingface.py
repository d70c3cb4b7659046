"""Networks as folders of transformers: ViT, or DINOv2 where there is LayerScale."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from vitrail.config import ModelConfig, Preprocess
from vitrail.weights.bundle import Card
from vitrail.weights.express import prefix_rows, ungridded
from vitrail.weights.huggingface import INTERPOLATION, MASK, layout_of

ACTIVATION = {"erf": "gelu", "tanh": "gelu_pytorch_tanh"}


def adopted(card: Card) -> Card:
    """The card with the constants that transformers fixes: its image processors smooth when they shrink."""
    return card.model_copy(update={"preprocess": card.preprocess.model_copy(update={"antialias": True})})


def cannot(card: Card) -> str | None:
    """Why neither its ViT nor its DINOv2 can be this network; None if one of them can."""
    model, spec = card.model, card.preprocess
    if not isinstance(model, ModelConfig):
        return "it has no BiT ResNet that takes these weights"
    if model.stem:
        return "its ViT has no convolutional stem"
    if model.pool != "token" or model.norm != "before_pool":
        return "its ViT reads the class token after the last norm, and nothing else"
    if model.positions in ("none", "relative") or model.positions_at != "stem" or model.axial:
        return "its attention and its positions are of other kinds"
    if model.representation and model.num_classes:
        return "its classifier reads the class token, with no representation layer between"
    if spec.resize == "short_side" and spec.size[0] != spec.size[1]:
        return "its image processor crops squares alone from images that keep their aspect"
    return _dinov2_cannot(model) if kind_of(model) != "vit" else None


def _dinov2_cannot(model: ModelConfig) -> str | None:
    if model.layer_scale is None:
        return "it has register tokens only together with LayerScale"
    if model.num_classes or model.representation:
        return "its DINOv2 has no classifier on the class token; without a head it could be written"
    if model.mlp_dim % model.width:
        return "the MLP of its DINOv2 is a whole multiple of the width"
    if model.image_size[0] != model.image_size[1] or model.patch[0] != model.patch[1]:
        return "its DINOv2 takes square images"
    return None


def kind_of(model: ModelConfig) -> str:
    if model.registers:
        return "dinov2_with_registers"
    return "vit" if model.layer_scale is None else "dinov2"


def write(folder: Path, card: Card, state: Mapping[str, Tensor]) -> None:
    """config.json, model.safetensors and preprocessor_config.json of a network that `cannot` does not object to."""
    assert isinstance(card.model, ModelConfig)
    model, state = prefix_rows(*ungridded(card.model, state))
    kind = kind_of(model)
    tensors = layout_of(kind).write(_without_register_rows(model, state), model.heads)
    if model.num_classes:
        tensors = {name if name.startswith("classifier.") else f"vit.{name}": t for name, t in tensors.items()}
    if kind == "dinov2_with_registers":
        tensors[MASK] = torch.zeros(1, model.width)  # which its files have, and nothing reads
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", _config(card, model, kind))
    _write_json(folder / "preprocessor_config.json", _processor(card.preprocess))


def _without_register_rows(model: ModelConfig, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Registers have no rows there: what their rows would add goes into the registers themselves."""
    if not model.registers:
        return state
    table, registers = state["positions.table"], state["tokens.registers"]
    first, rows, patches = table.split([1, model.registers, table.shape[1] - model.prefix], dim=1)
    return {**state, "positions.table": torch.cat([first, patches], dim=1), "tokens.registers": registers + rows}


def _config(card: Card, model: ModelConfig, kind: str) -> dict[str, Any]:
    values: dict[str, Any] = {
        "model_type": kind,
        "hidden_size": model.width,
        "num_hidden_layers": model.depth,
        "num_attention_heads": model.heads,
        "hidden_act": ACTIVATION[model.gelu],
        "layer_norm_eps": model.norm_eps,
        "image_size": _side(model.image_size),
        "patch_size": _side(model.patch),
        "num_channels": model.channels,
        "qkv_bias": True,
    }
    if kind == "vit":
        name = "ViTForImageClassification" if model.num_classes else "ViTModel"
        values |= {"intermediate_size": model.mlp_dim, "architectures": [name]}
    else:
        name = "Dinov2WithRegistersModel" if model.registers else "Dinov2Model"
        values |= {"mlp_ratio": model.mlp_dim // model.width, "layerscale_value": model.layer_scale}
        values |= {"architectures": [name], "use_swiglu_ffn": False}
        values |= {"num_register_tokens": model.registers} if model.registers else {"use_mask_token": False}
    if model.representation:
        values |= {"pooler_output_size": model.representation, "pooler_act": "tanh"}
    if model.num_classes:
        names = card.classes or tuple(f"LABEL_{index}" for index in range(model.num_classes))
        values["id2label"] = {str(index): name for index, name in enumerate(names)}
        values["label2id"] = {name: index for index, name in enumerate(names)}
    return values | ({"license": card.licence} if card.licence else {})


def _side(size: tuple[int, int]) -> int | list[int]:
    return size[0] if size[0] == size[1] else list(size)


def _processor(spec: Preprocess) -> dict[str, Any]:
    height, width = spec.size
    values: dict[str, Any] = {
        "do_resize": True,
        "resample": {ours: theirs for theirs, ours in INTERPOLATION.items()}[spec.interpolation],
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(spec.mean),
        "image_std": list(spec.std),
    }
    if spec.resize == "squash":
        return values | {"image_processor_type": "ViTImageProcessor", "size": {"height": height, "width": width}}
    edge = math.floor(height / spec.crop_fraction + 1e-6)  # as our own preprocessing rounds it
    crop = {"do_center_crop": True, "crop_size": {"height": height, "width": width}}
    return values | {"image_processor_type": "BitImageProcessor", "size": {"shortest_edge": edge}, **crop}


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
