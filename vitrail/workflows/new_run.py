"""A new run before its first step: network, baseline, micro-batch size, folder. And the whole run of a linear probe.

In: a `Plan`. Out: the plan with the micro-batch size, the module to train, the task, and the run with the facts that
its checkpoints store.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from torch import nn

from vitrail.models.build import Network
from vitrail.tasks.task import Task
from vitrail.terminal import escape
from vitrail.training.memory import choose_micro_batch_size
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
    """Build the network, measure the baseline, choose the micro-batch size, and create the run folder."""
    ranks = run.ranks
    with run.interrupts.interruptible(ranks):
        net, task = build_starting_network(plan, run.console), task_of_plan(plan)
        # The baseline uses the plain network, before LoRA or a masked-patch head is added.
        baseline = ranks.broadcast(lambda: _measure_baseline(plan, net, run))
        module = build_trained_module(plan, net)
        ranks.broadcast_tensors([tensor.data for tensor in module.state_dict().values()])
        plan = _with_micro_batch(plan, module, task, run)
        return plan, module, task, replace(run, facts=ranks.broadcast(lambda: _create_folder(plan, baseline, run)))


def run_probe(plan: Plan, run: RunContext) -> TrainResult:
    """Fit a linear head on the features of the frozen network, then finish the run. One process works."""
    with run.interrupts.interruptible(run.ranks):
        net = build_starting_network(plan, run.console)

    def fit_and_finish() -> TrainResult:
        console, started = run.console, time.monotonic()
        with (
            run.interrupts.interruptible(),
            console.status("computing features of the images, then logistic regression"),
        ):
            fitted = probe_network(plan, net, run.interrupts)
        net.head.load_state_dict({"weight": fitted.weight, "bias": fitted.bias})
        penalty = Decision("penalty", f"{fitted.penalty:g}", penalty_reason(fitted))
        plan.decisions.append(penalty)
        show_decisions(console, [penalty])
        seconds = time.monotonic() - started
        result = finish(plan, net, replace(run, facts=_create_folder(plan, None, run)), seconds)
        move_into_place(run.folder)
        remove_replaced_run(run.folder)
        return result

    return run.ranks.broadcast(fit_and_finish)


def _create_folder(plan: Plan, baseline: Baseline | None, run: RunContext) -> dict[str, Any]:
    """Create the run folder; return the facts that checkpoints store."""
    facts = checkpoint_facts(plan, baseline)
    create_run_folder(run.folder, plan.config.model_dump(mode="json", exclude_none=True), plan.dataset.excluded)
    return facts


def _measure_baseline(plan: Plan, net: Network, run: RunContext) -> Baseline | None:
    """The accuracy of a linear probe. With model.head_init=probe the head is initialized with it."""
    if not plan.model.num_classes:
        return None
    console = run.console
    with run.interrupts.interruptible(), console.status("fitting a linear probe as the baseline"):
        fitted = fit_baseline(plan, net if plan.weights is not None else None, run.interrupts)
    if fitted is None:
        return None
    baseline, probe = fitted
    how = f"linear probe on {escape(baseline.features)}, {baseline.seconds:.0f} s"
    console.print(f"baseline: [bold]{baseline.accuracy:.1%}[/] ({how})")
    if plan.weights is not None and plan.config.model.head_init == "probe":
        net.head.load_state_dict({"weight": probe.weight, "bias": probe.bias})
        console.print("[dim]head: initialized with this linear probe[/]")
    return baseline


def _with_micro_batch(plan: Plan, module: nn.Module, task: Task, run: RunContext) -> Plan:
    """The plan with a micro-batch size that fits in memory. A resumed run uses the same one, for the same sums."""
    if plan.config.train.micro_batch_size:
        return plan
    ranks = run.ranks
    example = example_batch(plan, task.targets, ranks)
    most = len(example)
    fits = choose_micro_batch_size(module, task.loss, example, plan.config, plan.model, ranks)
    (fits,) = (-number for number in ranks.all_reduce_max(-fits))  # the smallest of all processes
    if fits >= most:
        return plan
    why = f"a batch of {most} images does not fit in memory, so gradients are accumulated"
    decision = Decision("micro-batch", f"{fits} images", why)
    show_decisions(run.console, [decision])
    config = plan.config.model_copy(update={"train": plan.config.train.model_copy(update={"micro_batch_size": fits})})
    return replace(plan, config=config, decisions=[*plan.decisions, decision])
