"""What a config.json claims, against what the tensors show: other libraries would build whatever it claims."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from typing import Any

from vitrail.config import ModelConfig, ResNetConfig, Size
from vitrail.errors import UserError

MOST_LABELS = 100_000  # of a network without classifier, whose tensors cannot contradict the number


def check_claims(said: Mapping[str, Any], shown: Mapping[str, Any], where: str, section: str = "") -> None:
    """What `said` has of the keys of `shown` must be the same there, to the type; pairs may be one number."""
    for key, value in shown.items():
        claim = said.get(key)
        if claim is not None and not _same(claim, value):
            raise contradiction(where, section + key, claim, value)


def contradiction(where: str, key: str, claim: Any, value: Any) -> UserError:
    text = "x".join(map(str, value)) if isinstance(value, tuple) else repr(value)
    return UserError(f"{where}: its config.json says {key} {reprlib.repr(claim)}, and its tensors show {text}")


def _same(claim: Any, value: Any) -> bool:
    if isinstance(value, tuple):
        pair = [claim, claim] if type(claim) is int else claim
        return isinstance(pair, list) and all(type(side) is int for side in pair) and pair == list(value)
    return type(claim) is type(value) and bool(claim == value)


def whole(said: Mapping[str, Any], key: str, default: int, where: str) -> int:
    """A number of things that config.json states."""
    value = said.get(key, default)
    if type(value) is not int or value < 1:
        raise UserError(f"{where}: its config.json says {key} {reprlib.repr(value)}, which is no whole number")
    return value


def number(said: Mapping[str, Any], key: str, default: float, where: str) -> float:
    value = said.get(key, default)
    if type(value) not in (int, float) or not math.isfinite(value):
        raise UserError(f"{where}: its config.json says {key} {reprlib.repr(value)}, which is no number")
    return float(value)


def check_ratio(said: Mapping[str, Any], model: ModelConfig, where: str, section: str = "") -> None:
    """`mlp_ratio`, of which other libraries take the whole part once multiplied."""
    if said.get("mlp_ratio") is None:
        return
    ratio = number(said, "mlp_ratio", 4, where)
    if int(model.width * ratio) != model.mlp_dim:
        raise contradiction(where, f"{section}mlp_ratio", said["mlp_ratio"], model.mlp_dim / model.width)


def check_labels(config: Mapping[str, Any], count: int, where: str) -> None:
    """transformers makes as many logits as it has names."""
    names, labels = config.get("id2label"), config.get("num_labels")
    if names is not None and not isinstance(names, Mapping):
        raise UserError(f"{where}: its config.json has an id2label that is no mapping from numbers to names")
    if count and names is not None and len(names) != count:
        raise UserError(f"{where}: its config.json names {len(names)} classes, and its tensors show {count}")
    wrong = type(labels) is not int or labels > MOST_LABELS or (count and labels != count)
    if labels is not None and wrong:
        raise contradiction(where, "num_labels", labels, count)


def of_transformers(model: ModelConfig, kind: str) -> dict[str, Any]:
    """The keys of transformers' ViT and DINOv2 that the tensors show."""
    shown: dict[str, Any] = {
        "hidden_size": model.width,
        "num_hidden_layers": model.depth,
        "patch_size": model.patch,
        "num_channels": model.channels,
        "image_size": model.image_size,
        "qkv_bias": True,
    }
    if kind == "vit":
        shown["intermediate_size"] = model.mlp_dim
        return shown | ({"pooler_output_size": model.representation} if model.representation else {})
    return shown | {"num_register_tokens": model.registers, "use_swiglu_ffn": False}


def of_transformers_resnet(model: ResNetConfig) -> dict[str, Any]:
    return {
        "num_channels": model.channels,
        "embedding_size": model.width,
        "depths": list(model.blocks),
        "hidden_sizes": [model.width * 4 * 2**stage for stage in range(len(model.blocks))],
        "width_factor": 1,
    }


# Settings of timm's networks that the answers do not depend on, or that its reader looks at itself.
TIMM_FREE = {"num_heads", "act_layer", "norm_layer", "mlp_ratio", "init_values", "fc_norm", "global_pool"}
TIMM_FREE |= {"no_embed_class", "pool_include_prefix", "weight_init", "fix_init", "dynamic_img_size"}
TIMM_FREE |= {f"{what}drop_rate" for what in ("", "pos_", "patch_", "proj_", "attn_")} | {"drop_path_rate"}
TIMM_RESNET_FREE = {"drop_rate", "drop_path_rate"}


def check_timm(args: Mapping[str, Any], model: ModelConfig | ResNetConfig, where: str) -> None:
    """`model_args` of timm's config.json."""
    shown: dict[str, Any] = {"in_chans": model.channels, "num_classes": model.num_classes}
    free = TIMM_RESNET_FREE
    if isinstance(model, ModelConfig):
        free = TIMM_FREE
        shown |= {
            "img_size": model.image_size,
            "patch_size": model.patch,
            "embed_dim": model.width,
            "depth": model.depth,
            "class_token": model.class_token,
            "reg_tokens": model.registers,
            "pos_embed": "none" if model.positions == "none" else "learn",
            **dict.fromkeys(("qkv_bias", "proj_bias", "final_norm"), True),
            **dict.fromkeys(("qk_norm", "scale_attn_norm", "scale_mlp_norm", "pre_norm", "dynamic_img_pad"), False),
        }
        check_ratio(args, model, where, "model_args.")
    strange = sorted(set(args) - free - shown.keys())
    if strange:
        raise UserError(f"{where}: its config.json has model_args.{strange[0]}, which vitrail does not know")
    check_claims(args, shown, where, "model_args.")


def check_asked(asked: Size | None, told: Size | None, where: str) -> None:
    """A size that was asked for cannot be another than the one that config.json states."""
    if asked and told and asked != told:
        sizes = ["x".join(map(str, size)) for size in (told, asked)]
        raise UserError(f"{where}: its config.json says images of {sizes[0]}, and {sizes[1]} was asked for")
