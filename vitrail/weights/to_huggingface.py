"""Networks as folders of transformers: ViT, DINOv2 where there is LayerScale, BiT."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from vitrail import strict_json
from vitrail.atomic import whole_file
from vitrail.config import ModelConfig, NetworkConfig, ResNetConfig
from vitrail.weights import processor
from vitrail.weights.bundle import Card
from vitrail.weights.huggingface import (
    MASK,
    RESNET,
    RESNET_SETTINGS,
    layout_of,
    made_up_names,
    output_stride,
    resnet_layout,
)
from vitrail.weights.target_compat import lacking, ours_alone, prefix_rows, side, ungridded

ACTIVATION = {"erf": "gelu", "tanh": "gelu_pytorch_tanh"}


def adopted(card: Card) -> Card:
    """The card with the constants that transformers fixes; its image processors smooth when they shrink."""
    model = card.model.model_copy(update=RESNET) if isinstance(card.model, ResNetConfig) else card.model
    preprocess = card.preprocess.model_copy(update={"antialias": True})
    return card.model_copy(update={"model": model, "preprocess": preprocess})


LIBRARY = "transformers"
READS = {"token": "class token", "gap": "mean of the patches", "map": "attention pooling"}


def cannot(card: Card) -> str | None:
    """What of this network neither its ViT, its DINOv2 nor its BiT can be; None if one of them can be it."""
    model, spec = card.model, card.preprocess
    if spec.resize == "short_side" and spec.size[0] != spec.size[1]:
        size = "x".join(map(str, spec.size))
        return f"takes {size} images cut from pictures that keep their aspect, and transformers cuts squares alone"
    return _vit_cannot(model) if isinstance(model, ModelConfig) else None


def _vit_cannot(model: ModelConfig) -> str | None:
    if strange := ours_alone(model, LIBRARY):
        return strange
    if model.stem:
        return lacking("a convolutional stem", LIBRARY)
    if model.pool != "token":
        return f"reads the {READS[model.pool]}, and the ViT of {LIBRARY} the class token alone"
    if model.norm == "after_pool":
        return lacking("a norm after pooling", LIBRARY)
    if model.positions == "none":
        return f"has no positions, and the networks of {LIBRARY} all have some"
    if model.representation and model.num_classes:
        return lacking("a representation layer before the classifier", LIBRARY)
    return _dinov2_cannot(model) if kind_of(model) != "vit" else None


def _dinov2_cannot(model: ModelConfig) -> str | None:
    if model.layer_scale is None:
        return f"has register tokens without LayerScale, and {LIBRARY} has them only together with LayerScale"
    if model.num_classes or model.representation:
        return lacking("LayerScale with a classifier or representation layer on the class token", LIBRARY)
    if model.mlp_dim % model.width:
        return f"has an MLP of {model.mlp_dim}, and in the DINOv2 of {LIBRARY} it is a whole multiple of the width"
    if model.image_size[0] != model.image_size[1] or model.patch[0] != model.patch[1]:
        return f"takes images or patches that are not square, which the DINOv2 of {LIBRARY} does not"
    return None


def kind_of(model: ModelConfig) -> str:
    if model.registers:
        return "dinov2_with_registers"
    return "vit" if model.layer_scale is None else "dinov2"


def write(folder: Path, card: Card, state: Mapping[str, Tensor]) -> None:
    """config.json, model.safetensors and preprocessor_config.json of a network that `cannot` does not object to."""
    if isinstance(card.model, ResNetConfig):
        tensors = _with_prefix("bit.", resnet_layout().write(state, heads=1), card.model)
        config = _resnet_config(card.model)
    else:
        model, state = prefix_rows(*ungridded(card.model, state))
        tensors = _vit_tensors(model, state)
        config = _vit_config(model)
    with whole_file(folder / "model.safetensors") as temporary:
        save_file(tensors, temporary, metadata={"format": "pt"})
    _write_json(folder / "config.json", config | _labels(card))
    _write_json(folder / processor.FILE, processor.settings(card.preprocess))


def _vit_tensors(model: ModelConfig, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    kind = kind_of(model)
    tensors = _with_prefix("vit.", layout_of(kind).write(_without_register_rows(model, state), model.heads), model)
    if kind == "dinov2_with_registers":
        tensors[MASK] = torch.zeros(1, model.width)  # which its files have, and nothing reads
    return tensors


def _with_prefix(prefix: str, tensors: Mapping[str, Tensor], model: NetworkConfig) -> dict[str, Tensor]:
    """As a network with a classifier names what stands before it."""
    if not model.num_classes:
        return dict(tensors)
    return {name if name.startswith("classifier.") else prefix + name: tensor for name, tensor in tensors.items()}


def _without_register_rows(model: ModelConfig, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Registers have no rows there: what their rows would add goes into the registers themselves."""
    if not model.registers:
        return state
    table, registers = state["pos_embed.table"], state["reg_token"]
    first, rows, patches = table.split([1, model.registers, table.shape[1] - model.prefix], dim=1)
    return {**state, "pos_embed.table": torch.cat([first, patches], dim=1), "reg_token": registers + rows}


def _vit_config(model: ModelConfig) -> dict[str, Any]:
    kind = kind_of(model)
    values: dict[str, Any] = {
        "model_type": kind,
        "hidden_size": model.width,
        "num_hidden_layers": model.depth,
        "num_attention_heads": model.heads,
        "hidden_act": ACTIVATION[model.gelu],
        "layer_norm_eps": model.norm_eps,
        "image_size": side(model.image_size),
        "patch_size": side(model.patch),
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
    return values


def _resnet_config(model: ResNetConfig) -> dict[str, Any]:
    return {
        "model_type": "bit",
        "architectures": ["BitForImageClassification" if model.num_classes else "BitModel"],
        "num_channels": model.channels,
        "embedding_size": model.width,
        "hidden_sizes": [model.width * 4 * 2**stage for stage in range(len(model.blocks))],
        "depths": list(model.blocks),
        "width_factor": 1,  # the sizes have it in them: transformers leaves it out of its last norm
        "output_stride": max(32, output_stride(model)),  # below its own, stages would not halve the map
        **RESNET_SETTINGS,
    }


def _labels(card: Card) -> dict[str, Any]:
    values: dict[str, Any] = {"license": card.licence} if card.licence else {}
    if card.model.num_classes:
        names = card.classes or made_up_names(card.model.num_classes)
        values["id2label"] = {str(index): name for index, name in enumerate(names)}
        values["label2id"] = {name: index for index, name in enumerate(names)}
    return values


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(strict_json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
