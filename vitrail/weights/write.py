"""Weights in any layout, and whether a layout can hold them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch import Tensor

from vitrail.config import ModelConfig
from vitrail.errors import UserError
from vitrail.weights import to_google, to_huggingface, to_timm
from vitrail.weights.bundle import Card, write_bundle

LayoutName = Literal["vitrail", "timm", "huggingface", "google"]


class Target(NamedTuple):
    library: str  # whose networks these are, in words
    cannot: Callable[[Card], str | None]  # why they cannot be this one: "has ...", of which it is the subject
    adopted: Callable[[Card], Card]  # the card with the constants that they fix
    write: Callable[[Path, Card, Mapping[str, Tensor]], None]
    folder: bool  # whether it is written as a folder
    drops: tuple[str, ...]  # what the card says and the layout has no place for


RECORD = "the record of training (evaluate can then no longer leave out the images it was trained on)"
TARGETS: dict[str, Target] = {
    "vitrail": Target(
        "vitrail",
        lambda _: None,
        lambda card: card,
        lambda path, card, state: write_bundle(path, state, card),
        False,
        (),
    ),
    "timm": Target("timm", to_timm.cannot, to_timm.adopted, to_timm.write, True, (RECORD,)),
    "huggingface": Target(
        "transformers", to_huggingface.cannot, to_huggingface.adopted, to_huggingface.write, True, (RECORD,)
    ),
    "google": Target(
        to_google.LIBRARY,
        to_google.cannot,
        to_google.adopted,
        to_google.write,
        False,
        ("preprocessing", "class names", "the licence", RECORD),
    ),
}


def check_expressible(card: Card, to: LayoutName, adopt: bool) -> list[str]:
    """What changes in the constants of the network, each as a phrase; it must be nothing unless `adopt` is set."""
    target = TARGETS[to]
    reason = target.cannot(card)
    if reason:
        raise UserError(f"{target.library} cannot express this network: it {reason}{_way_round(card, target)}")
    changes = _changes(card.model_dump(), target.adopted(card).model_dump())
    if changes and not adopt:
        raise UserError(
            f"{target.library} fixes other constants than these weights have ({'; '.join(changes)}): "
            "add --adopt-constants to take them, and see in the printed difference what that costs"
        )
    return changes


def _way_round(card: Card, target: Target) -> str:
    """What to do where nothing but the representation layer stands in the way."""
    if not isinstance(card.model, ModelConfig) or not card.model.representation:
        return ""
    plain = card.model_copy(update={"model": card.model.model_copy(update={"representation": 0})})
    way = "; vitrail train --from leaves that layer out, and what it trains can then be converted"
    return "" if target.cannot(plain) else way


def _changes(old: Mapping[str, Any], new: Mapping[str, Any], start: str = "") -> list[str]:
    found: list[str] = []
    for key, value in old.items():
        if isinstance(value, Mapping) and isinstance(new[key], Mapping):
            found += _changes(value, new[key], f"{start}{key}.")
        elif value != new[key]:
            found.append(f"{start}{key} {value} -> {new[key]}")
    return found
