"""What parameters were called before they had timm's names: files written then are read by this table."""

from __future__ import annotations

import re
from collections.abc import Iterable

# (old, new): those that begin with a dot stand within blocks, the others where a parameter's name begins.
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
# Whole words. Before them stand the kind of tensor in a checkpoint ("model/", "optimizer/exp_avg/") and what a network
# is called within another.
OLD_WORDS = re.compile(rf"(?<![^./])({'|'.join(map(re.escape, NEW))})(?![^.])")


def new_name(old: str) -> str:
    """What a parameter is called now; a name of now stays as it is."""
    return OLD_WORDS.sub(lambda match: NEW[match[1]], old)


def old_name(new: str) -> str:
    """What a parameter of a Vision Transformer was called, also within the network for masked patches."""
    start = re.match(r"(?:.*/)?(?:net\.)?", new)
    prefix = start[0] if start else ""
    name = new.removeprefix(prefix) + "."  # so that whole words are found
    for before, after in TABLE:
        if after.startswith("."):
            name = name.replace(f"{after}.", f"{before}.")
        elif name.startswith(f"{after}."):
            name = before + name.removeprefix(after)
    return prefix + name[:-1]


def new_names(stored: Iterable[str]) -> dict[str, str]:
    """For each tensor of a file, what it is called now -> what the file calls it."""
    names = list(stored)
    found = {new_name(name): name for name in names}
    return found if len(found) == len(names) else {name: name for name in names}  # of neither time
