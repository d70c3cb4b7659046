"""Resume a run exactly where it stopped.

In: the run folder. Out: the `Plan` and the last checkpoint (`read_run`). Settings come from config.toml, the rest from
the checkpoint, which stores the facts of `checkpoint_facts`.
"""

from __future__ import annotations

import os
from copy import deepcopy
from dataclasses import asdict, replace
from functools import reduce
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from rich.console import Console

from vitrail.config import (
    Preprocess,
    ResNetConfig,
    RunConfig,
    flatten,
    leaves,
    merge,
    network_config,
    read_run_config,
    validate,
)
from vitrail.data.dataset import Dataset
from vitrail.errors import UserError, user_path
from vitrail.inference.device import choose_device
from vitrail.interrupt import Interrupts
from vitrail.models.legacy_names import old_name
from vitrail.terminal import escape
from vitrail.training.checkpoint import Checkpoint, CheckpointManager, digest
from vitrail.weights.names import absolute_spec
from vitrail.weights.read import read_weights
from vitrail.workflows.choose import Decision
from vitrail.workflows.environment import environment, warn_machine_changed
from vitrail.workflows.linear_probe import Baseline
from vitrail.workflows.resolve import Plan, read_data, total_steps, with_recipe_file
from vitrail.workflows.show import scan_progress
from vitrail.workflows.train_test_overlap import TrainingRecord, earlier_training

# Automatic values: config.toml has the value that was chosen, so these may be given again.
CHOSEN = {"train.micro_batch_size": 0, "train.compile": "auto", "train.device": "auto", "precision.compute": "auto"}
# Settings that the tensors of a checkpoint depend on.
FIXED = ("kind", "model.", "preprocess.", "lora.", "masked.target", "optimizer.name", "optimizer.freeze", "train.ema",
         "precision.parameters")  # fmt: skip
NEEDED = {"config", "model", "preprocess", "fingerprint", "environment", "decisions", "seconds"}  # facts, to resume


class _RunFacts(BaseModel):
    """The facts about its run in a checkpoint. Those of `vitrail.fit` and of older versions have fewer fields."""

    model_config = ConfigDict(allow_inf_nan=False)
    config: dict[str, Any]
    environment: dict[str, str]
    model: dict[str, Any] = {}
    preprocess: dict[str, Any] = {}
    fingerprint: str = ""
    images: dict[str, int] | None = None
    began_with: int | None = None
    decisions: list[Decision] = []
    baseline: Baseline | None = None
    source: str = ""
    licence: str = ""
    trained_before: list[list[Annotated[str, Field(pattern="^[0-9a-f]{1,16}$")]]] = []
    teacher: str = ""


def read_facts(saved: Checkpoint, folder: Path) -> dict[str, Any]:
    """The facts about the run in a checkpoint, with their types checked."""
    facts = validate(_RunFacts, saved.facts, f"the last checkpoint of {folder}")
    return {**saved.facts, **facts.model_dump(exclude_unset=True)}


def checkpoint_facts(plan: Plan, baseline: Baseline | None) -> dict[str, Any]:
    """The facts about a run that its checkpoints store, so that resuming does not need the starting weights."""
    digests, partly = earlier_training(_training_records(plan))
    return {
        "config": plan.config.model_dump(mode="json"),
        "model": plan.model.model_dump(),
        "preprocess": plan.preprocess.model_dump(),
        "fingerprint": plan.dataset.fingerprint,
        "images": _images(plan.dataset),
        "began_with": len(plan.dataset.splits["train"]),
        "environment": environment(plan.device),
        "decisions": [asdict(decision) for decision in plan.decisions],
        "baseline": asdict(baseline) if baseline else None,
        "source": plan.weights.origin if plan.weights else "",
        "licence": plan.weights.card.licence if plan.weights else "",
        "digests_before": digests,  # an array, stored as a tensor
        "trained_before": partly,
        "teacher": _teacher_digest(plan.config),
    }


def _training_records(plan: Plan) -> list[TrainingRecord]:
    """The records of the starting weights and of the teacher, if any."""
    start = [TrainingRecord.of(plan.weights)] if plan.weights else []
    teacher = plan.config.objective.teacher
    return [*start, TrainingRecord.of(read_weights(teacher))] if teacher else start


def _teacher_digest(config: RunConfig) -> str:
    """A checksum of the teacher's weights."""
    teacher = config.objective.teacher
    if not teacher:
        return ""
    weights = read_weights(teacher)
    named = str if isinstance(weights.card.model, ResNetConfig) else old_name  # earlier versions hashed the old names
    return digest({named(name): tensor for name, tensor in weights.state.items()}, {})


def resumed_facts(facts: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """The facts of a resumed run: those of its checkpoint about the start, the others from the present plan."""
    from_start = ("decisions", "baseline", "source", "licence", "trained_before", "digests_before", "began_with")
    return checkpoint_facts(plan, None) | {key: facts[key] for key in from_start if key in facts}


def has_saved_run(folder: Path) -> bool:
    """Whether a folder holds a checkpoint or a finished run."""
    checkpoints = folder / "checkpoints"
    if CheckpointManager(checkpoints, 1).steps() or is_finished(folder):
        return True
    if any(checkpoints.glob("step_*")):
        raise UserError(f"no checkpoint in {checkpoints} is complete: start again with --overwrite")
    return False


def is_finished(folder: Path) -> bool:
    """Whether a run folder has its final weights."""
    return (folder / "model.safetensors").is_file()


def check_same_settings(folder: Path, settings: dict[str, Any], recipe: str | None) -> None:
    """Raise UserError if `settings` or `recipe` differ from those the run was started with. They may be left out."""
    file = folder / "config.toml"
    if not file.is_file():
        return
    stored = read_run_config(file)
    requested = deepcopy(with_recipe_file(recipe or "", settings))
    if recipe and not recipe.endswith(".toml"):  # a recipe file is compared by its settings, not by its name
        requested["recipe"] = recipe
    if "epochs" in requested.get("train", {}):  # config.toml has steps instead
        _epochs_to_steps(requested, stored, folder)
    if requested.get("data", {}).get("path"):
        requested["data"]["path"] = os.path.normpath(user_path(requested["data"]["path"]).absolute())
    if path := requested.get("data", {}).get("quarantine"):
        requested["data"]["quarantine"] = str(user_path(path).absolute())
    for section, key in (("model", "weights"), ("objective", "teacher")):
        if spec := requested.get(section, {}).get(key):
            requested[section][key] = absolute_spec(spec)
    after = validate(RunConfig, merge(stored, requested), str(file)).model_dump()
    before = validate(RunConfig, stored, str(file)).model_dump()
    for path in leaves(requested):
        new, old = (reduce(lambda part, key: part[key], path.split("."), values) for values in (after, before))
        if (new, type(new)) != (old, type(old)) and new != CHOSEN.get(path, ...):
            raise UserError(
                f"the run in {folder} was started with {path}={old}, not {new}: leave this setting out to resume, "
                "or choose another --out"
            )


def _epochs_to_steps(requested: dict[str, Any], stored: dict[str, Any], folder: Path) -> None:
    """Replace train.epochs in `requested` by the steps that it had when the run was started."""
    settings = merge(stored, requested)
    if "steps" not in requested["train"]:
        settings["train"].pop("steps", None)
    train = validate(RunConfig, settings, "settings").train
    del requested["train"]["epochs"]
    images = CheckpointManager(folder / "checkpoints", 1).facts().get("began_with")
    if isinstance(images, int) and "steps" in stored.get("train", {}):  # missing in old runs; a probe has no steps
        requested["train"]["steps"] = total_steps(train, images)


def read_run(
    folder: Path, console: Console, interrupts: Interrupts, accept_changes: bool = False
) -> tuple[Plan, Checkpoint]:
    """The plan of an unfinished run, and the checkpoint to resume from."""
    if not (folder / "config.toml").is_file():
        raise UserError(f"{folder} holds no run: it has no config.toml")
    if is_finished(folder):
        raise UserError(f"the run in {folder} is finished: its weights are {folder / 'model.safetensors'}")
    written = validate(RunConfig, read_run_config(folder / "config.toml"), str(folder / "config.toml"))
    if written.kind == "custom":
        raise UserError(f"{folder} holds a run of vitrail.fit: resume it with vitrail.fit(..., resume=True)")
    latest = CheckpointManager(folder / "checkpoints", written.train.keep_checkpoints).latest()
    if latest is None:
        raise UserError(f"{folder} has no checkpoint to resume from: start the run again with --overwrite")
    saved, warnings = latest
    if NEEDED - saved.facts.keys():
        raise UserError(f"the checkpoint of {folder} is of an incompatible version of vitrail: start the run again")
    facts = read_facts(saved, folder)
    config = validate(RunConfig, facts["config"], "checkpoint")
    if written != config:
        _check_changes(folder, config, written, facts["step"], accept_changes, console)
        config = written
    if facts.get("teacher", now := _teacher_digest(config)) != now:
        warnings.append(f"the teacher, {config.objective.teacher}, has changed since the run was started")
        if not accept_changes:
            advice = "restore its weights, add --accept-changes, or start a new run with another --out"
            raise UserError(f"{warnings[-1]}: {advice}")
    for warning in warnings:
        console.print(f"[yellow]{escape(warning)}[/]")
    dataset = _same_data(config, facts, accept_changes, console, interrupts)
    device = choose_device(config.train.device)
    warn_machine_changed(facts["environment"], environment(device), console)
    model = network_config(facts["model"], "checkpoint")
    if model.num_classes not in (0, len(dataset.classes)):
        raise UserError(f"the data now has {len(dataset.classes)} classes, but the run has {model.num_classes}")
    preprocess = validate(Preprocess, facts["preprocess"], "checkpoint")
    decisions = [Decision(**row) for row in facts["decisions"]]
    return Plan(config, model, preprocess, dataset, device, None, decisions), replace(saved, facts=facts)


def _check_changes(
    folder: Path, before: RunConfig, now: RunConfig, step: int, accept_changes: bool, console: Console
) -> None:
    """Raise UserError if config.toml changed since `before`, unless the changes are accepted and possible."""
    if not accept_changes:
        raise UserError(
            f"{folder / 'config.toml'} was changed after the run was started: restore it, add --accept-changes, or "
            "start a new run with --recipe and another --out"
        )
    changed = changed_settings(before, now)
    fixed = sorted(key for key in changed if key.startswith(FIXED))
    if fixed:
        raise UserError(
            f"{fixed[0]} cannot change in a started run, because its checkpoints depend on it: set it back to "
            f"{changed[fixed[0]][0]}, or start a new run with another --out"
        )
    if (steps := now.train.steps or 0) < step:
        raise UserError(f"train.steps={steps} is too few: the run has already taken {step:,} steps")
    changes = "; ".join(f"{key} {old} -> {new}" for key, (old, new) in changed.items())
    console.print(f"[yellow]settings changed: {escape(changes)}[/]")


def _same_data(
    config: RunConfig, facts: dict[str, Any], accept_changes: bool, console: Console, interrupts: Interrupts
) -> Dataset:
    with scan_progress(console, interrupts) as scanned:
        dataset = read_data(config, scanned)
    if dataset.fingerprint != facts["fingerprint"]:
        if not accept_changes:
            counts = _image_counts(facts, dataset)
            raise UserError(
                f"the images in {config.data.path} have changed since the run was started{counts}; "
                "restore them, add --accept-changes, or start a new run with another --out"
            )
        console.print("[yellow]the images have changed since the run was started[/]")
    return dataset


def _images(dataset: Dataset) -> dict[str, int]:
    return {name: len(samples) for name, samples in dataset.splits.items()}


def _image_counts(facts: dict[str, Any], dataset: Dataset) -> str:
    """The number of images in each split then and now, for a message; old checkpoints have none."""
    now, then = _images(dataset), facts.get("images")
    if then is None:
        return ""
    if then == now:
        return ": the number is the same, but not the images"
    before, after = (", ".join(f"{count:,} {name}" for name, count in images.items()) for images in (then, now))
    return f": {before} then, {after} now"


def changed_settings(before: RunConfig, after: RunConfig) -> dict[str, tuple[Any, Any]]:
    """The settings that differ, each with its old and its new value."""
    old, new = (flatten(config.model_dump(mode="json")) for config in (before, after))
    return {key: (old.get(key), new.get(key)) for key in {**old, **new} if old.get(key) != new.get(key)}
