"""`vitrail.train(model=MODULE, objective=, source=)`: the training loop for any torch module, loss and data."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from vitrail.atomic import whole_file
from vitrail.config import RunConfig, read_recipe, validate
from vitrail.distributed import Ranks, joined
from vitrail.errors import UserError, given_path
from vitrail.inference.device import autocast, choose_device
from vitrail.interrupt import Interrupted, Interrupts
from vitrail.models.legacy_names import new_name
from vitrail.tasks.own_loss import CustomBatch, CustomObjective
from vitrail.terminal import escape, make_console
from vitrail.training.checkpoint import Checkpoints, Saved, digest
from vitrail.training.loop import Evaluator
from vitrail.training.parallel import choose_parallel
from vitrail.training.precision import set_types
from vitrail.training.progress import read_metrics
from vitrail.weights.bundle import created_with
from vitrail.workflows.batch_source import END, drawn_from, repeatable_source
from vitrail.workflows.fit import Launch, Learning, fit
from vitrail.workflows.own_settings import Custom, said, settle
from vitrail.workflows.resume import (
    changed_settings,
    environment,
    facts_of,
    has_checkpoint,
    is_finished,
    warn_of_changes,
)
from vitrail.workflows.run_folder import (
    Lock,
    begin_folder,
    check_free,
    check_there,
    claimed,
    forget_earlier,
    refuse_links,
    where_it_stopped,
)

HEADER = "vitrail-module"
TAKEN = {"step", "event", "loss", "accuracy", "lr", "grad_norm", "images_per_second", "data_wait"}  # by training


def train_custom(
    custom: Custom, out: str | Path | None, resume: bool, overwrite: bool, console: Console | None
) -> tuple[Path, dict[str, Any]]:
    """Train a module; in the end it holds the weights that are written in the run's folder. That, and what the
    evaluator found last."""
    if out is None:
        raise UserError("say where the run goes: out=FOLDER")
    folder = given_path(out)
    with joined() as ranks, Interrupts() as interrupts, ExitStack() as held:
        console = console if console is not None and ranks.first else make_console(lasting=True)
        console.quiet = console.quiet or not ranks.first
        again = resume or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0

        def begin() -> tuple[Lock, RunConfig, Saved | None, bool]:
            if again and has_checkpoint(folder):
                lock = held.enter_context(claimed(folder))
                refuse_links(folder)
                return lock, *_goes_on(custom, folder, ranks.world, console), is_finished(folder)
            config = settle(custom, ranks.world)
            check_free(folder, overwrite, again)
            lock = held.enter_context(claimed(folder))
            begin_folder(folder, said(config))
            size = sum(parameter.numel() for parameter in custom.model.parameters())
            what = f"{type(custom.model).__name__}, {size:,} parameters, {config.train.steps:,} steps"
            console.print(f"{escape(what)}, {config.precision.compute} -> [bold]{escape(str(folder))}[/]")
            return lock, config, None, False

        lock, config, saved, finished = ranks.share(begin)
        if finished:
            console.print(f"the run in [bold]{escape(str(folder))}[/] is finished")
        else:
            _learn(custom, config, Launch(folder, {}, console, interrupts, ranks, lock), saved)
        if not any(hasattr(parameter, "to_local") for parameter in custom.model.parameters()):
            _take_weights(custom.model, folder, ranks)
        console.print(f"the weights are in [bold]{escape(str(folder / 'model.safetensors'))}[/]")
        found = read_metrics(folder / "metrics.jsonl")
        rows = [row for row in found if "images_per_second" not in row and "event" not in row]
        return folder, rows[-1] if rows else {}


def _held_bytes(model: nn.Module, config: RunConfig) -> int:
    """Of float32 weights, gradients, two moments and the average, where there is one."""
    return 4 * sum(p.numel() for p in model.parameters()) * (5 if config.train.ema else 4)


def _goes_on(custom: Custom, folder: Path, world: int, console: Console) -> tuple[RunConfig, Saved | None]:
    """The settings of the run in the folder, if they are those that are asked for, and the checkpoint to go on from,
    if there is one: a finished run needs none."""
    found = Checkpoints(folder / "checkpoints", 1).latest()
    if found is None and not (folder / "config.toml").is_file():
        raise UserError(f"{folder} holds no run: there is no config.toml in it; choose another out")
    written = facts_of(found[0], folder)["config"] if found is not None else read_recipe(str(folder / "config.toml"))
    then = validate(RunConfig, written, str(folder))
    if then.kind != "custom":
        raise UserError(f"{folder} holds a run on a folder of images: choose another out")
    config = settle(custom, world, then)
    for key, (old, new) in changed_settings(then, config).items():
        raise UserError(f"the run in {folder} was started with {key}={old}, and not {new}: put it back to go on")
    if found is None:
        return config, None
    saved, damaged = found
    for sentence in damaged:
        console.print(f"[yellow]{escape(sentence)}[/]")
    warn_of_changes(saved.facts["environment"], environment(choose_device(config.train.device)), console)
    if not is_finished(folder):
        step, steps = saved.facts["step"], config.train.steps or 0
        console.print(f"[bold]{escape(str(folder))}[/] goes on from step {step:,} of {steps:,}")
    return config, saved


def _learn(custom: Custom, config: RunConfig, launch: Launch, saved: Saved | None) -> None:
    device, ranks, module = choose_device(config.train.device), launch.ranks, custom.model
    module.to(device)
    set_types(module, config.precision)
    ranks.copy_first([tensor.data for tensor in module.state_dict().values()])
    how = choose_parallel(config.train.parallel, _held_bytes(module, config), ranks, device)
    batches = _Batches(repeatable_source(custom.source), config, device, ranks, launch.interrupts, how == "fsdp")
    measured = _measured(custom.evaluator, config, device, ranks) if custom.evaluator is not None else None
    learning = Learning(config, device, how, CustomObjective(custom.objective), lambda _: batches, lambda _: measured)
    about = {"config": said(config), "environment": environment(device)}
    try:
        kept, _ = fit(learning, module, replace(launch, about=about), saved)
    except Interrupted as stopped:
        stopped.advice = where_it_stopped(launch.folder, "the same call with resume=True goes on")
        raise
    ranks.share(lambda: _write(launch, kept, config))


def _write(launch: Launch, kept: dict[str, Tensor], config: RunConfig) -> None:
    facts, path = {"config": said(config), "created_with": created_with()}, launch.folder / "model.safetensors"
    facts["digest"] = digest(kept, facts)
    check_there(launch.folder, launch.lock)
    try:
        with whole_file(path) as temporary:
            save_file(kept, temporary, metadata={HEADER: json.dumps(facts, sort_keys=True)})
        forget_earlier(launch.folder)
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write {path}: {error}; go on with resume=True when there is room") from error


def _take_weights(module: nn.Module, folder: Path, ranks: Ranks) -> None:
    """The module as it was written down."""

    def take() -> None:
        path = folder / "model.safetensors"
        try:
            stored = load_file(path)
            with safe_open(path, framework="pt") as file:
                facts = json.loads((file.metadata() or {})[HEADER])
            told = {"config", "created_with", "digest"}  # what was written earlier has no digest
            if facts.keys() - told or ("digest" in facts and digest(stored, facts) != facts["digest"]):
                raise ValueError("it is damaged: its contents do not match their checksum")
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise UserError(f"cannot read {path}: {error}") from error
        own = module.state_dict().keys()
        stored = {name if name in own else new_name(name): tensor for name, tensor in stored.items()}
        ours, theirs = ({name: tuple(t.shape) for name, t in one.items()} for one in (module.state_dict(), stored))
        odd = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
        if odd:
            raise UserError(f"{path} is not of this module: '{odd[0]}' is only in one of them, or of another size")
        module.load_state_dict(stored)

    ranks.share(take)
    ranks.copy_first([tensor.data for tensor in module.state_dict().values()])


def _measured(
    evaluator: Callable[[nn.Module], dict[str, float]], config: RunConfig, device: torch.device, ranks: Ranks
) -> Evaluator:
    """All processes evaluate, since a network may be divided among them; what the first one finds counts."""
    cast = autocast(config.precision.compute, device)

    def measure(net: nn.Module) -> dict[str, float]:
        with torch.no_grad(), cast():
            found = evaluator(net)
        try:
            row = {str(name): float(value) for name, value in found.items()}
        except (AttributeError, TypeError, ValueError):
            raise UserError("the evaluator must give names with numbers, such as {'val_loss': 0.3}") from None
        if taken := sorted(TAKEN & row.keys()):
            raise UserError(f"the evaluator must call '{taken[0]}' another name, as val_{taken[0]}: that is training's")
        return ranks.gather(row)[0]

    return measure


@dataclass(frozen=True)
class _Batches:
    """Those of a step and all after it, with so many of the source passed over."""

    source: Any
    config: RunConfig
    device: torch.device
    ranks: Ranks
    interrupts: Interrupts
    divided: bool  # the network, among processes that must call it equally often

    def __call__(self, start: int, passed: int) -> Iterator[CustomBatch]:
        steps = self.config.train.steps or 0
        stream = drawn_from(self.source, start + passed, self.config.train.seed, self.ranks.rank)
        for step in range(start, steps):
            try:
                batch = next(stream, END)
            except Exception:
                if self.interrupts.caught and self.ranks.world == 1:  # a signal that stopped the source's helpers, too
                    return
                raise
            if batch is END:
                raise UserError(f"the source ended before step {step + 1} of {steps}: it must go on for all of them")
            found = CustomBatch.of(batch, self.device)
            self._check_parts(found)
            yield found

    def _check_parts(self, batch: CustomBatch) -> None:
        if self.divided and self.config.train.micro_batch:
            parts = -(-len(batch) // self.config.train.micro_batch)
            most, least = self.ranks.largest(parts, -parts)
            if most != -least:
                raise UserError("under fsdp with train.micro_batch, batches of all processes must have one size")
