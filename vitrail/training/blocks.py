"""The Transformer blocks in any network: the blocks, the depth of each parameter, and the matrices that Muon trains.

A network with `blocks` can define `param_depth(name)` and `hidden_matrices(name)`, as vitrail's networks do. For other
networks, such as timm's, both follow from the names and the order of the parameters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

BLOCK = re.compile(r"blocks\.(\d+)\.")
STACKED_MATRICES = {"qkv": 3, "kv": 2}  # in one weight, by the name of its layer


def transformer_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks of all Transformers in a module; empty for other networks."""
    return [block for _, _, blocks in _transformers(model) for block in blocks.children()]


def param_depths(model: nn.Module) -> dict[str, int]:
    """The depth of each parameter: 0 before the blocks, i + 1 in block i, and the number of blocks + 1 after them.

    Empty if the module has no Transformer blocks, or those of several networks.
    """
    transformers = list(_transformers(model))
    if len(transformers) != 1:
        return {}
    prefix, transformer, blocks = transformers[0]
    param_depth: Any = getattr(transformer, "param_depth", None)
    after = len(blocks) + 1
    depths: dict[str, int] = {}
    for full_name, _ in model.named_parameters():
        name = full_name.removeprefix(prefix)
        match = BLOCK.match(name)
        if not full_name.startswith(prefix):
            depths[full_name] = after
        elif param_depth is not None:
            depths[full_name] = param_depth(name)
        elif match:
            depths[full_name] = int(match[1]) + 1
        else:
            depths[full_name] = after if any(depths.values()) else 0
    return depths


def hidden_matrices(model: nn.Module) -> dict[str, int]:
    """How many matrices between hidden layers each parameter holds; parameters that hold none are missing."""
    counts = {}
    for prefix, transformer, _ in _transformers(model):
        count: Any = getattr(transformer, "hidden_matrices", None)
        for name, parameter in transformer.named_parameters():
            counts[prefix + name] = _count_matrices(name, parameter) if count is None else count(name)
    return {name: matrices for name, matrices in counts.items() if matrices}


def _transformers(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.ModuleList | nn.Sequential]]:
    """Each module with blocks, as (prefix of its parameter names, module, blocks). A wrapper that shares the blocks of
    the network inside it stands for both."""
    seen: set[int] = set()
    for name, module in model.named_modules():
        blocks = getattr(module, "blocks", None)
        if isinstance(blocks, nn.ModuleList | nn.Sequential) and id(blocks) not in seen:
            seen.add(id(blocks))
            yield f"{name}." if name else "", module, blocks


def _count_matrices(name: str, parameter: Tensor) -> int:
    layer, _, kind = name.rpartition(".")
    is_matrix = BLOCK.match(name) and kind == "weight" and parameter.ndim == 2
    return STACKED_MATRICES.get(layer.rpartition(".")[2], 1) if is_matrix else 0
