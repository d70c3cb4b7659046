"""One optimizer step: how a batch changes the weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vitrail.config import RunConfig
from vitrail.data.randomness import step_seed
from vitrail.distributed import SINGLE_PROCESS, Ranks
from vitrail.inference.device import autocast
from vitrail.tasks.task import Batch, LossFunction
from vitrail.training.optimizer import set_learning_rate, step_if_finite
from vitrail.training.parallel import full_tensor, no_gradient_sync
from vitrail.training.schedule import learning_rate
from vitrail.training.state import TrainState


@dataclass(frozen=True)
class StepResult:
    """What a step did, still on the device; sums over this process's part of the batch."""

    loss: Tensor
    correct: Tensor
    weight: Tensor
    norm: Tensor  # of the gradient, over all processes
    finite: Tensor  # whether that was a number; if not, nothing has changed


class TrainStep:
    """Forward, backward, clipping and update, as the settings of a run say."""

    def __init__(self, loss: LossFunction, config: RunConfig, device: torch.device, ranks: Ranks = SINGLE_PROCESS):
        self.loss, self.config, self.ranks = loss, config, ranks
        self.autocast = autocast(config.precision.compute, device)

    def learning_rate(self, step: int) -> float:
        config = self.config
        return learning_rate(step, config.optimizer.lr, config.train.steps or 0, config.schedule)

    def __call__(self, state: TrainState, batch: Batch) -> StepResult:
        """One optimizer step. The mean is over the images of all processes, by their weights."""
        return self.on_host(state, lambda: self.on_device(state, batch))

    def on_host(self, state: TrainState, update: Callable[[], StepResult]) -> StepResult:
        """What the host does in a step, before and after `update` changes the weights."""
        # Dropout depends on the number of the step alone, not on what was drawn before: a resumed run draws the same.
        torch.manual_seed(step_seed(self.config.train.seed, state.step, self.ranks.rank))
        set_learning_rate(state.optimizer, self.learning_rate(state.step))
        result = update()
        state.step += 1
        if state.ema is not None:
            state.ema.update(state.model, state.step)
        return result

    def on_device(self, state: TrainState, batch: Batch) -> StepResult:
        """What the device does in a step. Nothing here depends on the number of the step or waits for a value, so it
        can be recorded as a CUDA graph."""
        weight = batch.weights.sum()
        total_weight = self.ranks.all_reduce_sum(weight.clone())
        # Gradients are averaged over processes, where a sum is wanted.
        loss, correct = self._gradients(state, batch, self.ranks.world_size / total_weight.clamp(min=1e-9))
        grads = [p.grad for p in state.model.parameters() if p.grad is not None]
        norm = full_tensor(torch.nn.utils.get_total_norm(grads))
        finite = torch.isfinite(norm)
        if self.config.optimizer.clip_grad_norm:
            torch.nn.utils.clip_grads_with_norm_(state.model.parameters(), self.config.optimizer.clip_grad_norm, norm)
        step_if_finite(state.optimizer, finite)
        state.optimizer.zero_grad(set_to_none=True)
        state.nonfinite_steps.copy_(torch.where(finite, 0, state.nonfinite_steps + 1))
        return StepResult(loss, correct, weight, norm, finite)

    def _gradients(self, state: TrainState, batch: Batch, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Add up gradients over the micro-batches; returns the sums of losses and of correct predictions."""
        network = state.forward_model
        losses, corrects = [], []
        size = self.config.train.micro_batch_size or len(batch)
        for first in range(0, len(batch), size):
            part = batch if size >= len(batch) else batch.micro_batch(first, first + size)
            with no_gradient_sync(network, enabled=first + size < len(batch)):
                with self.autocast():
                    loss = self.loss(network, part)
                (loss.total * scale).backward()
            losses.append(loss.total.detach())
            corrects.append(loss.correct.detach())
        return torch.stack(losses).sum(), torch.stack(corrects).sum()

    def rehearse(self, state: TrainState, batch: Batch) -> None:
        """A backward pass that changes nothing. DDP orders gradients anew after its first one, which changes the last
        bits of sums over three processes and more: with this before it, the first step is like every other."""
        with self.autocast():
            loss = self.loss(
                state.forward_model, batch.micro_batch(0, self.config.train.micro_batch_size or len(batch))
            )
        loss.total.backward()
        state.optimizer.zero_grad(set_to_none=True)
