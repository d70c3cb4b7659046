"""Hugging Face transformers' ViT, DINOv2 and BiT: config.json, model.safetensors (whole or in shards), and
preprocessor_config.json. What is written is a DINOv2 where there is LayerScale."""

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
KINDS = ("vit", "dinov2", "dinov2_with_registers", "bit")

# ---- tensors

PREFIXES = ("vit.", "dinov2_with_registers.", "dinov2.", "bit.")  # what a classifier's names begin with
MARKS = ("embeddings.patch_embeddings.projection.weight", "embedder.convolution.weight")
MASK = "embeddings.mask_token"  # of masked pre-training; nothing reads it afterwards


def vit_table(kind: str, new: bool = False) -> Table:
    """`new`: the names inside transformers 5, which writes the old ones unless told otherwise."""
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
    (MODULE, {"norm": "norm", "head": "classifier.1"}),  # after a module that flattens
    *bottleneck("stages.{0}.{1}", "encoder.stages.{0}.layers.{1}"),
)

# ---- settings

GELU = {"gelu": "erf", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}
ACTIVATION = {"erf": "gelu", "tanh": "gelu_pytorch_tanh"}
NORM_EPS = {"vit": 1e-12, "dinov2": 1e-6, "dinov2_with_registers": 1e-6}  # where config.json does not say
# What BiT's networks are in transformers: constants that it fixes, and settings that ours have one value of.
RESNET: dict[str, Any] = {"norm_eps": 1e-5, "weight_eps": 1e-8, "weight_eps_in": "variance", "pool_padding": "zeros"}
RESNET_FIXED: dict[str, Any] = {
    "layer_type": "preactivation",
    "hidden_act": "relu",
    "global_padding": None,
    "num_groups": GROUPS,
    "embedding_dynamic_padding": False,
}


def model_type_of(model: NetworkConfig) -> str:
    if isinstance(model, ResNetConfig):
        return "bit"
    if model.registers:
        return "dinov2_with_registers"
    return "vit" if model.layer_scale is None else "dinov2"


def config_from_tensors(model: NetworkConfig, kind: str) -> dict[str, Any]:
    """The keys of config.json that the tensors show."""
    if isinstance(model, ResNetConfig):
        return {
            "num_channels": model.channels,
            "embedding_size": model.width,
            "hidden_sizes": [model.width * 4 * 2**stage for stage in range(len(model.blocks))],
            "depths": list(model.blocks),
            "width_factor": 1,  # the sizes have it in them: transformers leaves it out of its last norm
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


def _hidden(config: Settings, kind: str) -> dict[str, Any]:
    """What they do not show."""
    scale = config.get("layerscale_value")
    return {
        "heads": config.whole("num_attention_heads", 12),
        "gelu": config.pick("hidden_act", GELU, "activation", "gelu"),
        "norm_eps": config.number("layer_norm_eps", NORM_EPS[kind]),
        **({"layer_scale": scale} if isinstance(scale, float) else {}),
    }


def config_of(card: Card) -> dict[str, Any]:
    """config.json."""
    model, kind = card.model, model_type_of(card.model)
    values = {"model_type": kind, **config_from_tensors(model, kind)}
    if isinstance(model, ResNetConfig):
        name = "Bit"
        values["output_stride"] = max(32, output_stride(model))  # below its own, stages would not halve the map
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
        names = card.classes or made_up_names(model.num_classes)
        values["id2label"] = {str(index): name for index, name in enumerate(names)}
        values["label2id"] = {name: index for index, name in enumerate(names)}
    return values


def output_stride(model: ResNetConfig) -> int:
    """How many image pixels one pixel of the last map spans."""
    return 4 * 2 ** (len(model.blocks) - 1)


def made_up_names(count: int) -> tuple[str, ...]:
    """What transformers calls classes without names."""
    return tuple(f"LABEL_{index}" for index in range(count))


# ---- reading


def matches(source: TensorSource) -> bool:
    return any(prefix + mark in source.shapes for mark in MARKS for prefix in ("", *PREFIXES))


def check_supported(source: TensorSource) -> None:
    config = source.beside("config.json")
    if config and isinstance(config.get("model_type"), str):
        _check_kind(config, source.where)


def read(source: TensorSource, image_size: Size | None = None) -> ForeignWeights:
    """Weights in transformers' names."""
    config, where = source.beside("config.json"), source.where
    if config is None:
        raise UserError(f"{where} is in transformers' layout, which needs its config.json beside it")
    kind, settings = _check_kind(config, where), Settings(config, where)
    processor = Processor(source, BIT if kind == "bit" else VIT)
    tensors = source.without_prefix(*PREFIXES)
    if kind == "bit":
        model, state = _read_resnet(tensors, settings, image_size or processor.image_size())
        unsaid = "no preprocessor_config.json: image size and preprocessing are transformers' defaults for BiT"
    else:
        model, state = _read_vit(tensors, settings, kind, image_size)
        unsaid = "no preprocessor_config.json: preprocessing is transformers' default for ViT"
    preprocess = processor.preprocess(model.image_size, model.channels)
    resized = "" if kind == "bit" else processor.resized(model.image_size, any_size=kind != "vit")
    classes = class_names_in_order(config.get("id2label"), model.num_classes)
    card = make_card(
        model,
        preprocess,
        classes=() if classes == made_up_names(model.num_classes) else classes,
        licence=str(config.get("license") or ""),
    )
    return ForeignWeights(card, state, join_notes("" if processor.found else unsaid, resized))


def _check_kind(config: Mapping[str, Any], where: str) -> str:
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
    source: TensorSource, config: Settings, kind: str, asked: Size | None
) -> tuple[NetworkConfig, dict[str, Tensor]]:
    where, classifies = source.where, "classifier.weight" in source.shapes
    # A classifier looks at the class token, never at the pooler. Of a ViT, a mask token is the mark of another network.
    unread = ("pooler.",) * classifies + (MASK,) * (kind != "vit")
    source = source.named({name: name for name in source.shapes if not name.startswith(unread)})
    if "pooler.dense.weight" in source.shapes and config.get("pooler_act", "tanh") != "tanh":
        raise UserError(f"{where} has a pooler with '{config.get('pooler_act')}', and the representation layer is tanh")
    if kind != "vit" and classifies:
        raise UserError(
            f"{where} classifies by the class token beside the mean of the patches, which no network of vitrail does; "
            "its backbone alone can be read"
        )
    details, size = _hidden(config, kind), config.size("image_size", (224, 224), asked)

    def configure(blank: State) -> NetworkConfig:
        model = vit_config(blank, where, [size] if size else [], asked, **details)
        config.check(config_from_tensors(model, kind))
        if kind != "vit":
            config.check_ratio(model)
        config.check_labels(model.num_classes)
        return model

    new = any(".q_proj." in name for name in source.shapes)
    return convert_tensors(source, vit_table(kind, new), configure, _with_register_rows)


def _read_resnet(source: TensorSource, config: Settings, size: Size) -> tuple[NetworkConfig, dict[str, Tensor]]:
    for key, value in RESNET_FIXED.items():
        if config.get(key, value) != value:
            raise UserError(f"{source.where} is a BiT with {key} {config.get(key)!r}, and vitrail's has {value!r}")
    reach = config.get("output_stride", 32)

    def configure(blank: State) -> NetworkConfig:
        model = resnet_config(blank, source.where, size, **RESNET)
        config.check(config_from_tensors(model, "bit"))
        config.check_labels(model.num_classes)
        if not isinstance(reach, int) or (len(model.blocks) > 1 and output_stride(model) // 2 >= reach):
            raise UserError(
                f"{source.where} is a BiT with output_stride {reach!r}: its last stages do not halve the map"
            )
        return model

    return convert_tensors(source, RESNET_TABLE, configure)


def _with_register_rows(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Registers have no positions there, and rows of zeros, which add nothing, in ours."""
    table, registers = state.get("pos_embed.table"), state.get("reg_token")
    if table is None or registers is None or table.ndim != 3 or registers.ndim != 3:
        return state
    zeros = torch.zeros(1, registers.shape[1], table.shape[2], device=table.device)
    return {**state, "pos_embed.table": concatenate([table[:, :1], zeros, table[:, 1:]], dim=1)}


# ---- writing


def adopt_constants(card: Card) -> Card:
    """Its image processors smooth when they shrink."""
    model = card.model.model_copy(update=RESNET) if isinstance(card.model, ResNetConfig) else card.model
    preprocess = card.preprocess.model_copy(update={"antialias": True})
    return card.model_copy(update={"model": model, "preprocess": preprocess})


POOLING = {"token": "class token", "gap": "mean of the patches", "map": "attention pooling"}


def unsupported_reason(card: Card) -> str | None:
    model, reasons = card.model, unsupported_crop(card.preprocess, LIBRARY, "cuts squares alone")
    if isinstance(model, ResNetConfig):
        return first_reason(reasons)
    square = model.image_size[0] == model.image_size[1] and model.patch[0] == model.patch[1]
    pooler = "a representation layer before the classifier"
    classifies = "LayerScale with a classifier or representation layer on the class token"
    dinov2 = {
        f"has register tokens without LayerScale, and {LIBRARY} has them only together with LayerScale": (
            model.layer_scale is None
        ),
        **missing_features(LIBRARY, {classifies: model.num_classes or model.representation}),
        f"has an MLP of {model.mlp_dim}, and in the DINOv2 of {LIBRARY} it is a whole multiple of the width": (
            model.mlp_dim % model.width
        ),
        f"takes images or patches that are not square, which the DINOv2 of {LIBRARY} does not": not square,
    }
    return first_reason(
        {
            **reasons,
            **vitrail_only_features(model, LIBRARY),
            **missing_features(LIBRARY, {"a convolutional stem": model.stem}),
            f"reads the {POOLING[model.pool]}, and the ViT of {LIBRARY} the class token alone": model.pool != "token",
            **missing_features(LIBRARY, {"a norm after pooling": model.norm == "after_pool"}),
            f"has no positions, and the networks of {LIBRARY} all have some": model.positions == "none",
            **missing_features(LIBRARY, {pooler: model.representation and model.num_classes}),
            **({} if model_type_of(model) == "vit" else dinov2),
        }
    )


def write(folder: Path, card: Card, state: State) -> None:
    """config.json, model.safetensors and preprocessor_config.json."""
    model, kind = card.model, model_type_of(card.model)
    if isinstance(model, ResNetConfig):
        tensors = RESNET_TABLE.write(state)
    else:
        model, state = with_prefix_rows(*with_position_table(model, state))
        tensors = vit_table(kind).write(_without_register_rows(model, state))
    if model.num_classes:  # whose file then names what stands before the classifier
        start = "bit." if kind == "bit" else "vit."
        tensors = {name if name.startswith("classifier.") else start + name: t for name, t in tensors.items()}
    if kind == "dinov2_with_registers":
        tensors[MASK] = torch.zeros(1, card.model.width)  # which its files have, and nothing reads
    files = {"config.json": config_of(card), preprocessor_config.FILE: preprocessor_config.written(card.preprocess)}
    write_folder(folder, tensors, files)


def _without_register_rows(model: ModelConfig, state: State) -> State:
    """Registers have no rows there: what their rows would add goes into the registers themselves."""
    if not model.registers:
        return state
    table, registers = state["pos_embed.table"], state["reg_token"]
    class_row, rows, patches = table.split([1, model.registers, table.shape[1] - model.prefix], dim=1)
    return {**state, "pos_embed.table": torch.cat([class_row, patches], dim=1), "reg_token": registers + rows}


# ---- transformers itself


def reference_model(path: Path, card: Card, source: TensorSource | None) -> Reference:
    """With the tensors of a file, or those that transformers finds in the folder; its output is what ours gives."""
    model, folder = card.model, path if path.is_dir() else path.parent
    transformers = import_library("transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # A ViT without classifier and representation layer would have one invented for it.
    plain = isinstance(model, ModelConfig) and model_type_of(model) == "vit" and not model.representation
    options: dict[str, Any] = {"add_pooling_layer": False} if plain and not model.num_classes else {}
    with loading("transformers"):
        kind = transformers.AutoModelForImageClassification if model.num_classes else transformers.AutoModel
        place: str | None = str(folder)
        if source is not None:
            config = transformers.AutoConfig.from_pretrained(place, local_files_only=True, trust_remote_code=False)
            with torch.device("meta"):
                kind = type(kind.from_config(config))  # which takes tensors, as the one that chooses it does not
            place, options = None, {**options, "config": config, "state_dict": source.load()}
        network = kind.from_pretrained(
            place, local_files_only=True, trust_remote_code=False, dtype=torch.float32, **options
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
    other_differences=lambda card: (
        ["its crop can lie one pixel beside ours"] * (card.preprocess.resize == "short_side")
    ),
    matches=matches,
    check_supported=check_supported,
    read=read,
    reference_model=reference_model,
    compared_with="transformers",
)
