"""One step: how a batch changes the weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from vitrail.distributed import ALONE, Ranks
from vitrail.tasks.task import Batch, Objective
from vitrail.training.optimizer import set_learning_rate, step_if_finite
from vitrail.training.parallel import gradients_stay, whole
from vitrail.training.state import TrainState


@dataclass(frozen=True)
class Done:
    """What a step did, still on the device; sums over this process's part of the batch."""

    loss: Tensor
    right: Tensor
    weight: Tensor
    norm: Tensor  # of the gradient, over all processes
    finite: Tensor  # whether that was a number; else nothing has changed


@dataclass(frozen=True)
class Update:
    objective: Objective
    learning_rate: Callable[[int], float]
    clip: float
    autocast: Callable[[], AbstractContextManager[object]]
    seed_of_step: Callable[[int], int]
    micro_batch: int = 0  # images at a time; 0: all
    ranks: Ranks = ALONE

    def __call__(self, state: TrainState, batch: Batch) -> Done:
        """One optimizer step. The mean is over the images of all processes, by their weights."""
        return self.around(state, lambda: self.change(state, batch))

    def around(self, state: TrainState, change: Callable[[], Done]) -> Done:
        """What the host does in a step, before and after the device changes the weights."""
        torch.manual_seed(self.seed_of_step(state.step))  # dropout depends on the step alone, not on history
        set_learning_rate(state.optimizer, self.learning_rate(state.step))
        done = change()
        state.step += 1
        if state.average is not None:
            state.average.update(state.model, state.step)
        return done

    def change(self, state: TrainState, batch: Batch) -> Done:
        """What the device does in a step: no word of it depends on the step or waits for a number."""
        weight = batch.weights.sum()
        everybody = self.ranks.sum(weight.clone())
        # Gradients are averaged over processes, where a sum is wanted.
        loss, right = self._gradients(state, batch, self.ranks.world / everybody.clamp(min=1e-9))
        grads = [p.grad for p in state.model.parameters() if p.grad is not None]
        norm = whole(torch.nn.utils.get_total_norm(grads))
        finite = torch.isfinite(norm)
        if self.clip:
            torch.nn.utils.clip_grads_with_norm_(state.model.parameters(), self.clip, norm)
        step_if_finite(state.optimizer, finite)
        state.optimizer.zero_grad(set_to_none=True)
        state.unfit.copy_(torch.where(finite, 0, state.unfit + 1))
        return Done(loss, right, weight, norm, finite)

    def _gradients(self, state: TrainState, batch: Batch, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Add up gradients over the micro-batches; returns the sums of losses and of what was right."""
        network = state.called
        losses, rights = [], []
        size = self.micro_batch or len(batch)
        for first in range(0, len(batch), size):
            part = batch if size >= len(batch) else batch.part(first, first + size)
            with gradients_stay(network, enabled=first + size < len(batch)):
                with self.autocast():
                    found = self.objective(network, part)
                (found.total * scale).backward()
            losses.append(found.total.detach())
            rights.append(found.right.detach())
        return torch.stack(losses).sum(), torch.stack(rights).sum()

    def rehearse(self, state: TrainState, batch: Batch) -> None:
        """A backward pass that changes nothing. DDP orders gradients anew after its first one, which changes the last
        bits of sums over three processes and more: with this before it, the first step is like every other."""
        with self.autocast():
            found = self.objective(state.called, batch.part(0, self.micro_batch or len(batch)))
        found.total.backward()
        state.optimizer.zero_grad(set_to_none=True)
