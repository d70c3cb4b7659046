"""Check settings against the schema, and what a run requires beyond them: starting weights, a teacher, libraries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vitrail.config import RunConfig, key_paths, leaves, parse_overrides
from vitrail.errors import UserError, did_you_mean
from vitrail.models.variants import parse_name
from vitrail.training.tensorboard import require_tensorboard
from vitrail.weights.names import local_path
from vitrail.weights.read import Weights


def parse_settings(overrides: Sequence[str]) -> dict[str, Any]:
    """Parse settings given as "section.key=value" into a nested dictionary; unknown keys raise UserError."""
    settings = parse_overrides(overrides)
    known = key_paths(RunConfig)
    for path in leaves(settings):
        if path not in known:
            raise UserError(f"--set: unknown key '{path}'{did_you_mean(path, known)}")
    if {"steps", "epochs"} <= settings.get("train", {}).keys():
        raise UserError("train.steps and train.epochs both set the length of training: set one of them")
    return settings


def check_requirements(config: RunConfig, weights: Weights | None, automatic_start: bool = False) -> None:
    """Raise UserError if something that the run needs is missing, or a setting has no effect on it.

    `automatic_start`: starting weights will be chosen once the data has been read."""
    bare = weights is None and not automatic_start
    if config.kind == "probe" and bare:
        raise UserError("the probe recipe needs pretrained weights: add --from WEIGHTS")
    if config.train.tensorboard:
        require_tensorboard()
    _check_teacher(config)
    if config.lora.rank and config.optimizer.freeze:
        raise UserError("lora.rank and optimizer.freeze both freeze parameters: set one of them")
    if bare and (config.lora.rank or config.optimizer.freeze):
        what = "lora.rank" if config.lora.rank else "optimizer.freeze"
        raise UserError(f"{what} freezes weights, so it needs pretrained ones: add --from WEIGHTS")
    start = weights.card.model.model_dump() if weights is not None else parse_name(config.model.name or "B/16")
    if config.model.init == "mimetic" and (weights is not None or start.get("kind") == "resnet"):
        why = "these weights are already trained" if weights is not None else "a ResNet has no attention"
        raise UserError(f"model.init=mimetic is for attention with random weights, and {why}: leave it out")
    if config.train.gradient_checkpointing and start.get("kind") == "resnet":
        raise UserError("train.gradient_checkpointing has no effect on a ResNet: leave it out")
    if config.kind == "masked":
        _check_masked(config, resnet=start.get("kind") == "resnet" or bool(start.get("axial")))


def _check_teacher(config: RunConfig) -> None:
    objective = config.objective
    if objective.teacher:
        name = objective.teacher
        path = local_path(name)
        if path is not None and not path.exists():
            raise UserError(f"there are no weights at objective.teacher '{name}'")
        return
    for key, is_set in (
        ("teacher_weight", objective.teacher_weight is not None),
        ("teacher_targets", objective.teacher_targets != "soft"),
        ("temperature", objective.temperature != 1.0),
    ):
        if is_set:
            raise UserError(f"objective.{key} has no effect without a teacher: add --set objective.teacher=WEIGHTS")


def _check_masked(config: RunConfig, resnet: bool) -> None:
    if resnet:
        raise UserError("masked-patch pre-training needs a Vision Transformer or a hybrid: choose another --model")
    if config.objective.teacher or config.objective.class_weights != "none":
        raise UserError("masked-patch pre-training has no classification loss: leave out the settings of objective")
    if config.optimizer.freeze or config.lora.rank:
        raise UserError("masked-patch pre-training trains the whole network: leave out optimizer.freeze and lora.rank")


def check_probe_settings(settings: dict[str, Any]) -> None:
    """Raise UserError for a training setting: a linear probe does not train the network."""
    used = ("data.", "model.", "preprocess", "probe.", "train.seed", "train.device")
    for path in leaves(settings):
        if not path.startswith(used):
            raise UserError(f"{path} has no effect with the probe recipe: leave it out")
