"""Our parameters' names in the words of the other libraries."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

Named = Mapping[str, Tensor]
Words = list[tuple[str, str]]  # (part of our parameter's name, the same part of theirs), replaced in this order

TIMM_BLOCKS: Words = [
    *((f"stages.{stage}.", f"stages.{stage}.blocks.") for stage in range(4)),
    ("shortcut_norm", "downsample.norm"),
    ("shortcut", "downsample.conv"),
]
TIMM_RESNET: Words = [*TIMM_BLOCKS, ("root", "stem.conv"), ("head", "head.fc")]
TIMM: Words = [
    *TIMM_BLOCKS,
    ("tokens.stem.root", "patch_embed.backbone.stem.conv"),
    ("tokens.stem.norm", "patch_embed.backbone.stem.norm"),
    ("tokens.stem", "patch_embed.backbone"),
    ("tokens.class_token", "cls_token"),
    ("tokens.registers", "reg_token"),
    ("tokens.projection", "patch_embed.proj"),
    ("positions.table", "pos_embed"),
    ("encoder.", ""),
    ("attention.qkv", "attn.qkv"),
    ("attention.out", "attn.proj"),
    ("scale1.gain", "ls1.gamma"),
    ("scale2.gain", "ls2.gamma"),
    ("mlp.up", "mlp.fc1"),
    ("mlp.down", "mlp.fc2"),
    ("pool.norm", "fc_norm"),
    ("pool.probe", "attn_pool.latent"),
    ("pool.query", "attn_pool.q"),
    ("pool.keyvalue", "attn_pool.kv"),
    ("pool.out", "attn_pool.proj"),
    ("pool.mlp_norm", "attn_pool.norm"),
    ("pool.mlp", "attn_pool.mlp"),
]
# timm keeps a stem without stages one level higher.
TIMM_ROOT_ALONE: Words = [*TIMM, ("patch_embed.backbone.stem", "patch_embed.backbone")]
TORCHVISION: Words = [
    ("encoder.blocks.", "encoder.layers.encoder_layer_"),
    ("encoder.norm", "encoder.ln"),
    ("tokens.class_token", "class_token"),
    ("tokens.projection", "conv_proj"),
    ("positions.table", "encoder.pos_embedding"),
    ("norm1", "ln_1"),
    ("norm2", "ln_2"),
    ("attention.qkv.", "self_attention.in_proj_"),
    ("attention.out", "self_attention.out_proj"),
    ("mlp.up", "mlp.0"),
    ("mlp.down", "mlp.3"),
    ("head.", "heads.head."),
]
TRANSFORMERS: Words = [
    ("encoder.norm", "vit.layernorm"),
    ("encoder.blocks", "vit.layers"),
    ("tokens.class_token", "vit.embeddings.cls_token"),
    ("tokens.projection", "vit.embeddings.patch_embeddings.projection"),
    ("positions.table", "vit.embeddings.position_embeddings"),
    ("norm1", "layernorm_before"),
    ("norm2", "layernorm_after"),
    ("attention.out", "attention.o_proj"),
    ("mlp.up", "mlp.fc1"),
    ("mlp.down", "mlp.fc2"),
    ("head", "classifier"),
]
# Releases of transformers before the layers were renamed.
TRANSFORMERS_OLD: Words = [
    *TRANSFORMERS,
    ("vit.layers", "vit.encoder.layer"),
    ("attention.q_proj", "attention.attention.query"),
    ("attention.k_proj", "attention.attention.key"),
    ("attention.v_proj", "attention.attention.value"),
    ("attention.o_proj", "attention.output.dense"),
    ("mlp.fc1", "intermediate.dense"),
    ("mlp.fc2", "output.dense"),
]


def renamed(named: Named, words: Words) -> dict[str, Tensor]:
    result = {}
    for name, tensor in named.items():
        for ours, theirs in words:
            name = name.replace(ours, theirs)
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
