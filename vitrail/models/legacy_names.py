"""What parameters were called before they had timm's names: files written then are read by this table."""

from __future__ import annotations

import re
from collections.abc import Iterable

# (old, new): those that begin with a dot stand within blocks and pools, the others at the start of a name.
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
    ("pool.mlp", "attn_pool.mlp"),
    ("representation.layer", "pre_logits.fc"),
    (".attention.qkv", ".attn.qkv"),
    (".attention.out", ".attn.proj"),
    (".attention.relative", ".attn.relative"),
    (".scale1.gain", ".ls1.gamma"),
    (".scale2.gain", ".ls2.gamma"),
    (".mlp.up", ".mlp.fc1"),
    (".mlp.down", ".mlp.fc2"),
]
# Before a name stand the kind of tensor in a checkpoint ("model/", "optimizer/exp_avg/") and the "net." of a network
# within another.
NAME = re.compile(r"((?:.*/)?(?:net\.)?)(.*)")


def new_name(old: str) -> str:
    """What a parameter is called now; a name of now stays as it is."""
    return _renamed(old, TABLE)


def old_name(new: str) -> str:
    """What a parameter of a Vision Transformer was called."""
    return _renamed(new, [(after, before) for before, after in TABLE])


def new_names(stored: Iterable[str]) -> dict[str, str]:
    """For each tensor of a file, what it is called now -> what the file calls it."""
    names = list(stored)
    found = {new_name(name): name for name in names}
    return found if len(found) == len(names) else {name: name for name in names}  # of neither time


def _renamed(name: str, table: Iterable[tuple[str, str]]) -> str:
    match = NAME.fullmatch(name)
    if match is None:
        return name
    prefix, rest = match.groups()
    rest += "."  # so that whole words are found
    for before, after in table:
        if before.startswith("."):
            rest = rest.replace(f"{before}.", f"{after}.")
        elif rest.startswith(f"{before}."):
            rest = after + rest.removeprefix(before)
    return str(prefix + rest[:-1])
