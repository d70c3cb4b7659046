"""One optimizer step: forward, backward, gradient clipping, update."""

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
    """Statistics of a step, on the device. `loss`, `correct` and `weight` are sums over the batch of this process."""

    loss: Tensor
    correct: Tensor
    weight: Tensor
    grad_norm: Tensor  # of the gradient over all processes
    finite: Tensor  # bool: False if grad_norm is NaN or Inf; then the step changed no weight


class TrainStep:
    """One optimizer step on a batch.

    Parameters
    ----------
    loss
        Computes the loss of a batch: `loss(model, batch)`.
    config
        The sections `train`, `optimizer`, `schedule` and `precision` are used.
    device
        Where the model is.
    ranks
        The processes that train together.
    """

    def __init__(self, loss: LossFunction, config: RunConfig, device: torch.device, ranks: Ranks = SINGLE_PROCESS):
        self.loss, self.config, self.ranks = loss, config, ranks
        self.autocast = autocast(config.precision.compute, device)

    def learning_rate(self, step: int) -> float:
        config = self.config
        return learning_rate(step, config.optimizer.lr, config.train.steps or 0, config.schedule)

    def __call__(self, state: TrainState, batch: Batch) -> StepResult:
        """Do one optimizer step. The loss is the weighted mean over the images of all processes."""
        return self.on_host(state, lambda: self.on_device(state, batch))

    def on_host(self, state: TrainState, update: Callable[[], StepResult]) -> StepResult:
        """The part of a step that the host does. `update` does the rest and returns its result."""
        # The seed of dropout depends only on the step, so that a resumed run is bit-identical.
        torch.manual_seed(step_seed(self.config.train.seed, state.step, self.ranks.rank))
        set_learning_rate(state.optimizer, self.learning_rate(state.step))
        result = update()
        state.step += 1
        if state.ema is not None:
            state.ema.update(state.model, state.step)
        return result

    def on_device(self, state: TrainState, batch: Batch) -> StepResult:
        """The part of a step that the device does. It depends on no step number and does not wait for the
        device, so that it can be captured as a CUDA graph."""
        weight = batch.weights.sum()
        total_weight = self.ranks.all_reduce_sum(weight.clone())
        # DDP and FSDP average gradients over processes; times world_size it is the sum.
        loss, correct = self._gradients(state, batch, self.ranks.world_size / total_weight.clamp(min=1e-9))
        grads = [p.grad for p in state.model.parameters() if p.grad is not None]
        grad_norm = full_tensor(torch.nn.utils.get_total_norm(grads))
        finite = torch.isfinite(grad_norm)
        if max_norm := self.config.optimizer.clip_grad_norm:
            torch.nn.utils.clip_grads_with_norm_(state.model.parameters(), max_norm, grad_norm)
        step_if_finite(state.optimizer, finite)
        state.optimizer.zero_grad(set_to_none=True)
        state.nonfinite_steps.copy_(torch.where(finite, 0, state.nonfinite_steps + 1))
        return StepResult(loss, correct, weight, grad_norm, finite)

    def _gradients(self, state: TrainState, batch: Batch, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Accumulate gradients over micro-batches. Returns the sums of the loss and of correct predictions."""
        model = state.forward_model
        losses, corrects = [], []
        size = self.config.train.micro_batch_size or len(batch)
        for first in range(0, len(batch), size):
            micro_batch = batch if size >= len(batch) else batch.micro_batch(first, first + size)
            with no_gradient_sync(model, enabled=first + size < len(batch)):
                with self.autocast():
                    loss = self.loss(model, micro_batch)
                (loss.total * scale).backward()
            losses.append(loss.total.detach())
            corrects.append(loss.correct.detach())
        return torch.stack(losses).sum(), torch.stack(corrects).sum()

    def rehearse(self, state: TrainState, batch: Batch) -> None:
        """Do a forward and backward pass that changes nothing.

        DDP reorders its gradient buckets after the first backward pass, which changes the last bits of sums over three
        or more processes. After a rehearsal a fresh and a resumed run use the same order.
        """
        with self.autocast():
            loss = self.loss(
                state.forward_model, batch.micro_batch(0, self.config.train.micro_batch_size or len(batch))
            )
        loss.total.backward()
        state.optimizer.zero_grad(set_to_none=True)
