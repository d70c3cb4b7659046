"""What other libraries' networks can be: ours in fewer terms, and what of ours they do not have."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from vitrail.config import ModelConfig, Size
from vitrail.models.pos_embed import added_positions

Expressed = tuple[ModelConfig, Mapping[str, Tensor]]


def ungridded(model: ModelConfig, state: Mapping[str, Tensor]) -> Expressed:
    """Positions that are computed, from waves or from rows and columns, as the table that they amount to."""
    if model.positions not in ("2d", "sincos"):
        return model, state
    positions = added_positions(model)
    start = "pos_embed."
    positions.load_state_dict({name.removeprefix(start): t for name, t in state.items() if name.startswith(start)})
    with torch.no_grad():
        table = positions(torch.zeros(1, model.sequence, model.width))[:, model.prefix :]
    others = {name: tensor for name, tensor in state.items() if not name.startswith(start)}
    plain = model.model_copy(update={"positions": "1d", "prefix_positions": False})
    return plain, {**others, "pos_embed.table": table}


def prefix_rows(model: ModelConfig, state: Mapping[str, Tensor]) -> Expressed:
    """A table with rows for class token and registers, which are zero where it had none: they add nothing."""
    if model.positions != "1d" or model.prefix_positions:
        return model, state
    table = state["pos_embed.table"]
    rows = table.new_zeros(1, model.prefix, model.width)
    whole = model.model_copy(update={"prefix_positions": True})
    return whole, {**state, "pos_embed.table": torch.cat([rows, table], dim=1)}


def side(size: Size) -> int | list[int]:
    """A size as other libraries' configs write it: one number where it is square."""
    return size[0] if size[0] == size[1] else list(size)


def lacking(thing: str, library: str) -> str:
    """A reason why `library` cannot express a network, which is the subject of the sentence."""
    return f"has {thing}, which the networks of {library} do not have"


def ours_alone(model: ModelConfig, library: str) -> str | None:
    """What this network has of the things that no other library's networks have."""
    things = {
        "attention along rows and columns": model.axial,
        "relative positions": model.positions == "relative",
        "positions at every layer": model.positions_at != "stem",
    }
    return next((lacking(thing, library) for thing, there in things.items() if there), None)
