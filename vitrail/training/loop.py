"""The training loop: step, average, log, evaluate, save. It is handed everything it works with."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from vitrail.distributed import Ranks
from vitrail.errors import UserError
from vitrail.interrupt import Interrupted, Interrupts
from vitrail.training.cuda_graph import GraphedUpdate
from vitrail.training.parallel import divide_again, local_part
from vitrail.training.state import TrainState
from vitrail.training.step import Update
from vitrail.training.throughput import Pace

SAVING_SHARE = 50  # times as long as a checkpoint takes, at least, between two that only time asks for

Evaluator = Callable[[torch.nn.Module], dict[str, float]]


class Watcher(Protocol):
    """Where the loop reports."""

    def step(self, step: int) -> None: ...
    def log(self, row: dict[str, Any]) -> None: ...
    def rewind(self, step: int) -> None: ...


@dataclass(frozen=True)
class LoopPlan:
    """When things happen, in steps."""

    steps: int
    log_every: int
    evaluate_every: int
    checkpoint_every: int
    checkpoint_seconds: float = math.inf  # and after this time, whatever the step
    bad_steps: int = 10  # skipped in a row, before the run goes back to its last checkpoint
    rollbacks: int = 0  # how often it may


@dataclass(frozen=True)
class Surroundings:
    """What the loop calls, all of it together in every process of the run."""

    # What the update takes, for a step and all after it, with so many of the stream passed over
    batches: Callable[[int, int], Iterable[Any]]
    evaluator: Evaluator | None  # none: nothing is measured on the way
    save: Callable[[TrainState], None]
    restore: Callable[[TrainState, Collection[int]], None]  # the last good checkpoint, but not those of these steps
    watcher: Watcher
    interrupts: Interrupts
    ranks: Ranks


class _Diverged(Exception):
    """The weights, or too many gradients in a row, are not numbers any more."""


def run(state: TrainState, update: Update | GraphedUpdate, plan: LoopPlan, around: Surroundings) -> None:
    """Train from state.step to plan.steps. On a signal: save, then raise Interrupted, at the next boundary."""
    returned: int | None = None  # where it went back to last
    given_up: set[int] = set()  # checkpoints from which it went wrong again, before anything better was saved
    while True:
        try:
            return _run(state, update, plan, around)
        except _Diverged:
            at, place, times = state.step, state.step + state.passed, state.rollbacks + 1
            if times > plan.rollbacks:
                raise _no_way_on(at, plan) from None
        if returned is not None and state.saved == returned:
            given_up.add(returned)
        else:
            given_up.clear()
        around.restore(state, given_up)
        returned = state.saved = state.step
        # The batches on the way to the trouble are passed over: with them, it would only come again.
        state.passed, state.rollbacks = place - state.step, times
        state.unfit.zero_()
        around.watcher.rewind(state.step)
        around.watcher.log(
            {
                "step": state.step,
                "event": f"at step {at} the numbers were not finite any more: back to step {state.step}, "
                f"with other images ({plan.rollbacks - times} more such returns before the run ends)",
            }
        )


def _run(state: TrainState, update: Update | GraphedUpdate, plan: LoopPlan, around: Surroundings) -> None:
    pace = Pace(around.ranks)
    state.model.train()
    if state.step and state.evaluated < state.step and _evaluation_due(state.step, plan, around):
        _evaluate_or_save(state, around, pace)  # a signal came before it
    # What is on the disk is all there is until the first step is taken, which may start workers and compile long.
    with ExitStack() as beginning:
        beginning.enter_context(around.interrupts.at_once(around.ranks))
        _steps(state, update, plan, around, pace, beginning.close)


def _steps(
    state: TrainState,
    update: Update | GraphedUpdate,
    plan: LoopPlan,
    around: Surroundings,
    pace: Pace,
    begun: Callable[[], None],
) -> None:
    """`begun`: called after every step, and of use after the first."""
    watcher = around.watcher
    saved_at, took = time.monotonic(), 0.0  # the last checkpoint, and the seconds it took
    # On several machines a word between all of them takes a while, and a step need not wait for it.
    agree_every = 1 if around.ranks.world == around.ranks.beside else plan.log_every
    for batch in pace.waiting(around.batches(state.step, state.passed)):
        pace.add(update(state, batch), len(batch))
        begun()
        step, last = state.step, state.step == plan.steps
        watcher.step(step)
        if step % plan.log_every == 0 or last:
            row = pace.summary()
            skipped = row.pop("skipped")
            watcher.log({"step": step, **row, "lr": update.learning_rate(step - 1)})
            if skipped:
                watcher.log({"step": step, "event": _skipped(int(skipped))})
        if (step % plan.log_every == 0 or step % plan.bad_steps == 0) and int(state.unfit) >= plan.bad_steps:
            raise _Diverged
        due = 0
        if step % agree_every == 0 or last:
            late = time.monotonic() - saved_at > max(plan.checkpoint_seconds, SAVING_SHARE * took)
            caught, due = around.ranks.largest(around.interrupts.caught or 0, int(late and around.ranks.first))
            if caught:
                _save(state, around)
                raise Interrupted(caught)
        if _evaluation_due(step, plan, around):
            _evaluate_or_save(state, around, pace)
        if step % plan.checkpoint_every == 0 or last or due:
            since = time.monotonic()
            with pace.paused():
                _save(state, around)
            saved_at = time.monotonic()
            took = saved_at - since
    if state.step < plan.steps and around.interrupts.caught:  # a source that the signal ended, too
        _save(state, around)
        raise Interrupted(around.interrupts.caught)


def _evaluation_due(step: int, plan: LoopPlan, around: Surroundings) -> bool:
    return around.evaluator is not None and (step % plan.evaluate_every == 0 or step == plan.steps)


def _evaluate_or_save(state: TrainState, around: Surroundings, pace: Pace) -> None:
    try:
        evaluate(state, around, pace)
    except Interrupted:
        _save(state, around)
        raise


def _save(state: TrainState, around: Surroundings) -> None:
    """After a step without a finite gradient too, to go on from; but to go back to, the weights may be no good."""
    finite = [torch.isfinite(local_part(p.detach())).all() for p in state.model.parameters()]
    if any(around.ranks.largest(int(not torch.stack(finite).all()))):
        raise _Diverged
    around.save(state)
    if not int(state.unfit):
        state.saved = state.step


def evaluate(state: TrainState, around: Surroundings, pace: Pace) -> None:
    """Measure the averaged weights where there is an average, else the current ones."""
    assert around.evaluator is not None
    averaged = state.average.applied(state.model) if state.average is not None else nullcontext()
    with pace.paused(), averaged:
        state.model.eval()
        try:
            row = around.evaluator(state.model)
        finally:
            state.model.train()
            divide_again(state.model)
    if not math.isfinite(row.get("val_loss", 0.0)):
        raise _Diverged
    state.evaluated = state.step
    around.watcher.log({"step": state.step, **row})


def _skipped(count: int) -> str:
    steps = "one step" if count == 1 else f"{count} steps"
    return f"{steps} without a finite gradient left the weights as they were"


def _no_way_on(step: int, plan: LoopPlan) -> UserError:
    again = f", also after going back {plan.rollbacks} times" if plan.rollbacks else ""
    return UserError(
        f"training diverged: at step {step} the loss or the weights are not numbers any more{again}; "
        "start again with a lower learning rate (--set optimizer.lr=...)"
    )
