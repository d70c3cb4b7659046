"""Hugging Face transformers' ViT, DINOv2 and BiT: config.json, model.safetensors (whole or in shards), and
preprocessor_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail.config import GROUPS, NetworkConfig, ResNetConfig, Size
from vitrail.errors import UserError
from vitrail.weights import processor
from vitrail.weights import validate_hf_config as claims
from vitrail.weights.foreign import Foreign, joined, pick, resnet_config, size_of, translate, vit_config
from vitrail.weights.layout import Layout, Rule, both, concatenate
from vitrail.weights.tensors import Tensors

PREFIXES = ("vit.", "dinov2_with_registers.", "dinov2.", "bit.")  # what a classifier's names begin with
MARKS = ("embeddings.patch_embeddings.projection.weight", "embedder.convolution.weight")
MASK = "embeddings.mask_token"  # of masked pre-training; nothing reads it afterwards

# Parts of attention: query, key, value, out. transformers 5 has shorter names inside; it writes the old ones unless
# told otherwise.
OLD = ("attention.attention.query", "attention.attention.key", "attention.attention.value", "attention.output.dense")
NEW = ("attention.q_proj", "attention.k_proj", "attention.v_proj", "attention.o_proj")
OLD_VIT = ("layernorm_before", "layernorm_after", "intermediate.dense", "output.dense")  # norms and MLP
NEW_VIT = ("layernorm_before", "layernorm_after", "mlp.fc1", "mlp.fc2")
DINO = ("norm1", "norm2", "mlp.fc1", "mlp.fc2")


def _layout(block: str, attention: tuple[str, ...], others: tuple[str, ...]) -> Layout:
    ours, (*parts, out), (norm1, norm2, up, down) = "blocks.{0}", attention, others
    rules = [
        Rule("cls_token", ("embeddings.cls_token",)),
        Rule("reg_token", ("embeddings.register_tokens",)),
        Rule("pos_embed.table", ("embeddings.position_embeddings",)),
        *both("patch_embed.proj", "embeddings.patch_embeddings.projection"),
        *both(f"{ours}.norm1", f"{block}.{norm1}"),
        *both(f"{ours}.attn.qkv", *(f"{block}.{part}" for part in parts)),
        *both(f"{ours}.attn.proj", f"{block}.{out}"),
        Rule(f"{ours}.ls1.gamma", (f"{block}.layer_scale1.lambda1",)),
        *both(f"{ours}.norm2", f"{block}.{norm2}"),
        *both(f"{ours}.mlp.fc1", f"{block}.{up}"),
        *both(f"{ours}.mlp.fc2", f"{block}.{down}"),
        Rule(f"{ours}.ls2.gamma", (f"{block}.layer_scale2.lambda1",)),
        *both("norm", "layernorm"),
        *both("pre_logits.fc", "pooler.dense"),
        *both("head", "classifier"),
    ]
    return Layout(rules)


def layout_of(kind: str, new: bool = False) -> Layout:
    if kind != "vit":
        return _layout("encoder.layer.{0}", NEW if new else OLD, DINO)
    return _layout("layers.{0}", NEW, NEW_VIT) if new else _layout("encoder.layer.{0}", OLD, OLD_VIT)


def resnet_layout() -> Layout:
    ours, theirs = "stages.{0}.{1}", "encoder.stages.{0}.layers.{1}"
    rules = [
        Rule("root.weight", ("embedder.convolution.weight",)),
        Rule(f"{ours}.shortcut.weight", (f"{theirs}.downsample.conv.weight",)),
        *both("norm", "norm"),
        *both("head", "classifier.1"),  # after a module that flattens
    ]
    for index in (1, 2, 3):
        rules.append(Rule(f"{ours}.conv{index}.weight", (f"{theirs}.conv{index}.weight",)))
        rules += both(f"{ours}.norm{index}", f"{theirs}.norm{index}")
    return Layout(rules)


GELU = {"gelu": "erf", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}
KINDS = ("vit", "dinov2", "dinov2_with_registers", "bit")
NORM_EPS = {"vit": 1e-12, "dinov2": 1e-6, "dinov2_with_registers": 1e-6}  # where config.json does not say


def read(source: Tensors, config: Mapping[str, Any], folder: Path, image_size: Size | None = None) -> Foreign:
    """Weights in transformers' names; `config` is the config.json that stands beside them, in `folder`."""
    where, kind = source.where, check_kind(config, source.where)
    told = processor.read_processor(folder, processor.BIT if kind == "bit" else processor.VIT)
    model: NetworkConfig
    if kind == "bit":
        size = image_size or processor.image_size(told, where)
        model, state = _read_resnet(source.without_prefix(*PREFIXES), config, size)
        assumed = "no preprocessor_config.json: image size and preprocessing are transformers' defaults for BiT"
    else:
        model, state = _read_vit(source.without_prefix(*PREFIXES), config, image_size)
        assumed = "no preprocessor_config.json: preprocessing is transformers' default for ViT"
    preprocess = processor.preprocess(told, model.image_size, model.channels, where)
    resized = "" if kind == "bit" else processor.resized(told, model.image_size, kind != "vit", where)
    return Foreign(
        model,
        state,
        preprocess,
        _classes(config.get("id2label"), model.num_classes),
        licence=str(config.get("license") or ""),
        assumed=joined("" if told.found else assumed, resized),
    )


def check_kind(config: Mapping[str, Any], where: str) -> str:
    """Which of transformers' networks it is, of those that can be read."""
    kind = config.get("model_type")
    if kind == "vit-hybrid":  # which no test could compare with
        raise UserError(
            f"{where} is a 'vit-hybrid' model, which transformers itself has dropped: "
            "vitrail reads the same networks from timm's files (vit_base_r50_s16_384) and from Google's"
        )
    if kind not in KINDS:
        raise UserError(f"{where} is a '{kind}' model of transformers, and vitrail reads {', '.join(KINDS)}")
    return str(kind)


def _read_vit(
    source: Tensors, config: Mapping[str, Any], asked: Size | None
) -> tuple[NetworkConfig, dict[str, Tensor]]:
    where, kind = source.where, config["model_type"]
    source = source.named({name: name for name in source.shapes if _is_read(name, source, kind)})
    if "pooler.dense.weight" in source.shapes and config.get("pooler_act", "tanh") != "tanh":
        raise UserError(f"{where} has a pooler with '{config['pooler_act']}', and the representation layer is tanh")
    if kind != "vit" and "classifier.weight" in source.shapes:
        raise UserError(
            f"{where} classifies by the class token beside the mean of the patches, which no network of vitrail does; "
            "its backbone alone can be read"
        )
    details: dict[str, Any] = {
        "heads": claims.whole(config, "num_attention_heads", 12, where),
        "gelu": pick(config.get("hidden_act", "gelu"), GELU, "activation", where),
        "norm_eps": claims.number(config, "layer_norm_eps", NORM_EPS[kind], where),
    }
    if isinstance(config.get("layerscale_value"), float):
        details["layer_scale"] = config["layerscale_value"]
    told = [size_of(config.get("image_size", 224), where)]
    claims.check_asked(asked, told[0] if "image_size" in config else None, where)

    def configure(blank: Mapping[str, Tensor]) -> NetworkConfig:
        model = vit_config(blank, where, told, asked, **details)
        claims.check_claims(config, claims.of_transformers(model, kind), where)
        if kind != "vit":
            claims.check_ratio(config, model, where)
        claims.check_labels(config, model.num_classes, where)
        return model

    new = any(".q_proj." in name for name in source.shapes)
    return translate(source, layout_of(kind, new), configure, _register_rows)


# What BiT's networks are in transformers: constants that it fixes, and settings that ours have one value of.
RESNET: dict[str, Any] = {"norm_eps": 1e-5, "weight_eps": 1e-8, "weight_eps_in": "variance", "pool_padding": "zeros"}
RESNET_SETTINGS: dict[str, Any] = {
    "layer_type": "preactivation",
    "hidden_act": "relu",
    "global_padding": None,
    "num_groups": GROUPS,
    "embedding_dynamic_padding": False,
}


def _read_resnet(source: Tensors, config: Mapping[str, Any], size: Size) -> tuple[NetworkConfig, dict[str, Tensor]]:
    where = source.where
    for key, value in RESNET_SETTINGS.items():
        if config.get(key, value) != value:
            raise UserError(f"{where} is a BiT with {key} {config[key]!r}, and vitrail's has {value!r}")
    reach = config.get("output_stride", 32)

    def configure(blank: Mapping[str, Tensor]) -> NetworkConfig:
        model = resnet_config(blank, where, size, **RESNET)
        claims.check_claims(config, claims.of_transformers_resnet(model), where)
        claims.check_labels(config, model.num_classes, where)
        return model

    model, state = translate(source, resnet_layout(), configure)
    assert isinstance(model, ResNetConfig)
    if not isinstance(reach, int) or (len(model.blocks) > 1 and output_stride(model) // 2 >= reach):
        raise UserError(f"{where} is a BiT with output_stride {reach!r}: its last stages do not halve the map")
    return model, state


def output_stride(model: ResNetConfig) -> int:
    """How many image pixels one pixel of the last map spans."""
    return 4 * 2 ** (len(model.blocks) - 1)


def _is_read(name: str, source: Tensors, kind: str) -> bool:
    """Whether the network's answer depends on it: a classifier looks at the class token, never at the pooler."""
    if name == MASK:
        return kind == "vit"  # where it is the mark of another network, and not just left over
    return not (name.startswith("pooler.") and "classifier.weight" in source.shapes)


def _register_rows(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Registers have no positions there, and rows of zeros, which add nothing, in ours."""
    table, registers = state.get("pos_embed.table"), state.get("reg_token")
    if table is None or registers is None or table.ndim != 3 or registers.ndim != 3:
        return state
    zeros = torch.zeros(1, registers.shape[1], table.shape[2], device=table.device)
    return {**state, "pos_embed.table": concatenate([table[:, :1], zeros, table[:, 1:]], dim=1)}


def _classes(names: Any, count: int) -> tuple[str, ...]:
    """`id2label` in the order of the logits; none where transformers made the names up."""
    if not isinstance(names, Mapping) or {str(index) for index in range(count)} != set(names):
        return ()
    classes = tuple(str(names[str(index)]) for index in range(count))
    return () if classes == made_up_names(count) else classes


def made_up_names(count: int) -> tuple[str, ...]:
    """What transformers calls classes without names."""
    return tuple(f"LABEL_{index}" for index in range(count))
