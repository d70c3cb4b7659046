"""Parameter names of files before format 3, and their current (timm's) names."""

from __future__ import annotations

import re
from collections.abc import Iterable

# (old, new): names with a leading dot occur inside blocks, the others at the start of a parameter name.
TABLE = [
    ("tokens.class_token", "cls_token"),
    ("tokens.registers", "reg_token"),
    ("tokens.stem", "patch_embed.stem"),
    ("tokens.projection", "patch_embed.proj"),
    ("positions", "pos_embed"),
    ("encoder.blocks", "blocks"),
    ("encoder.norm", "norm"),
    ("pool.norm", "fc_norm"),
    ("pool.probe", "attn_pool.latent"),
    ("pool.query", "attn_pool.q"),
    ("pool.keyvalue", "attn_pool.kv"),
    ("pool.out", "attn_pool.proj"),
    ("pool.mlp_norm", "attn_pool.norm"),
    ("pool.mlp.up", "attn_pool.mlp.fc1"),
    ("pool.mlp.down", "attn_pool.mlp.fc2"),
    ("representation.layer", "pre_logits.fc"),
    (".attention.qkv", ".attn.qkv"),
    (".attention.out", ".attn.proj"),
    (".attention.relative", ".attn.relative"),
    (".scale1.gain", ".ls1.gamma"),
    (".scale2.gain", ".ls2.gamma"),
    (".mlp.up", ".mlp.fc1"),
    (".mlp.down", ".mlp.fc2"),
]
NEW = {old.lstrip("."): new.lstrip(".") for old, new in TABLE}
# Whole components. Prefixes are the kind of tensor in a checkpoint ("model/", "optimizer/exp_avg/") and the name of a
# network within another.
OLD_WORDS = re.compile(rf"(?<![^./])({'|'.join(map(re.escape, NEW))})(?![^.])")


def new_name(old: str) -> str:
    """The current name of a parameter. Current names do not change."""
    return OLD_WORDS.sub(lambda match: NEW[match[1]], old)


def old_name(new: str) -> str:
    """The old name of a parameter of a Vision Transformer, also inside MaskedPatchNetwork."""
    match = re.match(r"(?:.*/)?(?:net\.)?", new)
    prefix = match[0] if match else ""
    name = new.removeprefix(prefix) + "."  # the dot ends the last component
    for before, after in TABLE:
        if after.startswith("."):
            name = name.replace(f"{after}.", f"{before}.")
        elif name.startswith(f"{after}."):
            name = before + name.removeprefix(after)
    return prefix + name[:-1]


def new_names(stored: Iterable[str]) -> dict[str, str]:
    """Current name -> name in the file, for each tensor of a file."""
    names = list(stored)
    renamed = {new_name(name): name for name in names}
    return renamed if len(renamed) == len(names) else {name: name for name in names}  # names collide: not an old file
