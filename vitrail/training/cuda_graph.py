"""A step as one CUDA graph: small networks take a GPU less time than its host needs to launch their kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vitrail.tasks.task import Batch
from vitrail.training.optimizer import rates_on_device
from vitrail.training.state import TrainState
from vitrail.training.step import StepResult, TrainStep

PLAIN_STEPS = 3  # before the graph is recorded: they compile, choose kernels and make what the optimizer keeps


@dataclass
class _Recorded:
    graph: torch.cuda.CUDAGraph
    batch: Batch  # where the graph reads
    done: StepResult  # where it writes


class GraphedStep:
    """The same steps as those of `step`, to the bit; recorded anew whenever a checkpoint was taken over. Where they
    cannot be recorded, `tell` is told so and they are done one kernel after the other."""

    def __init__(self, step: TrainStep, tell: Callable[[str], None] = lambda _: None):
        self.step, self.tell = step, tell
        self.possible = True
        self.stream: torch.cuda.Stream | None = None
        self.recorded: _Recorded | None = None
        self.load_count, self.plain = 0, 0

    def learning_rate(self, step: int) -> float:
        return self.step.learning_rate(step)

    def __call__(self, state: TrainState, batch: Batch) -> StepResult:
        if state.load_count != self.load_count:
            self.recorded, self.plain, self.load_count = None, 0, state.load_count
        if self.stream is None:
            self.stream = torch.cuda.Stream(batch.pixels.device)
            rates_on_device(state.optimizer, batch.pixels.device)
        return self.step.on_host(state, lambda: self._change(state, batch))

    def _change(self, state: TrainState, batch: Batch) -> StepResult:
        if self.plain < PLAIN_STEPS or not self.possible:
            self.plain += 1
            return self._beside(state, batch)
        if self.recorded is None:
            try:
                self.recorded = self._record(state, batch)
            except RuntimeError as error:
                self.possible = False
                self.tell(f"a step cannot be launched as one CUDA graph here, so its kernels are, one by one: {error}")
                state.optimizer.zero_grad(set_to_none=True)
                return self._beside(state, batch)
        for place, tensor in zip(_tensors(self.recorded.batch), _tensors(batch), strict=True):
            place.copy_(tensor)
        self.recorded.graph.replay()
        return _copied(self.recorded.done)

    def _beside(self, state: TrainState, batch: Batch) -> StepResult:
        """A step that is not recorded, on the stream that will be: gradients stay with the stream they came on."""
        assert self.stream is not None
        here = torch.cuda.current_stream(batch.pixels.device)
        self.stream.wait_stream(here)
        with torch.cuda.stream(self.stream):
            done = _copied(self.step.on_device(state, batch))
        here.wait_stream(self.stream)
        return done

    def _record(self, state: TrainState, batch: Batch) -> _Recorded:
        """To record is not to do: the weights stay as they are."""
        pixels, targets, weights = (tensor.clone() for tensor in _tensors(batch))
        still = Batch(pixels, targets, weights)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
            done = self.step.on_device(state, still)
        return _Recorded(graph, still, done)


def _tensors(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    return batch.pixels, batch.targets, batch.weights


def _copied(done: StepResult) -> StepResult:
    """What the next step does not write over."""
    return StepResult(*(tensor.clone() for tensor in (done.loss, done.correct, done.weight, done.norm, done.finite)))
