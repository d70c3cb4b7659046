"""Going on with a run exactly where it stopped: settings from its config.toml, the rest from its last checkpoint."""

from __future__ import annotations

import os
import platform
from copy import deepcopy
from dataclasses import asdict, replace
from functools import reduce
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import PIL
import torch
from pydantic import BaseModel, ConfigDict, Field
from rich.console import Console

from vitrail import __version__
from vitrail.config import (
    Preprocess,
    ResNetConfig,
    RunConfig,
    flatten,
    leaves,
    merge,
    network_config,
    read_recipe,
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
from vitrail.workflows.linear_probe import Baseline
from vitrail.workflows.resolve import Plan, read_data, total_steps, with_recipe_file
from vitrail.workflows.show import scan_progress
from vitrail.workflows.train_test_overlap import TrainingRecord, earlier_training

# What a user may leave to the run, whose config.toml then has what it chose.
CHOSEN = {"train.micro_batch_size": 0, "train.compile": "auto", "train.device": "auto", "precision.compute": "auto"}
# What tensors of a checkpoint are shaped by.
FIXED = ("kind", "model.", "preprocess.", "lora.", "masked.target", "optimizer.name", "optimizer.freeze", "train.ema",
         "precision.parameters")  # fmt: skip


class _About(BaseModel):
    """What checkpoints say of their runs, those of custom ones less than others; an older one may not say all of it."""

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
    """What a checkpoint says of its run, if it says so in the right kinds of values."""
    said = validate(_About, saved.facts, f"the last checkpoint of {folder}")
    return {**saved.facts, **said.model_dump(exclude_unset=True)}


def checkpoint_facts(plan: Plan, to_beat: Baseline | None) -> dict[str, Any]:
    """What a checkpoint says of its run, so that going on does not need the starting weights again."""
    digests, partly = earlier_training(_learned_from(plan))
    return {
        "config": plan.config.model_dump(mode="json"),
        "model": plan.model.model_dump(),
        "preprocess": plan.preprocess.model_dump(),
        "fingerprint": plan.dataset.fingerprint,
        "images": _images(plan.dataset),
        "began_with": len(plan.dataset.splits["train"]),
        "environment": environment(plan.device),
        "decisions": [asdict(decision) for decision in plan.decisions],
        "baseline": asdict(to_beat) if to_beat else None,
        "source": plan.weights.origin if plan.weights else "",
        "licence": plan.weights.card.licence if plan.weights else "",
        "digests_before": digests,  # an array, which a checkpoint keeps as a tensor
        "trained_before": partly,
        "teacher": _teacher(plan.config),
    }


def _learned_from(plan: Plan) -> list[TrainingRecord]:
    """The starting weights and the teacher, where there are any."""
    start = [TrainingRecord.of(plan.weights)] if plan.weights else []
    teacher = plan.config.objective.teacher
    return [*start, TrainingRecord.of(read_weights(teacher))] if teacher else start


def _teacher(config: RunConfig) -> str:
    """A checksum of the teacher's weights."""
    teacher = config.objective.teacher
    if not teacher:
        return ""
    weights = read_weights(teacher)
    named = str if isinstance(weights.card.model, ResNetConfig) else old_name  # as runs before wrote it down
    return digest({named(name): tensor for name, tensor in weights.state.items()}, {})


def environment(device: torch.device) -> dict[str, str]:
    """What decides the last bits of a result."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "vitrail": __version__,
        "torch": torch.__version__,
        "threads": str(torch.get_num_threads()),
        "device": f"{device.type} {name}",
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "numpy": np.__version__,
        "pillow": PIL.__version__,
    }


def resumed_facts(facts: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """The same from a checkpoint, with what has changed since and was accepted."""
    start = ("decisions", "baseline", "source", "licence", "trained_before", "digests_before", "began_with")
    return checkpoint_facts(plan, None) | {key: facts[key] for key in start if key in facts}


def has_saved_run(folder: Path) -> bool:
    """Whether there is anything to go on from, or to lose."""
    if CheckpointManager(folder / "checkpoints", 1).steps() or is_finished(folder):
        return True
    if any((folder / "checkpoints").glob("step_*")):
        raise UserError(f"no checkpoint in {folder / 'checkpoints'} has all its parts: start again with --overwrite")
    return False


def is_finished(folder: Path) -> bool:
    return (folder / "model.safetensors").is_file()


def check_same_settings(folder: Path, given: dict[str, Any], recipe: str | None) -> None:
    """What is given again must be what the run was started with; what is not given need not be given again."""
    file = folder / "config.toml"
    if not file.is_file():
        return
    stored = read_recipe(str(file))
    given = deepcopy(with_recipe_file(recipe or "", given))
    if recipe and not recipe.endswith(".toml"):  # of a file counts what it says, not how it is called
        given["recipe"] = recipe
    if "epochs" in given.get("train", {}):  # which stand as steps in what is stored
        _count_steps(given, stored, folder)
    if given.get("data", {}).get("path"):
        given["data"]["path"] = os.path.normpath(user_path(given["data"]["path"]).absolute())
    if path := given.get("data", {}).get("quarantine"):
        given["data"]["quarantine"] = str(user_path(path).absolute())
    for section, key in (("model", "weights"), ("objective", "teacher")):
        if spec := given.get(section, {}).get(key):
            given[section][key] = absolute_spec(spec)
    asked = validate(RunConfig, merge(stored, given), str(file)).model_dump()
    before = validate(RunConfig, stored, str(file)).model_dump()
    for path in leaves(given):
        new, old = (reduce(lambda part, key: part[key], path.split("."), values) for values in (asked, before))
        if (new, type(new)) != (old, type(old)) and new != CHOSEN.get(path, ...):
            raise UserError(
                f"the run in {folder} was started with {path}={old}, and not {new}: leave it out to go on, "
                "or choose another --out"
            )


def _count_steps(given: dict[str, Any], stored: dict[str, Any], folder: Path) -> None:
    settings = merge(stored, given)
    if "steps" not in given["train"]:
        settings["train"].pop("steps", None)
    train = validate(RunConfig, settings, "settings").train
    del given["train"]["epochs"]
    images = CheckpointManager(folder / "checkpoints", 1).facts().get("began_with")
    if isinstance(images, int) and "steps" in stored.get("train", {}):  # an old run may not tell, and a probe has none
        given["train"]["steps"] = total_steps(train, images)


def read_run(
    folder: Path, console: Console, interrupts: Interrupts, accept_changes: bool = False
) -> tuple[Plan, Checkpoint]:
    """The plan of an unfinished run, and the checkpoint it goes on from."""
    if not (folder / "config.toml").is_file():
        raise UserError(f"{folder} holds no run: there is no config.toml in it")
    if (folder / "model.safetensors").is_file():
        raise UserError(f"the run in {folder} is finished: its weights are {folder / 'model.safetensors'}")
    written = validate(RunConfig, read_recipe(str(folder / "config.toml")), str(folder / "config.toml"))
    if written.kind == "custom":
        raise UserError(f"{folder} holds a run of a network of your own: go on with vitrail.train(..., resume=True)")
    found = CheckpointManager(folder / "checkpoints", written.train.keep_checkpoints).latest()
    if found is None:
        raise UserError(f"{folder} has no checkpoint to go on from: start the run again with --overwrite")
    saved, damaged = found
    about = saved.facts
    missing = {"config", "model", "preprocess", "fingerprint", "environment", "decisions", "seconds"} - about.keys()
    if missing:
        raise UserError(f"the checkpoint of {folder} was written by another version of vitrail: start the run again")
    about = read_facts(saved, folder)
    config = validate(RunConfig, about["config"], "checkpoint")
    if written != config:
        if not accept_changes:
            raise UserError(
                f"{folder / 'config.toml'} was changed after the run was started; a resumed run keeps its settings: "
                "put them back, add --accept-changes, or start a new run with --recipe and another --out"
            )
        changed = changed_settings(config, written)
        fixed = sorted(key for key in changed if key.startswith(FIXED))
        if fixed:
            raise UserError(
                f"{fixed[0]} cannot change in a run that has begun, since its checkpoint depends on it: put it back to "
                f"{changed[fixed[0]][0]}, or start a new run with another --out"
            )
        if (steps := written.train.steps or 0) < about["step"]:
            raise UserError(f"the run has taken {about['step']:,} steps already: train.steps={steps} is too few")
        told = "; ".join(f"{key} {old} -> {new}" for key, (old, new) in changed.items())
        console.print(f"[yellow]the settings changed ({escape(told)})[/]")
        config = written
    for sentence in damaged:
        console.print(f"[yellow]{escape(sentence)}[/]")
    if about.get("teacher", now := _teacher(config)) != now:
        sentence = f"the weights of the teacher, {config.objective.teacher}, are not those this run was started with"
        if not accept_changes:
            raise UserError(f"{sentence}: put them back, add --accept-changes, or start a new run with another --out")
        console.print(f"[yellow]{escape(sentence)}[/]")
    dataset = _same_data(config, about, accept_changes, console, interrupts)
    device = choose_device(config.train.device)
    warn_machine_changed(about["environment"], environment(device), console)
    model = network_config(about["model"], "checkpoint")
    if model.num_classes not in (0, len(dataset.classes)):
        raise UserError(f"the data has {len(dataset.classes)} classes now, and the run {model.num_classes}")
    preprocess = validate(Preprocess, about["preprocess"], "checkpoint")
    decisions = [Decision(**row) for row in about["decisions"]]
    return Plan(config, model, preprocess, dataset, device, None, decisions), replace(saved, facts=about)


def _same_data(
    config: RunConfig, about: dict[str, Any], accept_changes: bool, console: Console, interrupts: Interrupts
) -> Dataset:
    with scan_progress(console, interrupts) as scanned:
        dataset = read_data(config, scanned)
    if dataset.fingerprint == about["fingerprint"]:
        return dataset
    if not accept_changes:
        raise UserError(
            f"the images in {config.data.path} are not those this run was started with{_counted(about, dataset)}; "
            "put them back, add --accept-changes, or start a new run with another --out"
        )
    console.print("[yellow]the images are not those this run was started with[/]")
    return dataset


def _images(dataset: Dataset) -> dict[str, int]:
    return {name: len(samples) for name, samples in dataset.splits.items()}


def _counted(about: dict[str, Any], dataset: Dataset) -> str:
    """How many there were and are; a checkpoint may be older than their being counted."""
    now, then = _images(dataset), about.get("images")
    if then is None:
        return ""
    if then == now:
        return ": as many, but some have changed"
    before, after = (", ".join(f"{count:,} {name}" for name, count in images.items()) for images in (then, now))
    return f": there were {before}, and are {after}"


def changed_settings(before: RunConfig, after: RunConfig) -> dict[str, tuple[Any, Any]]:
    old, new = (flatten(config.model_dump(mode="json")) for config in (before, after))
    return {key: (old.get(key), new.get(key)) for key in {**old, **new} if old.get(key) != new.get(key)}


def warn_machine_changed(then: dict[str, str], now: dict[str, str], console: Console) -> None:
    changed = [f"{key} {then.get(key)} -> {value}" for key, value in now.items() if then.get(key) != value]
    if changed:
        console.print(
            f"[yellow]the machine changed ({escape('; '.join(changed))}): the result may differ in the last digits[/]",
        )
