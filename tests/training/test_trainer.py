import os
import signal
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

from vitrail.config import OptimizerConfig, PrecisionConfig, RunConfig, ScheduleConfig, TrainConfig
from vitrail.distributed import SINGLE_PROCESS
from vitrail.errors import UserError
from vitrail.interrupt import Interrupted, Interrupts
from vitrail.tasks.task import Batch, Loss
from vitrail.training.optimizer import build_optimizer
from vitrail.training.run_context import RunContext
from vitrail.training.state import TrainState
from vitrail.training.step import TrainStep
from vitrail.training.trainer import Trainer

GOOD = Batch(torch.ones(4, 3), torch.zeros(4, 2), torch.ones(4))
BAD = Batch(torch.full((4, 3), torch.nan), torch.zeros(4, 2), torch.ones(4))
EVERY = {"steps": 10, "log_every": 4, "evaluate_every": 5, "checkpoint_every": 3, "max_rollbacks": 0}


class Log:
    """In place of the progress line, and of the checkpoints."""

    folder = Path("nowhere")

    def __init__(self):
        self.rows, self.saved, self.kept = [], [], {}

    def step(self, step):
        pass

    def log(self, row):
        self.rows.append(row)

    def rewind(self, step):
        self.rows = [row for row in self.rows if row["step"] <= step]

    def save(self, state, facts):
        self.saved.append(state.step)
        self.kept = {name: tensor.clone() for name, tensor in state.tensors().items()}
        self.facts = {
            "step": state.step,
            "passed": state.skipped_batches,
            "rollbacks": 0,
            "evaluated": state.validated_step,
        }
        self.facts["unfit"] = int(state.nonfinite_steps)

    def latest_good(self, until, given_up):
        return self, []

    def load_into(self, state):
        state.load(self.kept.keys(), lambda name, rows: self.kept[name], self.facts)

    @property
    def events(self):
        return [row["event"] for row in self.rows if "event" in row]


def squares(model, batch):
    errors = ((model(batch.pixels) - batch.targets) ** 2).mean(-1)
    return Loss((errors * batch.weights).sum(), (errors < 0.5).float().sum())


def fit(log, *, net=None, batches=None, validate=None, lr=0.1, clip=0.0, interrupts=None, **train):
    torch.manual_seed(0)
    net = net or nn.Linear(3, 2)
    config = RunConfig(
        optimizer=OptimizerConfig(name="sgd", lr=lr, momentum=0, clip_grad_norm=clip),
        schedule=ScheduleConfig(shape="constant"),
        precision=PrecisionConfig(compute="fp32"),
        train=TrainConfig(**(EVERY | train)),
    )
    steps = config.train.steps
    state = TrainState(net, build_optimizer(net, config.optimizer))
    if not callable(batches):
        stream = batches or [GOOD] * steps
        batches = lambda start, skipped: iter(stream[start + skipped : steps + skipped])  # noqa: E731
    log.save(state, {})
    log.saved.clear()
    run = RunContext(Path(), Console(), interrupts or Interrupts(), SINGLE_PROCESS)
    step = TrainStep(squares, config, torch.device("cpu"))
    validate = validate or (lambda model, last: {"val_top1": 0.5})
    Trainer(state, step, batches, config, run, log, log, dict, validate).train()
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
    fit(Log(), net=net, lr=1.0, clip=0.01, steps=1, log_every=1, evaluate_every=1, checkpoint_every=1)
    moved = torch.cat([(p - before[name]).flatten() for name, p in net.named_parameters()])
    assert moved.norm().item() == pytest.approx(0.01, rel=1e-3)


def test_a_step_without_a_finite_gradient_changes_nothing_and_is_told():
    """As if the bad batch had not been: only the number of the step goes on."""
    log, clean = Log(), Log()
    stream = [GOOD, GOOD, BAD, GOOD, GOOD, GOOD, GOOD, GOOD, GOOD, GOOD]
    state = fit(log, batches=stream)
    other = fit(clean, steps=9)
    assert all(torch.equal(a, b) for a, b in zip(state.model.parameters(), other.model.parameters(), strict=True))
    assert log.events == ["one step without a finite gradient left the weights as they were"]
    first = next(row for row in log.rows if "loss" in row)
    assert first["step"] == 4 and 0 < first["loss"] < 10  # of the three others
    assert state.skipped_batches == 0 and int(state.nonfinite_steps) == 0


def test_bad_steps_in_a_row_send_the_run_back_to_its_checkpoint_and_past_those_batches():
    plan = {"log_every": 2, "max_nonfinite_steps": 2, "max_rollbacks": 1}
    log = Log()
    state = fit(log, batches=[GOOD] * 4 + [BAD] * 2 + [GOOD] * 20, **plan)
    # Steps 5 and 6 were bad and seen at 6; the checkpoint of step 3 takes over, and goes on behind the bad batches.
    assert state.step == 10 and state.skipped_batches == 3
    assert log.saved == [3, 6, 9, 10]
    assert any("at step 6 the numbers were not finite any more: back to step 3" in event for event in log.events)
    clean = fit(Log(), **plan)
    assert all(torch.equal(a, b) for a, b in zip(state.model.parameters(), clean.model.parameters(), strict=True))


def test_a_second_return_goes_past_the_batches_of_the_first_too():
    """Two bad stretches before the first checkpoint that would be good: batches 2 to 3, and 6 to 8."""
    stream = [GOOD] * 2 + [BAD] * 2 + [GOOD] * 2 + [BAD] * 3 + [GOOD] * 30
    state = fit(Log(), batches=stream, log_every=1, checkpoint_every=5, max_nonfinite_steps=2, max_rollbacks=2)
    assert state.step == 10 and state.rollbacks == 2
    assert state.skipped_batches == 8  # behind the second stretch but for one batch, whose step is skipped


@pytest.mark.parametrize("rollbacks", [0, 2])
def test_numbers_that_stay_bad_stop_with_advice_and_keep_the_last_good_state(rollbacks):
    log = Log()
    with pytest.raises(UserError, match=r"diverged: at step \d+ .* lower learning rate"):
        fit(log, batches=[GOOD] * 4 + [BAD] * 90, log_every=2, max_nonfinite_steps=2, max_rollbacks=rollbacks)
    assert log.saved == [3]
    assert all(torch.isfinite(tensor).all() for tensor in log.kept.values())
    assert sum("back to step" in event for event in log.events) == rollbacks


def test_weights_that_overflow_are_never_saved():
    log = Log()
    with pytest.raises(UserError, match="diverged"):  # finite gradients, but not what they make of the weights
        fit(log, batches=[Batch(torch.full((4, 3), 100.0), GOOD.targets, GOOD.weights)] * 10, lr=3e38)
    assert log.saved == []
    assert all(torch.isfinite(tensor).all() for tensor in log.kept.values())


@pytest.mark.parametrize("micro_batch", [1, 2, 3])
def test_micro_batches_sum_to_the_whole_batch(micro_batch):
    batch = Batch(torch.randn(4, 3), torch.randn(4, 2), torch.tensor([1.0, 0.5, 0.0, 2.0]))
    nets = []
    for size in (0, micro_batch):
        state = fit(Log(), batches=[batch] * 10, micro_batch_size=size)
        nets.append(torch.cat([p.detach().flatten() for p in state.model.parameters()]))
    torch.testing.assert_close(*nets, atol=1e-6, rtol=0)


@pytest.mark.parametrize("where", ["step", "evaluation"])
def test_a_signal_in_a_step_or_an_evaluation_saves_first(where):
    log = Log()
    with Interrupts() as interrupts:

        def validate(*_):
            if where == "evaluation":
                signal.raise_signal(signal.SIGTERM)
            interrupts.check()
            return {}

        def batches(start, skipped):
            for index in range(10):
                if where == "step" and index == 6:
                    signal.raise_signal(signal.SIGINT)
                yield GOOD

        with pytest.raises(Interrupted):
            fit(log, batches=batches, validate=validate, interrupts=interrupts)
    assert log.saved[-1] == (7 if where == "step" else 5)


def test_a_second_ctrl_c_falls_through_but_not_the_echo_of_the_first(monkeypatch, capfd):
    """`timeout` signals its child, and then the group that the child is in."""
    with Interrupts() as interrupts:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert interrupts.caught == signal.SIGINT
    monkeypatch.setattr(Interrupts, "ECHO", 0.0)
    with pytest.raises(KeyboardInterrupt), Interrupts():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    assert capfd.readouterr().err == "stopped by a second Ctrl-C, without saving\n"


def test_a_second_ctrl_c_ends_it_also_when_nobody_can_be_told(monkeypatch):
    monkeypatch.setattr(Interrupts, "ECHO", 0.0)
    monkeypatch.setattr(os, "write", lambda *_: (_ for _ in ()).throw(BrokenPipeError))
    with pytest.raises(KeyboardInterrupt), Interrupts():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)


def test_where_ctrl_c_was_ignored_a_second_one_is_too(monkeypatch, capfd):
    """As in the background of a script."""
    monkeypatch.setattr(Interrupts, "ECHO", 0.0)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            assert interrupts.caught == signal.SIGINT
    finally:
        signal.signal(signal.SIGINT, before)
    assert capfd.readouterr().err == ""


def test_a_second_sigterm_does_not_cost_the_work(monkeypatch):
    monkeypatch.setattr(Interrupts, "ECHO", 0.0)
    with Interrupts() as interrupts:
        for _ in range(3):
            signal.raise_signal(signal.SIGTERM)
        assert interrupts.caught == signal.SIGTERM


def test_under_nohup_a_closed_terminal_stops_nothing():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts:
            signal.raise_signal(signal.SIGHUP)
            assert interrupts.caught is None
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_handlers_are_put_back():
    before = signal.getsignal(signal.SIGTERM)
    with Interrupts():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before
