"""Training on CUDA: bit-identical for equal seeds, within the planned memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import ObjectiveConfig, OptimizerConfig, PrecisionConfig, RunConfig, ScheduleConfig, TrainConfig
from vitrail.tasks.classification import Classification
from vitrail.tasks.task import Batch
from vitrail.training.cuda_graph import GraphedStep
from vitrail.training.ema import EMA
from vitrail.training.optimizer import build_optimizer
from vitrail.training.precision import set_dtypes
from vitrail.training.state import TrainState
from vitrail.training.step import TrainStep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; run with `make gpu`"),
]

GIB = 2**30


def step_with(loss, optimizer: OptimizerConfig, shape="constant", micro_batch=0) -> TrainStep:
    """A step in bfloat16 with gradients clipped to a norm of 1."""
    config = RunConfig(
        optimizer=optimizer.model_copy(update={"clip_grad_norm": 1.0}),
        schedule=ScheduleConfig(shape=shape, timescale=1),
        precision=PrecisionConfig(compute="bf16"),
        train=TrainConfig(steps=30, micro_batch_size=micro_batch),
    )
    return TrainStep(loss, config, torch.device("cuda"))


class Trainer:
    """AdamW steps on random images from a seeded generator."""

    def __init__(self, net: nn.Module, batch: int, autocast: bool):
        self.net = net.train()
        self.optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.1)
        self.batch, self.autocast = batch, autocast
        self.generator = torch.Generator("cuda").manual_seed(2)

    def step(self) -> Tensor:
        pixels = torch.randn(self.batch, 3, 224, 224, device="cuda", generator=self.generator)
        labels = torch.randint(10, (self.batch,), device="cuda", generator=self.generator)
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, enabled=self.autocast):
            loss = F.cross_entropy(self.net(pixels), labels)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
def test_two_runs_with_one_seed_are_bit_identical(make_net, deterministic, autocast):
    def run() -> tuple[Tensor, dict[str, Tensor]]:
        trainer = Trainer(make_net("Ti/16", num_classes=10, dropout=0.1), batch=16, autocast=autocast)
        torch.manual_seed(3)
        losses = torch.stack([trainer.step() for _ in range(20)])
        return losses, trainer.net.state_dict()

    (losses, weights), (losses_again, weights_again) = run(), run()
    assert losses.isfinite().all()
    assert len(losses.unique()) == len(losses)  # it did train
    assert torch.equal(losses, losses_again)
    assert [name for name in weights if not torch.equal(weights[name], weights_again[name])] == []


def test_memory_of_a_b16_training_step_is_bounded_and_does_not_grow(make_net):
    """B/16, batch 64, bf16 autocast. Weights, gradients and AdamW's moments take 1.3 GiB, and activations 3.9 GiB
    (about 36 bytes per token, channel and block). The bound has a margin for temporary gradients."""
    elsewhere = torch.cuda.memory_allocated()
    trainer = Trainer(make_net("B/16"), batch=64, autocast=True)
    for _ in range(3):
        trainer.step()
    resting = torch.cuda.memory_allocated()
    peaks = []
    for _ in range(8):
        torch.cuda.reset_peak_memory_stats()
        trainer.step()
        peaks.append(torch.cuda.max_memory_allocated() - elsewhere)
    assert max(peaks) < 8 * GIB
    assert max(peaks) - min(peaks) < 2**20
    assert abs(torch.cuda.memory_allocated() - resting) < 2**20  # the allocator may round a block differently


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon"])
def test_a_step_never_waits_for_the_gpu(make_net, name):
    """The check for non-finite gradients runs on the device too."""
    net = make_net("Ti/16", num_classes=10)
    state = TrainState(net, build_optimizer(net, OptimizerConfig(name=name)), EMA(net, 0.9))
    objective = Classification(ObjectiveConfig(), 10)
    update = step_with(objective.loss, OptimizerConfig(name=name, lr=1e-3), micro_batch=4)
    batch = Batch(
        torch.randn(8, 3, 224, 224, device="cuda"),
        objective.targets(torch.arange(8, device="cuda")),
        torch.ones(8, device="cuda"),
    )
    bad = Batch(batch.pixels * torch.nan, batch.targets, batch.weights)
    update(state, batch)  # the first step makes the optimizer's state
    before = [p.detach().clone() for p in net.parameters()]
    torch.cuda.set_sync_debug_mode("error")
    try:
        done = update(state, bad)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not done.finite and int(state.nonfinite_steps) == 1
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    assert update(state, batch).finite and int(state.nonfinite_steps) == 0


@pytest.mark.parametrize("options", [{}, {"residual": "bf16"}, {"parameters": "bf16"}], ids=str)
@pytest.mark.parametrize("recompute", [False, True])
def test_every_precision_learns_a_small_batch(make_net, options, recompute):
    net = make_net("Ti/16", num_classes=10, dropout=0.0)
    set_dtypes(net, PrecisionConfig(**options))
    net.set_grad_checkpointing(recompute)
    state = TrainState(net.train(), build_optimizer(net, OptimizerConfig(lr=1e-3)))
    objective = Classification(ObjectiveConfig(), 10)
    update = step_with(objective.loss, OptimizerConfig(lr=1e-3))
    pixels = torch.randn(16, 3, 224, 224, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    targets = objective.targets(torch.arange(16, device="cuda") % 10)
    batch = Batch(pixels, targets, torch.ones(16, device="cuda"))
    losses = [float(update(state, batch).loss) / 16 for _ in range(30)]
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon"])
@pytest.mark.parametrize("micro_batch", [0, 4])
def test_steps_with_a_cuda_graph_are_bit_identical(make_net, deterministic, name, micro_batch):
    """With dropout, averaging and a batch that is not finite; the weights of both to the bit."""
    objective, optimizer = Classification(ObjectiveConfig(), 10), OptimizerConfig(name=name, lr=1e-3, layer_decay=0.9)
    generator = torch.Generator("cuda").manual_seed(0)
    batches = [torch.randn(8, 3, 224, 224, device="cuda", generator=generator) for _ in range(10)]
    batches[6] *= torch.nan
    targets, weights = objective.targets(torch.arange(8, device="cuda")), torch.ones(8, device="cuda")
    results = []
    for graphed in (False, True):
        net = make_net("Ti/16", num_classes=10, dropout=0.1).train()
        state = TrainState(net, build_optimizer(net, optimizer), EMA(net, 0.9))
        update = step_with(objective.loss, optimizer, "rsqrt", micro_batch)  # another rate in each step
        step = GraphedStep(update) if graphed else update
        losses = torch.stack([step(state, Batch(pixels, targets, weights)).loss for pixels in batches])
        tensors = {key: value.clone() for key, value in state.tensors().items()}
        results.append((losses, tensors, int(state.nonfinite_steps)))
    (losses, tensors, nonfinite), (graph_losses, graph_tensors, graph_nonfinite) = results
    assert torch.equal(losses.nan_to_num(), graph_losses.nan_to_num()) and len(losses.unique()) == 10
    assert nonfinite == graph_nonfinite == 0
    assert [key for key in tensors if not torch.equal(tensors[key], graph_tensors[key])] == []
