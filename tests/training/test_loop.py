import signal

import pytest
import torch
from torch import nn

from vitrail.config import ObjectiveConfig, OptimizerConfig
from vitrail.errors import UserError
from vitrail.objectives.classification import Classification
from vitrail.training.checkpoint import TrainState
from vitrail.training.interrupt import Interrupted, Interrupts
from vitrail.training.loop import LoopPlan, Prepared, Update, run
from vitrail.training.optimizer import build_optimizer
from vitrail.training.precision import autocast


class Log:
    def __init__(self):
        self.rows, self.saved = [], []

    def step(self, step):
        pass

    def log(self, row):
        self.rows.append(row)

    def save(self, state):
        self.saved.append(state.step)


def update(net, lr=0.1, objective=None, clip=0.0):
    objective = objective or (lambda logits, targets, weights: ((logits - targets) ** 2).mean())
    return Update(objective, lambda _: lr, clip, autocast("fp32", torch.device("cpu")), lambda step: step)


def fit(log, steps=10, *, net=None, batches=None, evaluator=None, change=None, plan=None, interrupts=None):
    torch.manual_seed(0)
    net = net or nn.Linear(3, 2)
    state = TrainState(net, build_optimizer(net, OptimizerConfig(name="sgd", lr=0.1, momentum=0)), None)
    batches = batches or [Prepared(torch.ones(4, 3), torch.zeros(4, 2), torch.ones(4))] * steps
    plan = plan or LoopPlan(steps, log_every=4, evaluate_every=5, checkpoint_every=3)
    run(
        state,
        batches,
        change or update(net),
        plan,
        evaluator=evaluator or (lambda _: {"val_top1": 0.5}),
        save=log.save,
        watcher=log,
        interrupts=interrupts or Interrupts(),
    )
    return state


def test_any_module_and_any_loss_train():
    log = Log()
    state = fit(log)
    assert state.step == 10
    assert [r["step"] for r in log.rows if "loss" in r] == [4, 8, 10]
    assert [r["step"] for r in log.rows if "val_top1" in r] == [5, 10]
    assert log.saved == [3, 6, 9, 10]
    losses = [r["loss"] for r in log.rows if "loss" in r]
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.05


def test_the_gradient_is_clipped_by_its_global_norm():
    net = nn.Linear(3, 2)
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    fit(Log(), 1, net=net, change=update(net, lr=1.0, clip=0.01))
    moved = torch.cat([(p - before[name]).flatten() for name, p in net.named_parameters()])
    assert moved.norm().item() == pytest.approx(0.01, rel=1e-3)


def test_a_loss_that_is_no_number_stops_with_advice():
    good = Prepared(torch.ones(4, 3), torch.zeros(4, 2), torch.ones(4))
    bad = Prepared(torch.full((4, 3), torch.nan), torch.zeros(4, 2), torch.ones(4))
    for first_bad, seen_at, saved in ((0, 3, []), (3, 4, [3]), (4, 6, [3])):  # logged every 4 steps, saved every 3
        log = Log()
        with pytest.raises(UserError, match=f"diverged: at step {seen_at} .* lower learning rate"):
            fit(log, batches=[good] * first_bad + [bad] * 10)
        assert log.saved == saved


@pytest.mark.parametrize("where", ["step", "evaluation"])
def test_a_signal_in_a_step_or_an_evaluation_saves_first(where):
    log = Log()
    with Interrupts() as interrupts:

        def evaluator(_):
            if where == "evaluation":
                signal.raise_signal(signal.SIGTERM)
            interrupts.check()
            return {}

        def batches():
            for index in range(10):
                if where == "step" and index == 6:
                    signal.raise_signal(signal.SIGINT)
                yield Prepared(torch.ones(4, 3), torch.zeros(4, 2), torch.ones(4))

        with pytest.raises(Interrupted):
            fit(log, batches=batches(), evaluator=evaluator, interrupts=interrupts)
    assert log.saved[-1] == (7 if where == "step" else 5)


def test_a_second_signal_falls_through():
    with pytest.raises(KeyboardInterrupt), Interrupts():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)


def test_handlers_are_put_back():
    before = signal.getsignal(signal.SIGTERM)
    with Interrupts():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_softmax_loss_is_torchs_cross_entropy(smoothing):
    logits, labels = torch.randn(5, 4), torch.tensor([0, 1, 2, 3, 1])
    objective = Classification(ObjectiveConfig(label_smoothing=smoothing), 4)
    expected = nn.functional.cross_entropy(logits, labels, label_smoothing=smoothing)
    assert torch.allclose(objective(logits, objective.targets(labels), torch.ones(5)), expected)


def test_sigmoid_loss_is_the_papers():
    logits, labels = torch.randn(5, 4), torch.tensor([0, 1, 2, 3, 1])
    objective = Classification(ObjectiveConfig(loss="sigmoid"), 4)
    y = nn.functional.one_hot(labels, 4).float()
    expected = -(y * logits.sigmoid().log() + (1 - y) * (-logits).sigmoid().log()).sum(-1).mean()
    assert torch.allclose(objective(logits, objective.targets(labels), torch.ones(5)), expected, atol=1e-5)
    smooth = Classification(ObjectiveConfig(loss="sigmoid", label_smoothing=1e-4), 4).targets(labels)
    assert smooth[0].tolist() == pytest.approx([0.9999, 0.0001, 0.0001, 0.0001])


def test_an_image_of_weight_zero_counts_nothing():
    objective = Classification(ObjectiveConfig(), 3)
    logits, targets = torch.randn(4, 3), objective.targets(torch.tensor([0, 1, 2, 0]))
    weights = torch.tensor([1.0, 0.0, 1.0, 1.0])
    keep = weights > 0
    expected = objective(logits[keep], targets[keep], torch.ones(3))
    assert torch.allclose(objective(logits, targets, weights), expected)
    assert objective(logits, targets, torch.zeros(4)) == 0
