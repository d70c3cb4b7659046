"""What a run starts from when the user names no weights."""

from __future__ import annotations

import re
from collections.abc import Callable

from vitrail.config import ModelChoice, RunConfig
from vitrail.errors import UserError
from vitrail.weights.backbones import bundled, why_not
from vitrail.weights.hub import WITHOUT
from vitrail.weights.read import Weights, read_weights
from vitrail.workflows.choose import START, ChoiceInputs, Decision, choose_backbone

# Settings of a network that any starting weights can have.
NEUTRAL = {"weights", "start", "image_size", "dropout", "drop_path", "head_init", "head_bias", "resample"}


def starts_automatically(config: RunConfig, recipe: str | None) -> bool:
    """Whether it is left to the run which weights to start from."""
    start, name = config.model.start, config.model.name
    if config.model.weights or start == "random":
        return False
    further = f"the recipe {recipe} trains given weights further" if recipe else f"model.start={start} needs weights"
    if start == "required":
        raise UserError(f"{further}: add --from WEIGHTS")
    if start == "auto" and name:
        raise UserError(f"{further}, and {name} alone names none: add --from WEIGHTS, or leave the network out")
    return start == "auto" or (config.kind == "train" and not _own(config.model))


def random_start_decision(config: RunConfig, recipe: str | None) -> Decision:
    """For a run that is not open and has no weights: that it starts at random, and why."""
    if recipe is not None:
        why = f"the recipe {recipe} starts there"
    elif config.model.start == "random" or config.kind != "train":
        why = "model.start=random asks for them" if config.model.start else f"kind={config.kind} starts there"
    else:
        key = _own(config.model)[0]
        why = f"model.{key}={getattr(config.model, key)} asks for a new network"
    return Decision(START, "random weights", f"because {why}; --from WEIGHTS starts from trained ones")


def _own(model: ModelChoice) -> list[str]:
    """Settings that describe a network of its own, for which there are no weights."""
    fields = ModelChoice.model_fields.items()
    return [key for key, field in fields if key not in NEUTRAL and getattr(model, key) != field.default]


def choose_start(facts: ChoiceInputs, tell: Callable[[str], None]) -> tuple[Weights, str, Decision]:
    """The weights to start from with the name to write down, and the reason. Random ones are only for who asks."""
    backbone, fitting = choose_backbone(facts)
    size = f"{backbone.megabytes} MB, {backbone.licence}"
    missing = why_not(backbone, lambda: tell(f"fetching {backbone.repository} ({size}) from the Hub"))
    if missing:
        return _bundled(missing)
    try:
        weights = read_weights(backbone.spec)
    except UserError as error:  # the Hub knows it, and yet it does not come
        return _bundled(str(error).removesuffix(WITHOUT))
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
