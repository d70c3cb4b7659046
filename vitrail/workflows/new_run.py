"""What a new run does before its first step; and the linear probe, a run that takes no steps."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from torch import nn

from vitrail.models.build import Network
from vitrail.tasks.task import Task
from vitrail.terminal import escape
from vitrail.training.memory import choose_micro_batch
from vitrail.training.run_context import RunContext
from vitrail.workflows.batches import example_batch
from vitrail.workflows.choose import Decision
from vitrail.workflows.finish import finish
from vitrail.workflows.linear_probe import Baseline, fit_baseline, penalty_reason, probe_network
from vitrail.workflows.resolve import Plan
from vitrail.workflows.resume import checkpoint_facts
from vitrail.workflows.run_folder import create_run_folder, move_into_place, remove_replaced_run
from vitrail.workflows.run_model import build_starting_network, build_trained_module, task_of_plan
from vitrail.workflows.run_training import TrainResult
from vitrail.workflows.show import show_decisions


def prepare_run(plan: Plan, run: RunContext) -> tuple[Plan, nn.Module, Task, RunContext]:
    """Build the network, measure the baseline, fit the batch into memory, and begin the folder."""
    ranks = run.ranks
    with run.interrupts.interruptible(ranks):
        net, task = build_starting_network(plan, run.console), task_of_plan(plan)
        # The baseline needs the network as it is, before anything is put around it.
        measured = ranks.broadcast(lambda: _baseline(plan, net, run))
        module = build_trained_module(plan, net)
        ranks.broadcast_tensors([tensor.data for tensor in module.state_dict().values()])
        plan = _with_micro_batch(plan, module, task, run)
        return plan, module, task, replace(run, facts=ranks.broadcast(lambda: _begin_folder(plan, measured, run)))


def run_probe(plan: Plan, run: RunContext) -> TrainResult:
    """The frozen network with a linear head fitted on its features. One process does it."""
    with run.interrupts.interruptible(run.ranks):
        net = build_starting_network(plan, run.console)

    def work() -> TrainResult:
        console, started = run.console, time.monotonic()
        with run.interrupts.interruptible(), console.status("one pass over the images, then logistic regression"):
            fitted = probe_network(plan, net, run.interrupts)
        net.head.load_state_dict({"weight": fitted.weight, "bias": fitted.bias})
        best = Decision("penalty", f"{fitted.penalty:g}", penalty_reason(fitted))
        plan.decisions.append(best)
        show_decisions(console, [best])
        seconds = time.monotonic() - started
        result = finish(plan, net, replace(run, facts=_begin_folder(plan, None, run)), seconds)
        move_into_place(run.folder)
        remove_replaced_run(run.folder)
        return result

    return run.ranks.broadcast(work)


def _begin_folder(plan: Plan, measured: Baseline | None, run: RunContext) -> dict[str, Any]:
    about = checkpoint_facts(plan, measured)
    create_run_folder(run.folder, plan.config.model_dump(mode="json", exclude_none=True), plan.dataset.excluded)
    return about


def _baseline(plan: Plan, net: Network, run: RunContext) -> Baseline | None:
    """A linear probe's accuracy, which the run should beat; the head may start as this probe."""
    if not plan.model.num_classes:
        return None
    console = run.console
    with run.interrupts.interruptible(), console.status("fitting a linear probe, the baseline to beat"):
        found = fit_baseline(plan, net if plan.weights is not None else None, run.interrupts)
    if found is None:
        return None
    measured, probe = found
    features = f"{escape(measured.features)} ({measured.seconds:.0f} s)"
    console.print(f"to beat: [bold]{measured.accuracy:.1%}[/], a linear probe on {features}")
    if plan.weights is not None and plan.config.model.head_init == "probe":
        net.head.load_state_dict({"weight": probe.weight, "bias": probe.bias})
        console.print("[dim]the head starts as this probe[/]")
    return measured


def _with_micro_batch(plan: Plan, module: nn.Module, task: Task, run: RunContext) -> Plan:
    """The plan with the number of images at a time written down, so that a resumed run adds up in the same order."""
    if plan.config.train.micro_batch_size:
        return plan
    ranks = run.ranks
    example = example_batch(plan, task.targets, ranks)
    most = len(example)
    fits = choose_micro_batch(module, task.loss, example, plan.config, plan.model, ranks)
    (fits,) = (-number for number in ranks.all_reduce_max(-fits))  # the smallest of all
    if fits >= most:
        return plan
    why = f"{most} images of a step at once do not fit in the memory; their gradients are summed"
    decision = Decision("micro-batch", f"{fits} images", why)
    show_decisions(run.console, [decision])
    config = plan.config.model_copy(update={"train": plan.config.train.model_copy(update={"micro_batch_size": fits})})
    return replace(plan, config=config, decisions=[*plan.decisions, decision])
