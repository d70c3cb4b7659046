"""Going on with a run exactly where it stopped: settings from its config.toml, the rest from its last checkpoint."""

from __future__ import annotations

import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import torch
from rich.console import Console

from vitrail import __version__
from vitrail.config import Preprocess, RunConfig, network_config, read_recipe, validate
from vitrail.errors import UserError
from vitrail.infer.device import choose_device
from vitrail.runs.choose import Decision
from vitrail.runs.fit import Checkpoint
from vitrail.runs.plan import Plan, read_data
from vitrail.runs.probing import Baseline
from vitrail.runs.show import scanning
from vitrail.training.checkpoint import Checkpoints
from vitrail.training.interrupt import Interrupts


def about_run(plan: Plan, to_beat: Baseline | None) -> dict[str, Any]:
    """What a checkpoint says of its run, so that going on does not need the starting weights again."""
    return {
        "config": plan.config.model_dump(mode="json"),
        "model": plan.model.model_dump(),
        "preprocess": plan.preprocess.model_dump(),
        "fingerprint": plan.dataset.fingerprint,
        "environment": environment(plan.device),
        "decisions": [asdict(decision) for decision in plan.decisions],
        "baseline": asdict(to_beat) if to_beat else None,
        "source": plan.weights.origin if plan.weights else "",
        "licence": plan.weights.card.licence if plan.weights else "",
    }


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


def read_run(folder: Path, console: Console, interrupts: Interrupts) -> tuple[Plan, dict[str, Any], Checkpoint]:
    """The plan of an unfinished run, what its checkpoint says of it, and the checkpoint."""
    if not (folder / "config.toml").is_file():
        raise UserError(f"{folder} holds no run: there is no config.toml in it")
    if (folder / "model.safetensors").is_file():
        raise UserError(f"the run in {folder} is finished: its weights are {folder / 'model.safetensors'}")
    written = validate(RunConfig, read_recipe(str(folder / "config.toml")), str(folder / "config.toml"))
    found = Checkpoints(folder / "checkpoints", written.train.keep_checkpoints).latest()
    if found is None:
        raise UserError(f"{folder} has no checkpoint to go on from: start the run again with --overwrite")
    tensors, about, damaged = found
    missing = {"config", "model", "preprocess", "fingerprint", "environment", "decisions", "seconds"} - about.keys()
    if missing:
        raise UserError(f"the checkpoint of {folder} was written by another version of vitrail: start the run again")
    config = validate(RunConfig, about["config"], "checkpoint")
    if written != config:
        raise UserError(
            f"{folder / 'config.toml'} was changed after the run was started; a resumed run keeps its settings: "
            "put them back, or start a new run with --recipe and another --out"
        )
    for sentence in damaged:
        console.print(f"[yellow]{sentence}[/]")
    with scanning(console, interrupts) as scanned:
        dataset = read_data(config, scanned)
    if dataset.fingerprint != about["fingerprint"]:
        raise UserError(
            f"the images in {config.data.path} are not those this run was started with; "
            "put them back, or start a new run with another --out"
        )
    device = choose_device(config.train.device)
    _warn_of_changes(about["environment"], environment(device), console)
    model = network_config(about["model"], "checkpoint")
    preprocess = validate(Preprocess, about["preprocess"], "checkpoint")
    decisions = [Decision(**row) for row in about["decisions"]]
    plan = Plan(config, model, preprocess, dataset, device, None, decisions)
    return plan, about, Checkpoint(tensors, about["step"], about["seconds"])


def _warn_of_changes(then: dict[str, str], now: dict[str, str], console: Console) -> None:
    changed = [f"{key} {then.get(key)} -> {value}" for key, value in now.items() if then.get(key) != value]
    if changed:
        console.print(
            f"[yellow]the machine changed ({'; '.join(changed)}): the result may differ in the last digits[/]",
        )
