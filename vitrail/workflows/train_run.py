"""`vitrail train`: any training, from a folder of images to a measured classifier with its report."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from vitrail.distributed import joined
from vitrail.errors import UserError, given_path
from vitrail.interrupt import Interrupted, Interrupts
from vitrail.metrics.accuracy import Scores
from vitrail.metrics.multilabel import TagScores
from vitrail.models.build import Network, build
from vitrail.models.mimetic import mimetic_
from vitrail.terminal import escape, make_console
from vitrail.training.checkpoint import Saved
from vitrail.weights.bundle import read_card
from vitrail.weights.names import spec_of
from vitrail.weights.resize import adapt
from vitrail.workflows.batches import pattern
from vitrail.workflows.choose import Decision
from vitrail.workflows.finish import finish, finish_masked
from vitrail.workflows.fit import Launch, fit
from vitrail.workflows.learner import Task, learner, learning_of, make_task, plain_network
from vitrail.workflows.memory import check_room, micro_batch_for
from vitrail.workflows.own_module import train_custom
from vitrail.workflows.own_settings import Custom
from vitrail.workflows.probing import Baseline, baseline, probe_network, why_penalty
from vitrail.workflows.resolve import Plan, Request, make_plan
from vitrail.workflows.resume import about_again, about_run, check_same, has_checkpoint, is_finished, read_run
from vitrail.workflows.run_folder import (
    begin_folder,
    check_free,
    check_inputs,
    choose_folder,
    claimed,
    forget_earlier,
    newest_folder,
    refuse_links,
    take_place,
    where_it_stopped,
)
from vitrail.workflows.show import scanning, show_data, show_decisions


@dataclass(frozen=True)
class TrainResult:
    folder: Path
    weights: Path
    report: Path | None  # none after masked-patch pre-training, which classifies nothing
    scores: Scores | TagScores | dict[str, Any]


def train(
    data: str | Path | None = None,
    *,
    model: str | nn.Module | None = None,
    objective: Callable[[nn.Module, Any], Tensor] | None = None,
    source: Iterable[Any] | Callable[[int], Iterable[Any]] | None = None,
    evaluator: Callable[[nn.Module], dict[str, float]] | None = None,
    recipe: str | None = None,
    from_: str | Path | None = None,
    out: str | Path | None = None,
    quarantine: str | Path | None = None,
    overrides: Sequence[str] = (),
    resume: bool = False,
    accept_changes: bool = False,
    overwrite: bool = False,
    console: Console | None = None,
) -> TrainResult:
    """Train a classifier on a folder of images. Whatever is not given is chosen from the data, with the reason.

    `overrides` are settings as "section.key=value"; `resume` goes on with the unfinished run in `out`, or in the newest
    folder of the data, or starts it where there is none and the data is given; `accept_changes` goes on though its
    config.toml or images have changed.

    With a torch module as `model`, its `objective` and the `source` of its batches, these are trained instead, in a
    folder `out` (docs/training.md): objective(model, batch) gives the mean loss, evaluator(model) named numbers.
    """
    overrides = [overrides] if isinstance(overrides, str) else overrides
    _check_kinds(recipe, overrides, {"data": data, "from_": from_, "out": out, "quarantine": quarantine})
    if isinstance(model, nn.Module) or objective is not None or source is not None or evaluator is not None:
        if not isinstance(model, nn.Module) or objective is None or source is None:
            raise UserError("a network of your own takes all of model=MODULE, objective=LOSS and source=BATCHES")
        if not all(given is None for given in (data, recipe, from_, quarantine)) or accept_changes:
            raise UserError(
                "a network of your own takes its data from source: leave out data, recipe, from_, "
                "quarantine and accept_changes"
            )
        if resume and overwrite:
            raise UserError("resume goes on with a run and overwrite replaces it: choose one")
        custom = Custom(model, objective, source, evaluator, overrides)
        folder, found = train_custom(custom, out, resume, overwrite, console)
        return TrainResult(folder, folder / "model.safetensors", None, found)
    if not isinstance(model, str | None):
        raise UserError(
            f"model is the name of a network, such as 'S/16', or a torch module, not {type(model).__name__}"
        )
    images, listed = (str(path) if path is not None else None for path in (data, quarantine))
    start = spec_of(from_) if from_ is not None else None
    request = Request(images, model, recipe, start, tuple(overrides), listed)
    with joined() as ranks, Interrupts() as interrupts:
        console = console if console is not None and ranks.first else make_console(lasting=True)
        console.quiet = console.quiet or not ranks.first
        if resume and overwrite:
            raise UserError("--resume goes on with a run and --overwrite replaces it: choose one")
        restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0  # by torchrun, with the same command
        again = resume or (restarted and out is not None)
        if resume and out is None and data is not None:
            out = ranks.share(lambda: newest_folder(data))
        if again and ranks.share(lambda: _goes_on(request, out)):
            folder = given_path(str(out))
            if request != Request(None) and is_finished(folder):
                return ranks.share(lambda: _finished(folder, request, console))
            with ExitStack() as held:
                lock = ranks.share(lambda: held.enter_context(claimed(folder)))
                return _go_on(Launch(folder, {}, console, interrupts, ranks, lock), request, accept_changes)
        own: list[Plan] = []  # with its starting weights, which only the first process needs

        @interrupts.at_once()
        def begin() -> tuple[Plan, Path]:
            check_free(out, overwrite, again)
            with scanning(console, interrupts) as scanned:
                own.append(make_plan(request, scanned, ranks.world, console.print))
            check_room(own[0], ranks.world, ranks.beside)
            folder = choose_folder(out, own[0].dataset.root)
            check_inputs(folder, own[0], request.recipe or "")
            console.print(f"[bold]{escape(own[0].dataset.root)}[/] -> [bold]{escape(str(folder))}[/]")
            show_data(console, own[0].dataset)
            show_decisions(console, own[0].decisions)
            return replace(own[0], weights=None), folder

        plan, folder = ranks.share(begin)
        with ExitStack() as held:
            lock = ranks.share(lambda: held.enter_context(claimed(folder)))
            return _start(own[0] if own else plan, Launch(folder, {}, console, interrupts, ranks, lock))


def _check_kinds(recipe: object, overrides: object, paths: Mapping[str, object]) -> None:
    """What a program may have mixed up; the command line cannot."""
    for name, path in paths.items():
        if path is not None and not isinstance(path, str | Path):
            raise UserError(f"{name} is a path, not {type(path).__name__}")
    if recipe is not None and not isinstance(recipe, str):
        raise UserError(f"recipe is a name or the path of a .toml file as text, not {type(recipe).__name__}")
    if not isinstance(overrides, Sequence) or not all(isinstance(one, str) for one in overrides):
        raise UserError(f"overrides are texts such as ['train.steps=100'], not {overrides!r}")


def _finished(folder: Path, request: Request, console: Console) -> TrainResult:
    """The same command again, when there is nothing left to do: a job that was started once more ends well."""
    check_same(folder, request)
    weights = folder / "model.safetensors"
    console.print(f"the run in [bold]{escape(str(folder))}[/] is finished: its weights are {escape(str(weights))}")
    report = folder / "report.html"
    return TrainResult(folder, weights, report if report.is_file() else None, read_card(weights).metrics)


def _goes_on(request: Request, out: str | Path | None) -> bool:
    """Whether there is a run to go on with; without data to start one with, there has to be."""
    if out is None:
        raise UserError("say which run to go on with: vitrail train --resume --out FOLDER")
    return request == Request(None) or has_checkpoint(given_path(out))


def _go_on(launch: Launch, request: Request, accept_changes: bool) -> TrainResult:
    folder, console = launch.folder, launch.console

    @launch.interrupts.at_once()
    def read() -> tuple[Plan, Saved]:
        refuse_links(folder)
        check_same(folder, request)
        plan, saved = read_run(folder, console, launch.interrupts, accept_changes)
        console.print(
            f"[bold]{escape(str(folder))}[/] goes on from step {saved.facts['step']:,} of {plan.steps:,}",
        )
        return plan, saved

    plan, saved = launch.ranks.share(read)
    launch = replace(launch, about=about_again(saved.facts, plan))
    return _fit_and_finish(plan, learner(plan, build(plan.model)), make_task(plan), launch, saved)


def _start(plan: Plan, launch: Launch) -> TrainResult:
    """A new run: network, baseline, training or probe, and the last measurements."""
    with launch.interrupts.at_once(launch.ranks):
        net = _network(plan, launch)
        if plan.config.kind != "probe":
            plan, module, task, about = _begin(plan, net, launch)
    if plan.config.kind == "probe":
        return _probe(plan, net, launch)
    return _fit_and_finish(plan, module, task, replace(launch, about=about))


def _network(plan: Plan, launch: Launch) -> Network:
    """As the run starts with it."""
    torch.manual_seed(plan.config.train.seed)
    net = build(plan.model)
    if plan.config.model.initial == "mimetic":
        mimetic_(net)
    if plan.weights is not None:
        how = plan.config.model.resample
        state, changes = adapt(plan.weights.state, plan.weights.card.model, plan.model, how)
        fresh = set(net.load_state_dict(state, strict=False).missing_keys)
        assert fresh <= {"head.weight", "head.bias"}, fresh
        for change in changes:
            launch.console.print(f"[dim]{escape(change)}[/]")
    return net.to(plan.device)


def _begin(plan: Plan, net: Network, launch: Launch) -> tuple[Plan, nn.Module, Task, dict[str, Any]]:
    """What has to be done before the first step, and the folder begun."""
    task, ranks = make_task(plan), launch.ranks
    # The baseline needs the network as it is, before anything is put around it.
    found = ranks.share(lambda: _baseline(plan, net, launch.console, launch.interrupts))
    module = learner(plan, net)
    ranks.copy_first([tensor.data for tensor in module.state_dict().values()])
    plan = _with_micro_batch(plan, module, task, launch)

    def begin() -> dict[str, Any]:
        about = about_run(plan, found)
        begin_folder(launch.folder, plan.config.model_dump(mode="json", exclude_none=True), plan.dataset.excluded)
        return about

    return plan, module, task, ranks.share(begin)


def _with_micro_batch(plan: Plan, module: nn.Module, task: Task, launch: Launch) -> Plan:
    """The plan with the number of images at a time written down, so that a resumed run adds up in the same order."""
    if plan.config.train.micro_batch:
        return plan
    ranks = launch.ranks
    most = plan.config.train.batch_size // ranks.world
    fits = micro_batch_for(plan, module, task.objective, pattern(plan, task.targets, most), ranks)
    (fits,) = (-number for number in ranks.largest(-fits))  # the smallest of all
    if fits >= most:
        return plan
    why = f"{most} images of a step at once do not fit in the memory; their gradients are summed"
    decision = Decision("micro-batch", f"{fits} images", why)
    show_decisions(launch.console, [decision])
    config = plan.config.model_copy(update={"train": plan.config.train.model_copy(update={"micro_batch": fits})})
    return replace(plan, config=config, decisions=[*plan.decisions, decision])


def _fit_and_finish(
    plan: Plan, module: nn.Module, task: Task, launch: Launch, saved: Saved | None = None
) -> TrainResult:
    """The part of a run that can be stopped and gone on with."""
    try:
        state, seconds = fit(learning_of(plan, task, launch.ranks, launch.interrupts), module, launch, saved)
        return launch.ranks.share(lambda: _finish(plan, state, launch, seconds))
    except Interrupted as stopped:
        command = "vitrail" if launch.ranks.world == 1 else "torchrun ... -m vitrail"
        go_on = f"go on with: {command} train --resume --out {shlex.quote(str(launch.folder))}"
        stopped.advice = where_it_stopped(launch.folder, go_on)
        raise


def _finish(plan: Plan, state: dict[str, Tensor], launch: Launch, seconds: float) -> TrainResult:
    net, folder = plain_network(plan, state), launch.folder
    if plan.config.kind == "masked":
        found = finish_masked(plan, net, launch)
        result = TrainResult(folder, folder / "model.safetensors", None, found)
    else:
        net.to(plan.device)
        result = _classifier(plan, net, launch, seconds)
    forget_earlier(folder)
    return result


def _classifier(plan: Plan, net: Network, launch: Launch, seconds: float) -> TrainResult:
    """The last measurement and its files."""
    folder = launch.folder
    scores = finish(plan, net, launch, seconds)
    return TrainResult(folder, folder / "model.safetensors", folder / "report.html", scores)


def _baseline(plan: Plan, net: Network, console: Console, interrupts: Interrupts) -> Baseline | None:
    if plan.config.kind == "masked":
        return None
    with interrupts.at_once(), console.status("fitting a linear probe, the baseline to beat"):
        found = baseline(plan, net if plan.weights is not None else None, interrupts)
    if found is None:
        return None
    told, probe = found
    console.print(
        f"to beat: [bold]{told.accuracy:.1%}[/], a linear probe on {escape(told.features)} ({told.seconds:.0f} s)"
    )
    if plan.weights is not None and plan.config.model.head == "probe":
        net.head.load_state_dict({"weight": probe.weight, "bias": probe.bias})
        console.print("[dim]the head starts as this probe[/]")
    return told


def _probe(plan: Plan, net: Network, launch: Launch) -> TrainResult:
    """The frozen network with a linear head fitted on its features. It needs no others: one process does it."""

    def work() -> TrainResult:
        console, started = launch.console, time.monotonic()
        with launch.interrupts.at_once(), console.status("one pass over the images, then logistic regression"):
            fitted = probe_network(plan, net, launch.interrupts)
        net.head.load_state_dict({"weight": fitted.weight, "bias": fitted.bias})
        best = Decision("penalty", f"{fitted.penalty:g}", why_penalty(fitted))
        plan.decisions.append(best)
        show_decisions(console, [best])
        seconds = time.monotonic() - started
        about = about_run(plan, None)
        begin_folder(launch.folder, plan.config.model_dump(mode="json", exclude_none=True), plan.dataset.excluded)
        found = _classifier(plan, net, replace(launch, about=about), seconds)
        take_place(launch.folder)
        forget_earlier(launch.folder)
        return found

    return launch.ranks.share(work)
