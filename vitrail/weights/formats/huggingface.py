"""The layout of Hugging Face transformers for ViT, DINOv2 and BiT.

A folder with config.json, model.safetensors (or its shards) and preprocessor_config.json. Networks with LayerScale are
written as DINOv2.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail.config import GROUPS, ModelConfig, NetworkConfig, ResNetConfig, Size
from vitrail.errors import UserError
from vitrail.weights.bundle import Card
from vitrail.weights.formats import preprocessor_config
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
    with_prefix_rows,
    write_folder,
)
from vitrail.weights.formats.json_settings import Settings, size_to_json
from vitrail.weights.formats.preprocessor_config import BIT, VIT, Processor
from vitrail.weights.formats.shapes import resnet_config, vit_config
from vitrail.weights.formats.table import MODULE, TENSOR, WEIGHT, State, Table, bottleneck, concatenate
from vitrail.weights.reference_models import Reference, import_library, loading
from vitrail.weights.tensors import TensorSource

LIBRARY = "transformers"
MODEL_TYPES = ("vit", "dinov2", "dinov2_with_registers", "bit")

# ---- tensors

PREFIXES = ("vit.", "dinov2_with_registers.", "dinov2.", "bit.")  # of the names in a model with a classifier
MARKS = ("embeddings.patch_embeddings.projection.weight", "embedder.convolution.weight")
MASK = "embeddings.mask_token"  # only used in masked pre-training


def transformers_vit_table(kind: str, new: bool = False) -> Table:
    """The key mapping of a model type. `new`: with the module names of transformers 5 instead of the older ones."""
    dino = kind != "vit"
    block = "layers.{0}" if new and not dino else "encoder.layer.{0}"
    old = [
        "attention.attention.query",
        "attention.attention.key",
        "attention.attention.value",
        "attention.output.dense",
    ]
    *qkv, proj = [f"{block}.attention.{part}_proj" for part in "qkvo"] if new else [f"{block}.{name}" for name in old]
    norm1, norm2 = ("norm1", "norm2") if dino else ("layernorm_before", "layernorm_after")
    fc1, fc2 = ("mlp.fc1", "mlp.fc2") if dino or new else ("intermediate.dense", "output.dense")
    modules = {
        "patch_embed.proj": "embeddings.patch_embeddings.projection",
        "blocks.{0}.norm1": f"{block}.{norm1}",
        "blocks.{0}.attn.qkv": qkv,
        "blocks.{0}.attn.proj": proj,
        "blocks.{0}.norm2": f"{block}.{norm2}",
        "blocks.{0}.mlp.fc1": f"{block}.{fc1}",
        "blocks.{0}.mlp.fc2": f"{block}.{fc2}",
        "norm": "layernorm",
        "pre_logits.fc": "pooler.dense",
        "head": "classifier",
    }
    tensors = {
        "cls_token": "embeddings.cls_token",
        "reg_token": "embeddings.register_tokens",
        "pos_embed.table": "embeddings.position_embeddings",
        "blocks.{0}.ls1.gamma": f"{block}.layer_scale1.lambda1",
        "blocks.{0}.ls2.gamma": f"{block}.layer_scale2.lambda1",
    }
    return Table((MODULE, modules), (TENSOR, tensors))


RESNET_TABLE = Table(
    (WEIGHT, {"root": "embedder.convolution"}),
    (MODULE, {"norm": "norm", "head": "classifier.1"}),  # classifier.0 is nn.Flatten
    *bottleneck("stages.{0}.{1}", "encoder.stages.{0}.layers.{1}"),
)

# ---- settings

GELU = {"gelu": "erf", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}
ACTIVATION = {"erf": "gelu", "tanh": "gelu_pytorch_tanh"}
NORM_EPS = {"vit": 1e-12, "dinov2": 1e-6, "dinov2_with_registers": 1e-6}  # defaults
# BiT in transformers: constants that it hard-codes, and settings for which vitrail supports one value.
RESNET: dict[str, Any] = {"norm_eps": 1e-5, "weight_eps": 1e-8, "weight_eps_in": "variance", "pool_padding": "zeros"}
RESNET_FIXED: dict[str, Any] = {
    "layer_type": "preactivation",
    "hidden_act": "relu",
    "global_padding": None,
    "num_groups": GROUPS,
    "embedding_dynamic_padding": False,
}


def model_type_of(model: NetworkConfig) -> str:
    """The `model_type` of transformers for a network."""
    if isinstance(model, ResNetConfig):
        return "bit"
    if model.registers:
        return "dinov2_with_registers"
    return "vit" if model.layer_scale is None else "dinov2"


def config_from_tensors(model: NetworkConfig, kind: str) -> dict[str, Any]:
    """The values in config.json that follow from the tensors."""
    if isinstance(model, ResNetConfig):
        return {
            "num_channels": model.channels,
            "embedding_size": model.width,
            "hidden_sizes": [model.width * 4 * 2**stage for stage in range(len(model.blocks))],
            "depths": list(model.blocks),
            "width_factor": 1,  # already in the sizes; transformers ignores it in its last norm
        }
    values = {
        "hidden_size": model.width,
        "num_hidden_layers": model.depth,
        "image_size": model.image_size,
        "patch_size": model.patch,
        "num_channels": model.channels,
        "qkv_bias": True,
    }
    if kind != "vit":
        return values | {"num_register_tokens": model.registers, "use_swiglu_ffn": False}
    pooler = {"pooler_output_size": model.representation} if model.representation else {}
    return values | {"intermediate_size": model.mlp_dim, **pooler}


def _settings_not_in_tensors(config: Settings, kind: str) -> dict[str, Any]:
    """Network settings in config.json that the tensors do not show."""
    scale = config.get("layerscale_value")
    return {
        "heads": config.whole("num_attention_heads", 12),
        "gelu": config.pick("hidden_act", GELU, "activation", "gelu"),
        "norm_eps": config.number("layer_norm_eps", NORM_EPS[kind]),
        **({"layer_scale": scale} if isinstance(scale, float) else {}),
    }


def to_config_json(card: Card) -> dict[str, Any]:
    """The contents of config.json."""
    model, kind = card.model, model_type_of(card.model)
    values = {"model_type": kind, **config_from_tensors(model, kind)}
    if isinstance(model, ResNetConfig):
        name = "Bit"
        values["output_stride"] = max(
            32, output_stride(model)
        )  # if it is smaller, transformers' last stages do not downsample
        values |= RESNET_FIXED
    else:
        name = {"vit": "ViT", "dinov2": "Dinov2"}.get(kind, "Dinov2WithRegisters")
        values |= {"image_size": size_to_json(model.image_size), "patch_size": size_to_json(model.patch)}
        values |= {"num_attention_heads": model.heads, "hidden_act": ACTIVATION[model.gelu]}
        values["layer_norm_eps"] = model.norm_eps
        if kind != "vit":
            values |= {"mlp_ratio": model.mlp_dim // model.width, "layerscale_value": model.layer_scale}
        if kind == "dinov2":
            del values["num_register_tokens"]
            values["use_mask_token"] = False
        if model.representation:
            values["pooler_act"] = "tanh"
    values["architectures"] = [f"{name}ForImageClassification" if model.num_classes else f"{name}Model"]
    if card.licence:
        values["license"] = card.licence
    if model.num_classes:
        names = card.classes or default_class_names(model.num_classes)
        values["id2label"] = {str(index): name for index, name in enumerate(names)}
        values["label2id"] = {name: index for index, name in enumerate(names)}
    return values


def output_stride(model: ResNetConfig) -> int:
    """Downsampling factor of the last feature map."""
    return 4 * 2 ** (len(model.blocks) - 1)


def default_class_names(count: int) -> tuple[str, ...]:
    """The names that transformers gives to unnamed classes."""
    return tuple(f"LABEL_{index}" for index in range(count))


# ---- reading


def matches(source: TensorSource) -> bool:
    return any(prefix + mark in source.shapes for mark in MARKS for prefix in ("", *PREFIXES))


def check_supported(source: TensorSource) -> None:
    """Raise UserError if config.json names a model type of transformers that vitrail cannot read."""
    config = source.sibling_json("config.json")
    if config and isinstance(config.get("model_type"), str):
        _check_model_type(config, source.where)


def read(source: TensorSource, image_size: Size | None = None) -> ForeignWeights:
    """Read weights in transformers' layout."""
    config, where = source.sibling_json("config.json"), source.where
    if config is None:
        raise UserError(f"{where} is in transformers' layout: its config.json must be in the same folder")
    kind, settings = _check_model_type(config, where), Settings(config, where)
    processor = Processor(source, BIT if kind == "bit" else VIT)
    tensors = source.without_prefix(*PREFIXES)
    if kind == "bit":
        model, state = _read_resnet(tensors, settings, image_size or processor.image_size())
        assumed = "no preprocessor_config.json: image size and preprocessing are transformers' defaults for BiT"
    else:
        model, state = _read_vit(tensors, settings, kind, image_size)
        assumed = "no preprocessor_config.json: preprocessing is transformers' default for ViT"
    preprocess = processor.preprocess(model.image_size, model.channels)
    size_note = "" if kind == "bit" else processor.size_note(model.image_size, any_size=kind != "vit")
    classes = class_names_in_order(config.get("id2label"), model.num_classes)
    card = make_card(
        model,
        preprocess,
        classes=() if classes == default_class_names(model.num_classes) else classes,
        licence=str(config.get("license") or ""),
    )
    return ForeignWeights(card, state, join_notes("" if processor.exists else assumed, size_note))


def _check_model_type(config: Mapping[str, Any], where: str) -> str:
    """The `model_type`; raises UserError if vitrail cannot read it."""
    kind = config.get("model_type")
    if kind == "vit-hybrid":  # transformers has no implementation to test against
        raise UserError(
            f"{where} is a 'vit-hybrid' model, which transformers no longer supports; use the same network from timm "
            "(vit_base_r50_s16_384) or Google"
        )
    if kind not in MODEL_TYPES:
        raise UserError(f"{where} is a transformers model of type '{kind}'; vitrail reads {', '.join(MODEL_TYPES)}")
    return str(kind)


def _read_vit(
    source: TensorSource, config: Settings, kind: str, requested: Size | None
) -> tuple[NetworkConfig, dict[str, Tensor]]:
    where, classifies = source.where, "classifier.weight" in source.shapes
    # A classifier does not use the pooler. In a ViT, a mask token means an unsupported network, so it is kept.
    unused = ("pooler.",) * classifies + (MASK,) * (kind != "vit")
    source = source.renamed({name: name for name in source.shapes if not name.startswith(unused)})
    if "pooler.dense.weight" in source.shapes and config.get("pooler_act", "tanh") != "tanh":
        raise UserError(f"{where} has pooler_act '{config.get('pooler_act')}', and vitrail only supports tanh")
    if kind != "vit" and classifies:
        raise UserError(
            f"{where} has a DINOv2 classifier (class token and mean of the patches), which vitrail does not support; "
            "use the checkpoint of its backbone"
        )
    details, size = _settings_not_in_tensors(config, kind), config.size("image_size", (224, 224), requested)

    def configure(meta: State) -> NetworkConfig:
        model = vit_config(meta, where, [size] if size else [], requested, **details)
        config.check(config_from_tensors(model, kind))
        if kind != "vit":
            config.check_ratio(model)
        config.check_labels(model.num_classes)
        return model

    new = any(".q_proj." in name for name in source.shapes)
    return convert_tensors(source, transformers_vit_table(kind, new), configure, _with_register_rows)


def _read_resnet(source: TensorSource, config: Settings, size: Size) -> tuple[NetworkConfig, dict[str, Tensor]]:
    for key, value in RESNET_FIXED.items():
        if config.get(key, value) != value:
            raise UserError(f"{source.where} is a BiT with {key} {config.get(key)!r}; vitrail only supports {value!r}")
    stride = config.get("output_stride", 32)

    def configure(meta: State) -> NetworkConfig:
        model = resnet_config(meta, source.where, size, **RESNET)
        config.check(config_from_tensors(model, "bit"))
        config.check_labels(model.num_classes)
        if not isinstance(stride, int) or (len(model.blocks) > 1 and output_stride(model) // 2 >= stride):
            raise UserError(
                f"{source.where} is a BiT with output_stride {stride!r}; vitrail needs {output_stride(model)}"
            )
        return model

    return convert_tensors(source, RESNET_TABLE, configure)


def _with_register_rows(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Add zero position rows for registers, which have none in transformers."""
    table, registers = state.get("pos_embed.table"), state.get("reg_token")
    if table is None or registers is None or table.ndim != 3 or registers.ndim != 3:
        return state
    zeros = torch.zeros(1, registers.shape[1], table.shape[2], device=table.device)
    return {**state, "pos_embed.table": concatenate([table[:, :1], zeros, table[:, 1:]], dim=1)}


# ---- writing


def adopt_constants(card: Card) -> Card:
    """Replace constants by those that transformers hard-codes; its image processors antialias."""
    model = card.model.model_copy(update=RESNET) if isinstance(card.model, ResNetConfig) else card.model
    preprocess = card.preprocess.model_copy(update={"antialias": True})
    return card.model_copy(update={"model": model, "preprocess": preprocess})


POOLING = {"token": "class token", "gap": "mean of the patches", "map": "attention pooling"}


def unsupported_reason(card: Card) -> str | None:
    """Why transformers cannot represent the network, or None."""
    model, reasons = card.model, unsupported_crop(card.preprocess, LIBRARY, "only crops squares")
    if isinstance(model, ResNetConfig):
        return first_reason(reasons)
    square = model.image_size[0] == model.image_size[1] and model.patch[0] == model.patch[1]
    pooler = "a representation layer before the classifier"
    classifies = "LayerScale with a classifier or representation layer on the class token"
    dinov2 = {
        f"has register tokens without LayerScale, which {LIBRARY} only has together": (model.layer_scale is None),
        **missing_features(LIBRARY, {classifies: model.num_classes or model.representation}),
        f"has mlp_dim {model.mlp_dim}, and DINOv2 in {LIBRARY} needs a multiple of the width": (
            model.mlp_dim % model.width
        ),
        f"takes images or patches that are not square, which DINOv2 in {LIBRARY} does not support": not square,
    }
    return first_reason(
        {
            **reasons,
            **vitrail_only_features(model, LIBRARY),
            **missing_features(LIBRARY, {"a convolutional stem": model.stem}),
            f"pools by {POOLING[model.pool]}, and ViT in {LIBRARY} only by class token": model.pool != "token",
            **missing_features(LIBRARY, {"a norm after pooling": model.norm == "after_pool"}),
            f"has no position embedding, which the networks of {LIBRARY} require": model.positions == "none",
            **missing_features(LIBRARY, {pooler: model.representation and model.num_classes}),
            **({} if model_type_of(model) == "vit" else dinov2),
        }
    )


def write(folder: Path, card: Card, state: State) -> None:
    """Write config.json, model.safetensors and preprocessor_config.json."""
    model, kind = card.model, model_type_of(card.model)
    if isinstance(model, ResNetConfig):
        tensors = RESNET_TABLE.write(state)
    else:
        model, state = with_prefix_rows(*with_position_table(model, state))
        tensors = transformers_vit_table(kind).write(_without_register_rows(model, state))
    if model.num_classes:  # then the other tensors have the prefix of the base model
        prefix = "bit." if kind == "bit" else "vit."
        tensors = {name if name.startswith("classifier.") else prefix + name: t for name, t in tensors.items()}
    if kind == "dinov2_with_registers":
        tensors[MASK] = torch.zeros(1, card.model.width)  # required by transformers, not used
    files = {
        "config.json": to_config_json(card),
        preprocessor_config.FILE: preprocessor_config.to_preprocessor_config(card.preprocess),
    }
    write_folder(folder, tensors, files)


def _without_register_rows(model: ModelConfig, state: State) -> State:
    """Add the position rows of registers to the registers, since transformers has no such rows."""
    if not model.registers:
        return state
    table, registers = state["pos_embed.table"], state["reg_token"]
    class_row, rows, patches = table.split([1, model.registers, table.shape[1] - model.prefix], dim=1)
    return {**state, "pos_embed.table": torch.cat([class_row, patches], dim=1), "reg_token": registers + rows}


# ---- transformers itself


def reference_model(path: Path, card: Card, source: TensorSource | None) -> Reference:
    """transformers' network, with the tensors of `source` or those of the folder."""
    model, folder = card.model, path if path.is_dir() else path.parent
    transformers = import_library("transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # transformers would add a random pooler to a ViT without classifier and representation layer.
    plain = isinstance(model, ModelConfig) and model_type_of(model) == "vit" and not model.representation
    options: dict[str, Any] = {"add_pooling_layer": False} if plain and not model.num_classes else {}
    with loading("transformers"):
        kind = transformers.AutoModelForImageClassification if model.num_classes else transformers.AutoModel
        location: str | None = str(folder)
        if source is not None:
            config = transformers.AutoConfig.from_pretrained(location, local_files_only=True, trust_remote_code=False)
            with torch.device("meta"):
                kind = type(kind.from_config(config))  # the concrete class, which accepts a state_dict
            location, options = None, {**options, "config": config, "state_dict": source.load()}
        network = kind.from_pretrained(
            location, local_files_only=True, trust_remote_code=False, dtype=torch.float32, **options
        )
        network = network.float().eval()

    def run(pixels: Tensor) -> Tensor:
        output = network(pixels)
        if model.num_classes:
            return output.logits
        if not isinstance(model, ModelConfig):
            return output.pooler_output.flatten(1)
        return output.pooler_output if model.representation else output.last_hidden_state[:, 0]

    return Reference("transformers", run)


FORMAT = Format(
    LIBRARY,
    "transformers'",
    write,
    unsupported_reason,
    adopt_constants,
    other_differences=lambda card: ["its crop can differ by one pixel"] * (card.preprocess.resize == "short_side"),
    matches=matches,
    check_supported=check_supported,
    read=read,
    reference_model=reference_model,
    compared_with="transformers",
)
