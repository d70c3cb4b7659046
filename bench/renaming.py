"""Mapping of vitrail's parameter names to those of other libraries."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

Named = Mapping[str, Tensor]
Replacements = list[tuple[str, str]]  # (part of vitrail's name, part of the other name), applied in order

TIMM_BLOCKS: Replacements = [
    *((f"stages.{stage}.", f"stages.{stage}.blocks.") for stage in range(4)),
    ("shortcut_norm", "downsample.norm"),
    ("shortcut", "downsample.conv"),
]
TIMM_RESNET: Replacements = [*TIMM_BLOCKS, ("root", "stem.conv"), ("head", "head.fc")]
TIMM: Replacements = [
    *TIMM_BLOCKS,
    ("patch_embed.stem.root", "patch_embed.backbone.stem.conv"),
    ("patch_embed.stem.norm", "patch_embed.backbone.stem.norm"),
    ("patch_embed.stem", "patch_embed.backbone"),
    ("pos_embed.table", "pos_embed"),
]
# timm keeps a stem without stages one level higher.
TIMM_ROOT_ALONE: Replacements = [*TIMM, ("patch_embed.backbone.stem", "patch_embed.backbone")]
TORCHVISION: Replacements = [
    ("blocks.", "encoder.layers.encoder_layer_"),
    ("cls_token", "class_token"),
    ("patch_embed.proj", "conv_proj"),
    ("pos_embed.table", "encoder.pos_embedding"),
    ("norm1", "ln_1"),
    ("norm2", "ln_2"),
    ("attn.qkv.", "self_attention.in_proj_"),
    ("attn.proj", "self_attention.out_proj"),
    ("mlp.fc1", "mlp.0"),
    ("mlp.fc2", "mlp.3"),
    ("head.", "heads.head."),
    ("norm.", "encoder.ln."),
]
TRANSFORMERS: Replacements = [
    ("blocks", "vit.layers"),
    ("cls_token", "vit.embeddings.cls_token"),
    ("patch_embed.proj", "vit.embeddings.patch_embeddings.projection"),
    ("pos_embed.table", "vit.embeddings.position_embeddings"),
    ("norm1", "layernorm_before"),
    ("norm2", "layernorm_after"),
    ("attn.proj", "attention.o_proj"),
    ("attn.", "attention."),
    ("head", "classifier"),
    ("norm.", "vit.layernorm."),
]
# Releases of transformers before the layers were renamed.
TRANSFORMERS_OLD: Replacements = [
    *TRANSFORMERS,
    ("vit.layers", "vit.encoder.layer"),
    ("attention.q_proj", "attention.attention.query"),
    ("attention.k_proj", "attention.attention.key"),
    ("attention.v_proj", "attention.attention.value"),
    ("attention.o_proj", "attention.output.dense"),
    ("mlp.fc1", "intermediate.dense"),
    ("mlp.fc2", "output.dense"),
]


def renamed(named: Named, replacements: Replacements) -> dict[str, Tensor]:
    result = {}
    for name, tensor in named.items():
        for old, new in replacements:
            name = name.replace(old, new)
        result[name] = tensor
    return result


def split_qkv(named: Named) -> dict[str, Tensor]:
    """transformers keeps query, key and value apart."""
    result: dict[str, Tensor] = {}
    for name, tensor in named.items():
        if ".qkv." in name:
            parts = zip("qkv", tensor.chunk(3), strict=True)
            result |= {name.replace(".qkv.", f".{letter}_proj."): part for letter, part in parts}
        else:
            result[name] = tensor
    return result


def head_as_convolution(named: Named) -> dict[str, Tensor]:
    """timm's ResNets classify with a 1 x 1 convolution."""
    return {name: tensor[:, :, None, None] if name == "head.weight" else tensor for name, tensor in named.items()}
