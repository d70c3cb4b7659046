"""`vitrail train`: from a folder of images to a measured classifier with its report.

In: the options of the command. Out: a `TrainResult`. A new run goes through `resolve.make_plan`, `new_run.prepare_run`,
`run_training.train_in_folder` and `finish.finish`; a resumed one starts at `resume.read_run` instead of the first two.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import nn

from vitrail.config import OPTIONS, merge, with_options
from vitrail.distributed import process_group
from vitrail.errors import UserError, user_path, warn_once
from vitrail.interrupt import Interrupts
from vitrail.models.build import build_model
from vitrail.models.flops import count_macs
from vitrail.tasks.task import Task
from vitrail.terminal import escape, make_console
from vitrail.training.checkpoint import Checkpoint
from vitrail.training.memory import check_memory
from vitrail.training.run_context import RunContext
from vitrail.weights.bundle import read_card
from vitrail.weights.names import weights_spec
from vitrail.workflows.batches import ImageBatches, make_validation
from vitrail.workflows.finish import finish
from vitrail.workflows.fit import fit
from vitrail.workflows.new_run import prepare_run, run_probe
from vitrail.workflows.resolve import Plan, make_plan
from vitrail.workflows.resume import check_same_settings, has_saved_run, is_finished, read_run, resumed_facts
from vitrail.workflows.run_folder import (
    check_inputs_are_outside,
    check_output_folder,
    lock_run_folder,
    newest_folder,
    refuse_links,
    remove_replaced_run,
    run_folder_for,
)
from vitrail.workflows.run_model import build_trained_module, final_network, task_of_plan
from vitrail.workflows.run_training import TrainResult, resume_advice, train_in_folder
from vitrail.workflows.show import scan_progress, show_data, show_decisions
from vitrail.workflows.validate import parse_settings

CUSTOM_MODULE = ("objective", "source", "evaluator")  # the old names of task, batches and evaluate of `vitrail.fit`


def train(
    data: str | Path | None = None,
    *,
    model: str | None = None,
    recipe: str | None = None,
    from_: str | Path | None = None,
    out: str | Path | None = None,
    quarantine: str | Path | None = None,
    overrides: Sequence[str] = (),
    resume: bool = False,
    accept_changes: bool = False,
    overwrite: bool = False,
    console: Console | None = None,
    **options: Any,
) -> TrainResult:
    """Train a classifier on images. Settings that are not given are chosen automatically, and the reasons are printed.

    Parameters
    ----------
    data
        A folder with one folder of images per class, a table, an archive, ... (docs/data.md).
    model
        A network by name, such as "S/16" (see `vitrail models`).
    recipe
        A recipe by name, or a .toml file.
    from_
        Weights to start from: a file, a run folder, "bundled" or "hf-hub:owner/name".
    out
        The run folder; by default a new one in runs/, named after the data.
    quarantine
        A list of images to exclude, as `vitrail check` writes it.
    overrides
        Settings as "section.key=value".
    resume
        Resume the unfinished run in `out`, or the newest run of `data`. If there is none and `data` is given, start a
        new run.
    accept_changes
        Resume even if the config.toml or the images of the run have changed.
    overwrite
        Replace the run in `out` once the new one is finished.
    console
        The console to print to; by default the terminal.
    options
        Common settings by their short names: epochs, steps, batch_size, lr, image_size, device, seed, workers,
        precision.

    Returns
    -------
    TrainResult
        The folder, the weights, the report and the scores of the run.
    """
    if isinstance(model, nn.Module) or options.keys() & CUSTOM_MODULE:
        image_options = accept_changes or any(value is not None for value in (data, recipe, from_, quarantine))
        return _fit_custom_module(
            model,
            image_options,
            options,
            out=out,
            overrides=overrides,
            resume=resume,
            overwrite=overwrite,
            console=console,
        )
    if unknown := sorted(options.keys() - OPTIONS.keys()):
        raise TypeError(f"train() got an unexpected keyword argument '{unknown[0]}'")
    overrides = [overrides] if isinstance(overrides, str) else overrides
    _check_types(model, recipe, overrides, {"data": data, "from_": from_, "out": out, "quarantine": quarantine})
    settings = _user_settings(data, model, from_, quarantine, with_options(overrides, options))
    with process_group() as ranks, Interrupts() as interrupts, ExitStack() as held:
        console = console if console is not None and ranks.is_first else make_console(ignore_write_errors=True)
        console.quiet = console.quiet or not ranks.is_first
        if resume and overwrite:
            raise UserError("--resume continues a run and --overwrite replaces it: choose one of them")
        restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0  # torchrun repeats the same command
        may_resume = resume or (restarted and out is not None)
        if resume and out is None and data is not None:
            out = ranks.broadcast(lambda: newest_folder(data))
        can_start = bool(settings or recipe)
        if may_resume and ranks.broadcast(lambda: _can_resume(out, can_start)):
            folder = user_path(str(out))
            if can_start and is_finished(folder):
                return ranks.broadcast(lambda: _finished(folder, settings, recipe, console))
            lock = ranks.broadcast(lambda: held.enter_context(lock_run_folder(folder)))
            return _resume(RunContext(folder, console, interrupts, ranks, lock), settings, recipe, accept_changes)
        with_weights: list[Plan] = []  # only the first process keeps the starting weights

        @interrupts.interruptible()
        def plan_run() -> tuple[Plan, Path]:
            check_output_folder(out, overwrite, may_resume)
            with scan_progress(console, interrupts) as scanned:
                plan = make_plan(settings, recipe, scanned, ranks.world_size, console.print)
            with_weights.append(plan)
            check_memory(plan.config, plan.model, plan.device, ranks=ranks, pretrained=plan.weights is not None)
            folder = run_folder_for(out, plan.dataset.root)
            check_inputs_are_outside(folder, plan, recipe or "")
            console.print(f"[bold]{escape(plan.dataset.root)}[/] -> [bold]{escape(str(folder))}[/]")
            show_data(console, plan.dataset)
            show_decisions(console, plan.decisions)
            return replace(plan, weights=None), folder

        plan, folder = ranks.broadcast(plan_run)
        lock = ranks.broadcast(lambda: held.enter_context(lock_run_folder(folder)))
        plan = with_weights[0] if with_weights else plan
        run = RunContext(folder, console, interrupts, ranks, lock)
        if plan.config.kind == "probe":
            return run_probe(plan, run)
        return _train_and_finish(*prepare_run(plan, run))


def _fit_custom_module(model: Any, image_options: bool, options: dict[str, Any], **others: Any) -> TrainResult:
    """The old call `vitrail.train(model=MODULE, objective=, source=, evaluator=)`: warn and call `vitrail.fit`."""
    task, batches, evaluate = (options.pop(name, None) for name in CUSTOM_MODULE)
    if not isinstance(model, nn.Module) or task is None or batches is None:
        raise UserError("training your own module needs model=MODULE, objective=LOSS and source=BATCHES")
    if image_options:
        raise UserError(
            "training your own module takes its data from source: leave out data, recipe, from_, quarantine and "
            "accept_changes"
        )
    warn_once("vitrail.train(model=MODULE, objective=, source=)", "vitrail.fit(MODULE, task, batches)")
    return fit(model, task, batches, evaluate=evaluate, **others, **options)


def _check_types(model: object, recipe: object, overrides: object, paths: Mapping[str, object]) -> None:
    """Check the types of arguments that a Python caller may mix up."""
    if not isinstance(model, str | None):
        raise UserError(f"model must be the name of a network, such as 'S/16', not {type(model).__name__}")
    for name, path in paths.items():
        if path is not None and not isinstance(path, str | Path):
            raise UserError(f"{name} must be a path, not {type(path).__name__}")
    if recipe is not None and not isinstance(recipe, str):
        raise UserError(f"recipe must be a name or the path of a .toml file as a str, not {type(recipe).__name__}")
    if not isinstance(overrides, Sequence) or not all(isinstance(setting, str) for setting in overrides):
        raise UserError(f"overrides must be a list of str such as ['train.steps=100'], not {overrides!r}")


def _user_settings(
    data: str | Path | None,
    model: str | None,
    weights: str | Path | None,
    quarantine: str | Path | None,
    overrides: Sequence[str],
) -> dict[str, Any]:
    """The settings of the caller, as nested dictionaries."""
    settings = parse_settings(overrides)
    if data is not None:
        settings = merge({"data": {"path": str(data)}}, settings)
    for section, key, value in (
        ("data", "quarantine", None if quarantine is None else str(quarantine)),
        ("model", "name", model),
        ("model", "weights", None if weights is None else weights_spec(weights)),
    ):
        if value is not None:
            settings = merge(settings, {section: {key: value}})
    return settings


def _finished(folder: Path, settings: dict[str, Any], recipe: str | None, console: Console) -> TrainResult:
    """The result of a finished run: repeating its command succeeds, so that a job can be requeued."""
    check_same_settings(folder, settings, recipe)
    weights = folder / "model.safetensors"
    console.print(f"the run in [bold]{escape(str(folder))}[/] is finished: its weights are {escape(str(weights))}")
    report = folder / "report.html"
    return TrainResult(folder, weights, report if report.is_file() else None, read_card(weights).metrics)


def _can_resume(out: str | Path | None, can_start: bool) -> bool:
    """Whether to resume a run. True if no new run can be started, so that a missing run raises an error."""
    if out is None:
        raise UserError("no run to resume: name its folder, vitrail train --resume --out FOLDER")
    return not can_start or has_saved_run(user_path(out))


def _resume(run: RunContext, settings: dict[str, Any], recipe: str | None, accept_changes: bool) -> TrainResult:
    folder, console = run.folder, run.console

    @run.interrupts.interruptible()
    def read() -> tuple[Plan, Checkpoint]:
        refuse_links(folder)
        check_same_settings(folder, settings, recipe)
        plan, saved = read_run(folder, console, run.interrupts, accept_changes)
        console.print(f"resuming [bold]{escape(str(folder))}[/] from step {saved.facts['step']:,} of {plan.steps:,}")
        return plan, saved

    plan, saved = run.ranks.broadcast(read)
    run = replace(run, facts=resumed_facts(saved.facts, plan))
    return _train_and_finish(plan, build_trained_module(plan, build_model(plan.model)), task_of_plan(plan), run, saved)


def _train_and_finish(
    plan: Plan, module: nn.Module, task: Task, run: RunContext, saved: Checkpoint | None = None
) -> TrainResult:
    """Train to the last step, then measure and write the result. This part can be stopped and resumed."""
    command = "vitrail" if run.ranks.world_size == 1 else "torchrun ... -m vitrail"
    with resume_advice(run.folder, f"resume with: {command} train --resume --out {shlex.quote(str(run.folder))}"):
        with run.interrupts.interruptible(run.ranks):
            batches = ImageBatches(plan, task.targets, run)
            validate = make_validation(plan, task, run) if "val" in plan.dataset.splits else None
        weights, seconds = train_in_folder(
            module,
            task,
            batches,
            plan.config,
            run,
            validate=validate,
            saved=saved,
            flops_per_image=6.0 * count_macs(plan.model),
        )

        def end() -> TrainResult:
            result = finish(plan, final_network(plan, weights), run, seconds)
            remove_replaced_run(run.folder)
            return result

        return run.ranks.broadcast(end)
