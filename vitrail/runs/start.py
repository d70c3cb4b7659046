"""What a run starts from when the user names neither weights nor network nor recipe."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from vitrail.errors import UserError
from vitrail.runs.choose import START, Decision, Facts, choose_backbone
from vitrail.weights.backbones import bundled, why_not
from vitrail.weights.read import Weights, read_weights

NEUTRAL = {"image_size", "dropout", "drop_path"}  # settings of a network that any starting weights can have


def is_open(recipe: str | None, given: dict[str, Any]) -> bool:
    """Whether the user leaves it to the run what to start from."""
    return recipe is None and given.get("model", {}).keys() <= NEUTRAL and "kind" not in given


def find_start(facts: Facts, tell: Callable[[str], None]) -> tuple[Weights, str, Decision]:
    """The weights to start from with the name to write down, and the reason. Random ones are only for who asks."""
    backbone, fitting = choose_backbone(facts)
    size = f"{backbone.megabytes} MB, {backbone.licence}"
    missing = why_not(backbone, lambda: tell(f"fetching {backbone.repository} ({size}) from the Hub"))
    if missing:
        return _bundled(missing)
    try:
        weights = read_weights(backbone.spec)
    except UserError as error:
        raise UserError(f"{error}; --recipe scratch starts from random weights") from None
    commit = weights.file.parent.name
    spec = f"{backbone.spec}@{commit}" if re.fullmatch(r"[0-9a-f]{40}", commit) else backbone.spec
    why = f"{backbone.network}, {fitting}; it learned from {backbone.learned}; --recipe scratch does without"
    return weights, spec, Decision(START, f"{backbone.repository} ({size})", why)


def _bundled(missing: str) -> tuple[Weights, str, Decision]:
    own = bundled()
    why = (
        f"because {missing}; it learned from {own.learned}; --from WEIGHTS names others; "
        "--recipe scratch starts from random weights"
    )
    value = f"{own.spec} {own.network} ({own.megabytes} MB, {own.licence})"
    return read_weights(own.spec), own.spec, Decision(START, value, why)
