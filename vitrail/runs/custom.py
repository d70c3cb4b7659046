"""`vitrail.train(model=MODULE, objective=, source=)`: the training loop for any torch module, loss and data."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from vitrail.atomic import whole_file
from vitrail.config import RunConfig, read_recipe, validate
from vitrail.errors import UserError
from vitrail.infer.device import choose_device
from vitrail.objectives.custom import CustomBatch, CustomObjective
from vitrail.runs.fit import Launch, Learning, fit
from vitrail.runs.folder import begin_folder, check_free, claimed
from vitrail.runs.plan import leaves, typed_settings
from vitrail.runs.resume import changed_settings, environment, has_checkpoint, is_finished, warn_of_changes
from vitrail.runs.sense import check_learning, check_read
from vitrail.runs.show import make_console
from vitrail.runs.source import drawn_from, length_of
from vitrail.training.checkpoint import Checkpoints, Saved
from vitrail.training.events import require_tensorboard
from vitrail.training.interrupt import Interrupted, Interrupts
from vitrail.training.loop import Evaluator
from vitrail.training.parallel import Ranks, blocks_of, choose_parallel, joined
from vitrail.training.precision import autocast, choose_precision, set_types
from vitrail.training.progress import read_metrics
from vitrail.weights.bundle import created_with

UNREAD = ("optimizer.freeze", "precision.residual", "train.batch_size", "train.recompute")  # what needs our networks
HEADER = "vitrail-module"


@dataclass(frozen=True)
class Custom:
    """What the caller brings."""

    model: nn.Module
    objective: Callable[[nn.Module, Any], Tensor]  # of the network and a batch: the mean loss
    source: Iterable[Any] | Callable[[int], Iterable[Any]]
    evaluator: Callable[[nn.Module], dict[str, float]] | None = None
    overrides: Sequence[str] = ()


def train_custom(
    custom: Custom, out: str | Path | None, resume: bool, overwrite: bool, console: Console | None
) -> tuple[Path, dict[str, Any]]:
    """Train a module; in the end it holds the weights that are written in the run's folder. That, and what the
    evaluator found last."""
    if out is None:
        raise UserError("say where the run goes: out=FOLDER")
    folder = Path(out)
    with joined() as ranks, Interrupts() as interrupts, ExitStack() as held:
        console = console if console is not None and ranks.first else make_console()
        console.quiet = console.quiet or not ranks.first
        again = resume or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0

        def begin() -> tuple[RunConfig, Saved | None, bool]:
            config = _settle(custom, ranks.world)
            going_on = again and has_checkpoint(folder)
            if not going_on:
                check_free(folder, overwrite or again)
            held.enter_context(claimed(folder))
            if going_on:
                saved = _checked(folder, config, console)
                return config, saved, is_finished(folder)
            begin_folder(folder, _said(config))
            size = sum(parameter.numel() for parameter in custom.model.parameters())
            what = f"{type(custom.model).__name__}, {size:,} parameters, {config.train.steps:,} steps"
            console.print(f"{what} -> [bold]{escape(str(folder))}[/]")
            return config, None, False

        config, saved, finished = ranks.share(begin)
        if finished:
            console.print(f"the run in [bold]{escape(str(folder))}[/] is finished")
        else:
            _learn(custom, config, Launch(folder, {}, console, interrupts, ranks), saved)
        if not any(hasattr(parameter, "to_local") for parameter in custom.model.parameters()):
            _take_weights(custom.model, folder, ranks)
        console.print(f"the weights are in [bold]{escape(str(folder / 'model.safetensors'))}[/]")
        rows = [row for row in read_metrics(folder / "metrics.jsonl") if "loss" not in row and "event" not in row]
        return folder, rows[-1] if rows else {}


def _settle(custom: Custom, world: int) -> RunConfig:
    """Every setting, before anything is written."""
    given = typed_settings(custom.overrides)
    for path in leaves(given):
        if not path.startswith(("optimizer.", "schedule.", "precision.", "train.")) or path in UNREAD:
            raise UserError(f"nothing would read {path} where the network and the data are your own: leave it out")
    config = validate(RunConfig, {"kind": "custom", **given}, "settings")
    train, device = config.train, choose_device(config.train.device)
    steps = train.steps
    if steps is None and train.epochs is not None:
        length = length_of(custom.source)
        if length is None:
            raise UserError("train.epochs needs a source that has a length: set train.steps")
        steps = max(1, round(train.epochs * length))
    if steps is None:
        raise UserError('say how long to train: overrides=["train.steps=1000"]')
    if train.compile == "graphs" or (train.compile == "blocks" and not blocks_of(custom.model)):
        raise UserError(f"train.compile={train.compile} is for the networks of vitrail: use off or network")
    if train.tensorboard:
        require_tensorboard()
    odd = [name for name, value in custom.model.state_dict().items() if not isinstance(value, Tensor)]
    if odd:
        raise UserError(f"'{odd[0]}' in the state of the module is no tensor, and could not be saved")
    compute, _ = choose_precision(config.precision.compute, device)
    settled = {
        "precision": config.precision.model_copy(update={"compute": compute}),
        "train": train.model_copy(
            update={
                "steps": steps,
                "epochs": None,
                "device": str(device),
                "compile": "off" if train.compile == "auto" else train.compile,
            }
        ),
    }
    config = config.model_copy(update=settled)
    check_learning(config, device.type, world)
    check_read(leaves(given), config)
    return config


def _said(config: RunConfig) -> dict[str, Any]:
    """The settings that such a run has."""
    sections = {"kind", "optimizer", "schedule", "precision", "train"}
    unread: dict[str, set[str]] = {}
    for path in UNREAD:
        section, _, key = path.partition(".")
        unread.setdefault(section, set()).add(key)
    return config.model_dump(mode="json", include=sections, exclude=unread, exclude_none=True)


def _held_bytes(model: nn.Module, config: RunConfig) -> int:
    """Of float32 weights, gradients, two moments and the average, where there is one."""
    return 4 * sum(p.numel() for p in model.parameters()) * (5 if config.train.ema else 4)


def _checked(folder: Path, config: RunConfig, console: Console) -> Saved | None:
    """The checkpoint to go on from, if it is of a run with the same settings; none where the run is finished."""
    found = Checkpoints(folder / "checkpoints", 1).latest()
    written = found[0].facts.get("config", {}) if found is not None else read_recipe(str(folder / "config.toml"))
    then = validate(RunConfig, written, str(folder))
    if then.kind != "custom":
        raise UserError(f"{folder} holds a run on a folder of images: choose another out")
    for key, (old, new) in changed_settings(then, config).items():
        raise UserError(f"the run in {folder} was started with {key}={old}, and not {new}: put it back to go on")
    if found is None:  # and is finished
        return None
    saved, damaged = found
    for sentence in damaged:
        console.print(f"[yellow]{escape(sentence)}[/]")
    warn_of_changes(saved.facts["environment"], environment(choose_device(config.train.device)), console)
    if not is_finished(folder):
        step, steps = saved.facts["step"], config.train.steps or 0
        console.print(f"[bold]{escape(str(folder))}[/] goes on from step {step:,} of {steps:,}")
    return saved


def _learn(custom: Custom, config: RunConfig, launch: Launch, saved: Saved | None) -> None:
    device, ranks, module = choose_device(config.train.device), launch.ranks, custom.model
    module.to(device)
    set_types(module, config.precision)
    ranks.copy_first([tensor.data for tensor in module.state_dict().values()])
    learning = Learning(
        config,
        device,
        choose_parallel(config.train.parallel, _held_bytes(module, config), ranks, device),
        CustomObjective(custom.objective),
        lambda _: partial(_batches, custom.source, config, device, ranks),
        lambda: _measured(custom.evaluator, config, device) if custom.evaluator is not None else None,
    )
    about = {"config": _said(config), "environment": environment(device)}
    try:
        kept, _ = fit(learning, module, replace(launch, about=about), saved)
    except Interrupted as stopped:
        stopped.advice = " and saved; the same call with resume=True goes on"
        raise
    ranks.share(lambda: _write(launch.folder / "model.safetensors", kept, config))


def _write(path: Path, kept: dict[str, Tensor], config: RunConfig) -> None:
    facts = {"config": _said(config), "created_with": created_with()}
    try:
        with whole_file(path) as temporary:
            save_file(kept, temporary, metadata={HEADER: json.dumps(facts, sort_keys=True)})
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write {path}: {error}; go on with resume=True when there is room") from error


def _take_weights(module: nn.Module, folder: Path, ranks: Ranks) -> None:
    """The module as it was written down."""

    def take() -> None:
        try:
            module.load_state_dict(load_file(folder / "model.safetensors"))
        except (OSError, SafetensorError, RuntimeError) as error:
            raise UserError(f"{folder / 'model.safetensors'} is not of this module: {error}") from error

    ranks.share(take)
    ranks.copy_first([tensor.data for tensor in module.state_dict().values()])


def _measured(evaluator: Callable[[nn.Module], dict[str, float]], config: RunConfig, device: torch.device) -> Evaluator:
    cast = autocast(config.precision.compute, device)

    def measure(net: nn.Module) -> dict[str, float]:
        with torch.no_grad(), cast():
            found = evaluator(net)
        try:
            return {str(name): float(value) for name, value in found.items()}
        except (AttributeError, TypeError, ValueError):
            raise UserError("the evaluator must give names with numbers, such as {'val_loss': 0.3}") from None

    return measure


def _batches(
    source: Any, config: RunConfig, device: torch.device, ranks: Ranks, start: int, passed: int
) -> Iterator[CustomBatch]:
    steps, drawn = config.train.steps or 0, start + passed
    stream = drawn_from(source, drawn, config.train.seed, ranks.rank)
    for step in range(start, steps):
        batch = next(stream, None)
        if batch is None:
            raise UserError(f"the source ended before step {step + 1} of {steps}: it must go on for all of them")
        yield CustomBatch.of(batch, device)
