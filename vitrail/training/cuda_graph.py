"""Training steps as a CUDA graph, for small networks, whose kernels run faster than the host can launch them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vitrail.tasks.task import Batch
from vitrail.training.optimizer import learning_rates_to_device
from vitrail.training.state import TrainState
from vitrail.training.step import StepResult, TrainStep

WARMUP_STEPS = 3  # before the capture: they compile, choose kernels and create the optimizer's state


@dataclass
class _Captured:
    graph: torch.cuda.CUDAGraph
    batch: Batch  # the input tensors of the graph
    result: StepResult  # its output tensors


class GraphedStep:
    """A `TrainStep` captured as a CUDA graph, with bit-identical results.

    The graph is captured again after a checkpoint was loaded. If it cannot be captured, steps run without a graph.

    Parameters
    ----------
    step
        The step to capture.
    warn
        Called with a message if the step cannot be captured.
    """

    def __init__(self, step: TrainStep, warn: Callable[[str], None] = lambda _: None):
        self.step, self.warn = step, warn
        self.can_capture = True
        self.stream: torch.cuda.Stream | None = None
        self.captured: _Captured | None = None
        self.load_count, self.warmup_steps = 0, 0

    def learning_rate(self, step: int) -> float:
        return self.step.learning_rate(step)

    def __call__(self, state: TrainState, batch: Batch) -> StepResult:
        if state.load_count != self.load_count:
            self.captured, self.warmup_steps, self.load_count = None, 0, state.load_count
        if self.stream is None:
            self.stream = torch.cuda.Stream(batch.pixels.device)
            learning_rates_to_device(state.optimizer, batch.pixels.device)
        return self.step.on_host(state, lambda: self._update(state, batch))

    def _update(self, state: TrainState, batch: Batch) -> StepResult:
        if self.warmup_steps < WARMUP_STEPS or not self.can_capture:
            self.warmup_steps += 1
            return self._run_uncaptured(state, batch)
        if self.captured is None:
            try:
                self.captured = self._capture(state, batch)
            except RuntimeError as error:
                self.can_capture = False
                self.warn(f"cannot capture the training step as a CUDA graph, so it runs without one: {error}")
                state.optimizer.zero_grad(set_to_none=True)
                return self._run_uncaptured(state, batch)
        for target, tensor in zip(_tensors(self.captured.batch), _tensors(batch), strict=True):
            target.copy_(tensor)
        self.captured.graph.replay()
        return _clone(self.captured.result)

    def _run_uncaptured(self, state: TrainState, batch: Batch) -> StepResult:
        """Run the step on the stream of the capture: gradients stay with the stream that created them."""
        assert self.stream is not None
        current = torch.cuda.current_stream(batch.pixels.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            result = _clone(self.step.on_device(state, batch))
        current.wait_stream(self.stream)
        return result

    def _capture(self, state: TrainState, batch: Batch) -> _Captured:
        """Capture the step. This does not run it: the weights do not change."""
        pixels, targets, weights = (tensor.clone() for tensor in _tensors(batch))
        static_batch = Batch(pixels, targets, weights)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
            result = self.step.on_device(state, static_batch)
        return _Captured(graph, static_batch, result)


def _tensors(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    return batch.pixels, batch.targets, batch.weights


def _clone(result: StepResult) -> StepResult:
    """A copy that the next replay does not overwrite."""
    return StepResult(
        result.loss.clone(),
        result.correct.clone(),
        result.weight.clone(),
        result.grad_norm.clone(),
        result.finite.clone(),
    )
