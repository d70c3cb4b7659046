"""The training loop: step, clip, average, log, evaluate, save. It is handed everything it works with."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from vitrail.errors import UserError
from vitrail.training.checkpoint import TrainState
from vitrail.training.interrupt import Interrupted, Interrupts

Objective = Callable[[Tensor, Tensor, Tensor], Tensor]  # logits, targets, weights -> loss
Evaluator = Callable[[torch.nn.Module], dict[str, float]]
Item = TypeVar("Item")


class Watcher(Protocol):
    """Where the loop reports."""

    def step(self, step: int) -> None: ...
    def log(self, row: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Prepared:
    """A batch as the network takes it, on its device."""

    pixels: Tensor
    targets: Tensor
    weights: Tensor
    waited: float | None = None  # seconds until its images were there; none: all the time it took to come


@dataclass(frozen=True)
class LoopPlan:
    """When things happen, in steps."""

    steps: int
    log_every: int
    evaluate_every: int
    checkpoint_every: int
    checkpoint_seconds: float = math.inf  # and after this time, whatever the step


@dataclass(frozen=True)
class Update:
    """How one step changes the weights."""

    objective: Objective
    learning_rate: Callable[[int], float]
    clip: float
    autocast: Callable[[], AbstractContextManager[object]]
    seed_of_step: Callable[[int], int]

    def __call__(self, state: TrainState, batch: Prepared) -> tuple[Tensor, float]:
        """One optimizer step; returns the loss, still on the device, and the learning rate."""
        torch.manual_seed(self.seed_of_step(state.step))  # dropout depends on the step alone, not on history
        lr = self.learning_rate(state.step)
        for group in state.optimizer.param_groups:
            group["lr"] = lr
        with self.autocast():
            loss = self.objective(state.model(batch.pixels), batch.targets, batch.weights)
        loss.backward()
        if self.clip:
            torch.nn.utils.clip_grad_norm_(state.model.parameters(), self.clip)
        state.optimizer.step()
        state.optimizer.zero_grad(set_to_none=True)
        state.step += 1
        if state.average is not None:
            state.average.update(state.model, state.step)
        return loss.detach(), lr


def run(
    state: TrainState,
    batches: Iterable[Prepared],
    update: Update,
    plan: LoopPlan,
    *,
    evaluator: Evaluator,
    save: Callable[[TrainState], object],
    watcher: Watcher,
    interrupts: Interrupts,
) -> None:
    """Train from state.step to plan.steps. On a signal: save, then raise Interrupted, at the next boundary."""
    pace = _Pace()
    saved_at = time.monotonic()

    def save_finite() -> None:
        finite = [torch.isfinite(p).all() for p in state.model.parameters()]
        if not torch.stack(finite).all():
            raise _diverged(state.step)
        save(state)

    state.model.train()
    for batch in pace.waiting(batches):
        loss, lr = update(state, batch)
        pace.add(loss, len(batch.pixels))
        step, last = state.step, state.step == plan.steps
        watcher.step(step)
        if step % plan.log_every == 0 or last:
            watcher.log({"step": step, **pace.summary(step), "lr": lr})
        try:
            interrupts.check()
            if step % plan.evaluate_every == 0 or last:
                evaluate(state, evaluator, watcher, pace)
        except Interrupted:
            save_finite()
            raise
        if step % plan.checkpoint_every == 0 or last or time.monotonic() - saved_at > plan.checkpoint_seconds:
            with pace.paused():
                save_finite()
            saved_at = time.monotonic()


def evaluate(state: TrainState, evaluator: Evaluator, watcher: Watcher, pace: _Pace) -> None:
    """Measure the averaged weights where there is an average, else the current ones."""
    model = state.average.model if state.average is not None else state.model
    with pace.paused():
        model.eval()
        row = evaluator(model)
        model.train(model is state.model)
    watcher.log({"step": state.step, **row})


def _diverged(step: int) -> UserError:
    return UserError(
        f"training diverged: at step {step} the loss or the weights are not numbers any more; "
        "start again with a lower learning rate (--set optimizer.lr=...)"
    )


class _Pace:
    """Mean loss, images a second and the share of time without data since the last log, without the time spent on
    anything but training."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.images = 0
        self.waited = 0.0  # seconds
        self.started = time.monotonic()

    def waiting(self, items: Iterable[Item]) -> Iterator[Item]:
        """The items, with the time until each is there counted as waiting."""
        upcoming = iter(items)
        while True:
            since = time.monotonic()
            try:
                item = next(upcoming)
            except StopIteration:
                return
            waited = getattr(item, "waited", None)
            self.waited += time.monotonic() - since if waited is None else waited
            yield item

    def add(self, loss: Tensor, images: int) -> None:
        self.losses.append(loss)
        self.images += images

    def summary(self, step: int) -> dict[str, float]:
        loss = torch.stack(self.losses).mean().item()
        if not math.isfinite(loss):
            raise _diverged(step)
        seconds = max(time.monotonic() - self.started, 1e-9)
        row = {
            "loss": loss,
            "images_per_second": self.images / seconds,
            "data_wait": round(min(1.0, self.waited / seconds), 4),
        }
        self.losses, self.images, self.waited, self.started = [], 0, 0.0, time.monotonic()
        return row

    def paused(self) -> _Pause:
        return _Pause(self)


class _Pause:
    def __init__(self, pace: _Pace):
        self.pace = pace

    def __enter__(self) -> None:
        self.since = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self.pace.started += time.monotonic() - self.since
