"""`vitrail train`: any training, from a folder of images to a measured classifier with its report."""

from __future__ import annotations

import shlex
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape

from vitrail.errors import UserError
from vitrail.evaluate.metrics import Scores
from vitrail.evaluate.tags import TagScores
from vitrail.model.build import Network, build
from vitrail.runs.choose import Decision
from vitrail.runs.finish import finish
from vitrail.runs.fit import Checkpoint, fit
from vitrail.runs.plan import Plan, Request, make_plan, write_config
from vitrail.runs.probing import Baseline, baseline, probe_network
from vitrail.runs.resume import about_run, read_run
from vitrail.runs.show import data_name, make_console, scanning, show_data, show_decisions
from vitrail.training.interrupt import Interrupted, Interrupts
from vitrail.weights.resize import adapt

FILES = ("checkpoints", "config.toml", "metrics.jsonl", "model.safetensors", "report.html")  # of a run folder


@dataclass(frozen=True)
class TrainResult:
    folder: Path
    weights: Path
    report: Path
    scores: Scores | TagScores


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
    overwrite: bool = False,
    console: Console | None = None,
) -> TrainResult:
    """Train a classifier on a folder of images. Whatever is not given is chosen from the data, with the reason.

    `overrides` are settings as "section.key=value"; `resume` goes on with the unfinished run in `out`.
    """
    console = console or make_console()
    overrides = [overrides] if isinstance(overrides, str) else overrides
    with Interrupts() as interrupts:
        if resume:
            given = {"model": model, "recipe": recipe, "from_": from_, "quarantine": quarantine}
            _refuse_with_resume(out, data=data, **given, set=overrides)
            folder = Path(str(out))
            plan, about, checkpoint = read_run(folder, console, interrupts)
            console.print(
                f"[bold]{escape(str(folder))}[/] goes on from step {checkpoint.step:,} of {plan.steps:,}",
            )
            net = build(plan.model).to(plan.device)
            return _result(folder, _fit_and_finish(plan, net, folder, about, console, interrupts, checkpoint))
        images, start, listed = (str(path) if path is not None else None for path in (data, from_, quarantine))
        with scanning(console, interrupts) as scanned:
            plan = make_plan(Request(images, model, recipe, start, overrides, listed), scanned)
        folder = fresh_folder(out, plan.dataset.root, overwrite)
        console.print(f"[bold]{escape(plan.dataset.root)}[/] -> [bold]{escape(str(folder))}[/]")
        show_data(console, plan.dataset)
        show_decisions(console, plan.decisions)
        return _result(folder, _start(plan, folder, console, interrupts))


def _start(plan: Plan, folder: Path, console: Console, interrupts: Interrupts) -> Scores | TagScores:
    """A new run: network, baseline, training or probe, and the last measurements."""
    torch.manual_seed(plan.config.train.seed)
    net = build(plan.model)
    if plan.weights is not None:
        how = plan.config.model.resample
        state, changes = adapt(plan.weights.state, plan.weights.card.model, plan.model, how)
        fresh = set(net.load_state_dict(state, strict=False).missing_keys)
        assert fresh <= {"head.weight", "head.bias"}, fresh
        for change in changes:
            console.print(f"[dim]{escape(change)}[/]")
    net.to(plan.device)
    if plan.config.kind == "probe":
        kept, seconds = _probed(plan, net, console, interrupts)
        about = about_run(plan, None)
        _begin(folder, plan)
    else:
        about = about_run(plan, _baseline(plan, net, console, interrupts))
        _begin(folder, plan)
        return _fit_and_finish(plan, net, folder, about, console, interrupts)
    return finish(plan, kept, folder, about, seconds, console, interrupts)


def _fit_and_finish(
    plan: Plan,
    net: Network,
    folder: Path,
    about: dict[str, Any],
    console: Console,
    interrupts: Interrupts,
    checkpoint: Checkpoint | None = None,
) -> Scores | TagScores:
    """The part of a run that can be stopped and gone on with."""
    try:
        kept, seconds = fit(plan, net, folder, about, console, interrupts, checkpoint)
        return finish(plan, kept, folder, about, seconds, console, interrupts)
    except Interrupted as stopped:
        stopped.advice = f" and saved; go on with: vitrail train --resume --out {shlex.quote(str(folder))}"
        raise


def _begin(folder: Path, plan: Plan) -> None:
    """From here on the folder holds a run."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_config(folder / "config.toml", plan.config)
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror or error}") from error


def _baseline(plan: Plan, net: Network, console: Console, interrupts: Interrupts) -> Baseline | None:
    with console.status("fitting a linear probe, the baseline to beat"):
        found = baseline(plan, net if plan.weights is not None else None, interrupts)
    if found is not None:
        console.print(
            f"to beat: [bold]{found.accuracy:.1%}[/], a linear probe on {found.features} ({found.seconds:.0f} s)",
        )
    return found


def _probed(plan: Plan, net: Network, console: Console, interrupts: Interrupts) -> tuple[Network, float]:
    """The frozen network with a linear head fitted on its features, and the seconds it took."""
    started = time.monotonic()
    with console.status("one pass over the images, then logistic regression"):
        fitted = probe_network(plan, net, interrupts)
    net.head.load_state_dict({"weight": fitted.weight, "bias": fitted.bias})
    tried = ", ".join(f"{penalty:g}: {accuracy:.1%}" for penalty, accuracy in fitted.tried)
    plan.decisions.append(Decision("penalty", f"{fitted.penalty:g}", f"best on a split of the training data ({tried})"))
    show_decisions(console, plan.decisions[-1:])
    return net, time.monotonic() - started


def _result(folder: Path, scores: Scores | TagScores) -> TrainResult:
    return TrainResult(folder, folder / "model.safetensors", folder / "report.html", scores)


def _refuse_with_resume(out: str | Path | None, **asked: object) -> None:
    if out is None:
        raise UserError("say which run to go on with: vitrail train --resume --out FOLDER")
    given = [name.rstrip("_") for name, value in asked.items() if value]
    if given:
        raise UserError(f"a resumed run keeps its own data and settings: leave out {', '.join(given)}")


def fresh_folder(out: str | Path | None, root: str, overwrite: bool) -> Path:
    """A folder for a new run: never one that already holds a run, unless told so."""
    if out is None:
        base = Path("runs") / (data_name(root) or "run")
        folder, number = base, 2
        while folder.exists():
            folder, number = base.with_name(f"{base.name}-{number}"), number + 1
        return folder
    folder = Path(out)
    if folder.is_file():
        raise UserError(f"--out {folder} is a file: name a folder")
    if not (folder / "config.toml").is_file():
        return folder
    if overwrite:
        for path in (folder / name for name in FILES):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        return folder
    if (folder / "model.safetensors").is_file():
        raise UserError(f"{folder} already holds a finished run: choose another --out, or add --overwrite")
    raise UserError(f"{folder} holds an unfinished run: add --resume to go on, or --overwrite to start again")
