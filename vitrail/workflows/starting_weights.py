"""The starting weights of a run when the user passes none: pretrained ones from the Hub, the bundled ones, or random.

In: the settings and the facts that choices depend on. Out: the weights, with a `Decision` that states the reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from vitrail.config import ModelChoice, RunConfig
from vitrail.errors import UserError
from vitrail.weights.backbones import bundled, unavailable_reason
from vitrail.weights.hub import OFFLINE_HINT
from vitrail.weights.read import Weights, read_weights
from vitrail.workflows.choose import START, ChoiceInputs, Decision, choose_backbone

# Settings that can be combined with any starting weights.
NEUTRAL = {"weights", "start", "image_size", "dropout", "drop_path", "head_init", "head_bias", "resample"}


def starts_automatically(config: RunConfig, recipe: str | None) -> bool:
    """Whether vitrail chooses the starting weights (`choose_start`)."""
    start, name = config.model.start, config.model.name
    if config.model.weights or start == "random":
        return False
    needs = f"the recipe {recipe} needs starting weights" if recipe else f"model.start={start} needs starting weights"
    if start == "required":
        raise UserError(f"{needs}: add --from WEIGHTS")
    if start == "auto" and name:
        raise UserError(f"{needs}, and --model {name} selects none: add --from WEIGHTS, or leave --model out")
    return start == "auto" or (config.kind == "train" and not _architecture_settings(config.model))


def random_start_decision(config: RunConfig, recipe: str | None) -> Decision:
    """The decision to start from random weights, with the setting that causes it."""
    if recipe is not None:
        why = f"the recipe {recipe}"
    elif config.model.start == "random" or config.kind != "train":
        why = "model.start=random" if config.model.start else f"kind={config.kind}"
    else:
        key = _architecture_settings(config.model)[0]
        why = f"model.{key}={getattr(config.model, key)}"
    return Decision(START, "random weights", f"because of {why}; pass --from WEIGHTS to start from pretrained ones")


def _architecture_settings(model: ModelChoice) -> list[str]:
    """The settings that describe a new network, for which there are no pretrained weights."""
    fields = ModelChoice.model_fields.items()
    return [key for key, field in fields if key not in NEUTRAL and getattr(model, key) != field.default]


def choose_start(facts: ChoiceInputs, message: Callable[[str], None]) -> tuple[Weights, str, Decision]:
    """Choose pretrained weights: a network from the Hub, or the bundled one if the Hub cannot be reached.

    Returns the weights, their name for config.toml (with the commit), and the decision. Random weights are never chosen
    automatically. `message` prints a line before a download."""
    backbone, reason = choose_backbone(facts)
    size = f"{backbone.megabytes} MB, {backbone.licence}"
    missing = unavailable_reason(backbone, lambda: message(f"downloading {backbone.repository} ({size}) from the Hub"))
    if missing:
        return _bundled(missing)
    try:
        weights = read_weights(backbone.spec)
    except UserError as error:  # the Hub lists it, but the download failed
        return _bundled(str(error).removesuffix(OFFLINE_HINT))
    commit = weights.file.parent.name
    spec = f"{backbone.spec}@{commit}" if re.fullmatch(r"[0-9a-f]{40}", commit) else backbone.spec
    pretrained = f"{backbone.network}, {reason}; pretrained on {backbone.pretrained_on}"
    why = f"{pretrained}; --recipe scratch starts from random weights"
    return weights, spec, Decision(START, f"{backbone.repository} ({size})", why)


def _bundled(missing: str) -> tuple[Weights, str, Decision]:
    backbone = bundled()
    why = (
        f"because {missing}; pretrained on {backbone.pretrained_on}; pass --from WEIGHTS for other weights, "
        "--recipe scratch for random ones"
    )
    value = f"{backbone.spec} {backbone.network} ({backbone.megabytes} MB, {backbone.licence})"
    return read_weights(backbone.spec), backbone.spec, Decision(START, value, why)
