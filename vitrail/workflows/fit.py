"""`vitrail.fit`: train any torch module on any loss and data, with the same trainer and run folder as `vitrail train`.

In: the module, the loss function, the batches and the settings. Out: a `TrainResult`; the module has the final weights.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from vitrail.atomic import atomic_write
from vitrail.config import RunConfig, read_run_config, validate, with_options
from vitrail.distributed import Ranks, process_group
from vitrail.errors import UserError, user_path
from vitrail.inference.device import autocast, choose_device
from vitrail.interrupt import Interrupts
from vitrail.models.legacy_names import new_name
from vitrail.tasks.custom_loss import CustomLoss
from vitrail.terminal import escape, make_console
from vitrail.training.batches import SourceBatches, resumable_source
from vitrail.training.checkpoint import Checkpoint, CheckpointManager, digest
from vitrail.training.parallel import choose_parallel
from vitrail.training.precision import set_dtypes
from vitrail.training.progress import read_metrics
from vitrail.training.run_context import LockId, RunContext
from vitrail.training.trainer import Validate
from vitrail.weights.bundle import created_with
from vitrail.workflows.environment import environment, warn_machine_changed
from vitrail.workflows.fit_settings import check_arguments, fit_config, stored_settings
from vitrail.workflows.resume import (
    changed_settings,
    has_saved_run,
    is_finished,
    read_facts,
)
from vitrail.workflows.run_folder import (
    check_not_replaced,
    check_output_folder,
    create_run_folder,
    lock_run_folder,
    refuse_links,
    remove_replaced_run,
)
from vitrail.workflows.run_training import TrainResult, resume_advice, train_in_folder

HEADER = "vitrail-module"  # key of the JSON document in the header of the weights file
# Names in the training log, which `evaluate` may not use.
LOG_COLUMNS = {"step", "event", "loss", "accuracy", "lr", "grad_norm", "images_per_second", "data_wait"}


def fit(
    model: nn.Module,
    task: Callable[[nn.Module, Any], Tensor],
    batches: Iterable[Any] | Callable[[int], Iterable[Any]],
    *,
    out: str | Path | None = None,
    evaluate: Callable[[nn.Module], dict[str, float]] | None = None,
    overrides: Sequence[str] = (),
    resume: bool = False,
    overwrite: bool = False,
    console: Console | None = None,
    **options: Any,
) -> TrainResult:
    """Train any torch module on any loss and data, with checkpoints, exact resume and several processes.

    Parameters
    ----------
    model
        The module. At the end it has the weights that are written to the run folder.
    task
        A function `(model, batch) -> loss`: the mean loss over the batch.
    batches
        A DataLoader or another iterable of batches (iterated as often as needed), or a function `(start) -> batches`
        that returns the batches from number `start` on. Batches are tensors in any nesting of tuples,
        lists and mappings; they are moved to the device.
    out
        The run folder: config.toml, metrics.jsonl, curves.svg, checkpoints/ and model.safetensors.
    evaluate
        A function `(model) -> dict` of numbers by name. The model is in evaluation mode, without gradients.
    overrides
        Settings as "section.key=value" of the sections optimizer, schedule, precision and train.
    resume
        Resume the run in `out`, if there is one. The result is bit-identical to that of an uninterrupted run.
    overwrite
        Replace the run in `out` once the new one is finished.
    console
        The console to print to; by default the terminal.
    options
        Common settings by their short names: epochs, steps, lr, seed, device, precision.

    Returns
    -------
    TrainResult
        The run folder, the weights file, and the last numbers of `evaluate`.
    """
    if unknown := sorted(options.keys() - {"epochs", "steps", "lr", "seed", "device", "precision"}):
        raise TypeError(f"fit() got an unexpected keyword argument '{unknown[0]}'")
    if resume and overwrite:
        raise UserError("resume continues a run and overwrite replaces it: choose one of them")
    if out is None:
        raise UserError("no run folder: pass out=FOLDER")
    overrides = with_options([overrides] if isinstance(overrides, str) else overrides, options)
    check_arguments(model, task, batches, evaluate)
    folder = user_path(out)
    with process_group() as ranks, Interrupts() as interrupts, ExitStack() as held:
        console = console if console is not None and ranks.is_first else make_console(ignore_write_errors=True)
        console.quiet = console.quiet or not ranks.is_first
        may_resume = resume or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0

        def settings(before: RunConfig | None = None) -> RunConfig:
            return fit_config(model, batches, overrides, evaluate is not None, ranks.world_size, before)

        def start() -> tuple[LockId, RunConfig, Checkpoint | None, bool]:
            if may_resume and has_saved_run(folder):
                lock = held.enter_context(lock_run_folder(folder))
                refuse_links(folder)
                return lock, *_read_run(folder, settings, console), is_finished(folder)
            config = settings()
            check_output_folder(folder, overwrite, may_resume)
            lock = held.enter_context(lock_run_folder(folder))
            create_run_folder(folder, stored_settings(config))
            size = sum(parameter.numel() for parameter in model.parameters())
            summary = f"{type(model).__name__}, {size:,} parameters, {config.train.steps:,} steps"
            console.print(f"{escape(summary)}, {config.precision.compute} -> [bold]{escape(str(folder))}[/]")
            return lock, config, None, False

        lock, config, saved, finished = ranks.broadcast(start)
        run = RunContext(folder, console, interrupts, ranks, lock)
        if finished:
            console.print(f"the run in [bold]{escape(str(folder))}[/] is finished")
        else:
            _train(model, CustomLoss(task), batches, evaluate, config, run, saved)
        if not any(hasattr(parameter, "to_local") for parameter in model.parameters()):
            _load_result(model, folder, ranks)
        path = folder / "model.safetensors"
        console.print(f"weights: [bold]{escape(str(path))}[/]")
        rows = read_metrics(folder / "metrics.jsonl")
        measured = [row for row in rows if "images_per_second" not in row and "event" not in row]
        return TrainResult(folder, path, None, measured[-1] if measured else {})


def _read_run(
    folder: Path, settings: Callable[[RunConfig], RunConfig], console: Console
) -> tuple[RunConfig, Checkpoint | None]:
    """The settings of the run in the folder and its last checkpoint. A finished run may have no checkpoint.

    Raises UserError if the settings differ from those of this call."""
    latest = CheckpointManager(folder / "checkpoints", 1).latest()
    if latest is None and not (folder / "config.toml").is_file():
        raise UserError(f"{folder} holds no run: it has no config.toml; choose another out")
    written = read_facts(latest[0], folder)["config"] if latest is not None else read_run_config(folder / "config.toml")
    before = validate(RunConfig, written, str(folder))
    if before.kind != "custom":
        raise UserError(f"{folder} holds a run of `vitrail train`: choose another out")
    config = settings(before)
    for key, (old, new) in changed_settings(before, config).items():
        raise UserError(f"the run in {folder} was started with {key}={old}, not {new}: set it back to resume")
    if latest is None:
        return config, None
    saved, damaged = latest
    for sentence in damaged:
        console.print(f"[yellow]{escape(sentence)}[/]")
    warn_machine_changed(saved.facts["environment"], environment(choose_device(config.train.device)), console)
    if not is_finished(folder):
        step, steps = saved.facts["step"], config.train.steps or 0
        console.print(f"resuming [bold]{escape(str(folder))}[/] from step {step:,} of {steps:,}")
    return config, saved


def _train(
    model: nn.Module,
    task: CustomLoss,
    source: Any,
    evaluate: Callable[[nn.Module], dict[str, float]] | None,
    config: RunConfig,
    run: RunContext,
    saved: Checkpoint | None,
) -> None:
    device, ranks = choose_device(config.train.device), run.ranks
    model.to(device)
    set_dtypes(model, config.precision)
    ranks.broadcast_tensors([tensor.data for tensor in model.state_dict().values()])
    sharded = choose_parallel(model, config.train, ranks, device) == "fsdp"
    batches = SourceBatches(resumable_source(source), config.train, device, ranks, run.interrupts, sharded)
    validate = _make_validation(evaluate, config, device, ranks) if evaluate is not None else None
    run = replace(run, facts={"config": stored_settings(config), "environment": environment(device)})
    with resume_advice(run.folder, "resume with the same call and resume=True"):
        weights, _ = train_in_folder(model, task, batches, config, run, validate=validate, saved=saved)
    ranks.broadcast(lambda: _write(run, weights, config))


def _write(run: RunContext, weights: dict[str, Tensor], config: RunConfig) -> None:
    facts: dict[str, Any] = {"config": stored_settings(config), "created_with": created_with()}
    path = run.folder / "model.safetensors"
    facts["digest"] = digest(weights, facts)
    check_not_replaced(run.folder, run.lock)
    try:
        with atomic_write(path) as temporary:
            save_file(weights, temporary, metadata={HEADER: json.dumps(facts, sort_keys=True)})
        remove_replaced_run(run.folder)
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write {path}: {error}; free some space and resume with resume=True") from error


def _load_result(model: nn.Module, folder: Path, ranks: Ranks) -> None:
    """Load the written weights into the model, in all processes."""

    def load() -> None:
        path = folder / "model.safetensors"
        try:
            stored = load_file(path)
            with safe_open(path, framework="pt") as file:
                facts = json.loads((file.metadata() or {})[HEADER])
            keys = {"config", "created_with", "digest"}  # files of earlier versions have no digest
            if facts.keys() - keys or ("digest" in facts and digest(stored, facts) != facts["digest"]):
                raise ValueError("it is damaged: its checksum does not match")
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise UserError(f"cannot read {path}: {error}") from error
        names = model.state_dict().keys()
        stored = {name if name in names else new_name(name): tensor for name, tensor in stored.items()}
        expected, actual = (
            {name: tuple(t.shape) for name, t in state.items()} for state in (model.state_dict(), stored)
        )
        wrong = sorted(name for name in expected.keys() | actual.keys() if expected.get(name) != actual.get(name))
        if wrong:
            raise UserError(
                f"{path} does not fit this module: '{wrong[0]}' is missing in one of them, or has another shape"
            )
        model.load_state_dict(stored)

    ranks.broadcast(load)
    ranks.broadcast_tensors([tensor.data for tensor in model.state_dict().values()])


def _make_validation(
    evaluate: Callable[[nn.Module], dict[str, float]], config: RunConfig, device: torch.device, ranks: Ranks
) -> Validate:
    """Call `evaluate` in all processes, since the model may be sharded; the numbers of the first process count."""
    cast = autocast(config.precision.compute, device)

    def measure(model: nn.Module, last: bool) -> dict[str, float]:
        with torch.no_grad(), cast():
            numbers = evaluate(model)
        try:
            row = {str(name): float(value) for name, value in numbers.items()}
        except (AttributeError, TypeError, ValueError):
            raise UserError("evaluate must return a dict of numbers, such as {'val_loss': 0.3}") from None
        if taken := sorted(LOG_COLUMNS & row.keys()):
            raise UserError(
                f"evaluate must not return '{taken[0]}', a name of the training log: rename it to val_{taken[0]}"
            )
        return ranks.all_gather(row)[0]

    return measure
