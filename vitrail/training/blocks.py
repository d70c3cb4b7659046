"""What training asks of a network, whichever it is: its blocks, the depth of each parameter, and the matrices for Muon.

A network that has `blocks` may answer for itself, by `param_depth(name)` and `hidden_matrices(name)`, as ours do. Of
others, as of timm's, the names and the order of their parameters tell.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

BLOCK = re.compile(r"blocks\.(\d+)\.")
STACKED = {"qkv": 3, "kv": 2}  # matrices in one layer, by its name


def transformer_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks of all Transformers in a module; none in other networks."""
    return [block for _, _, blocks in _transformers(model) for block in blocks.children()]


def param_depths(model: nn.Module) -> dict[str, int]:
    """0 before the blocks, i + 1 in block i, one more than there are blocks after all of them. Empty where a module has
    no blocks, or those of several networks."""
    found = list(_transformers(model))
    if len(found) != 1:
        return {}
    prefix, owner, blocks = found[0]
    own_depth: Any = getattr(owner, "param_depth", None)
    after = len(blocks) + 1
    depths: dict[str, int] = {}
    for name, _ in model.named_parameters():
        own = name.removeprefix(prefix)
        match = BLOCK.match(own)
        if not name.startswith(prefix):
            depths[name] = after
        elif own_depth is not None:
            depths[name] = own_depth(own)
        elif match:
            depths[name] = int(match[1]) + 1
        else:
            depths[name] = after if any(depths.values()) else 0
    return depths


def hidden_matrices(model: nn.Module) -> dict[str, int]:
    """How many matrices between hidden layers each parameter is made of, for those that are any."""
    found = {}
    for prefix, owner, _ in _transformers(model):
        count: Any = getattr(owner, "hidden_matrices", None)
        for name, parameter in owner.named_parameters():
            found[prefix + name] = _matrices(name, parameter) if count is None else count(name)
    return {name: matrices for name, matrices in found.items() if matrices}


def _transformers(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.ModuleList | nn.Sequential]]:
    """What has blocks, with the beginning of its parameters' names. What stands around a network and has its blocks
    comes in its place."""
    seen: set[int] = set()
    for name, module in model.named_modules():
        blocks = getattr(module, "blocks", None)
        if isinstance(blocks, nn.ModuleList | nn.Sequential) and id(blocks) not in seen:
            seen.add(id(blocks))
            yield f"{name}." if name else "", module, blocks


def _matrices(name: str, parameter: Tensor) -> int:
    layer, _, last = name.rpartition(".")
    inside = BLOCK.match(name) and last == "weight" and parameter.ndim == 2
    return STACKED.get(layer.rpartition(".")[2], 1) if inside else 0
