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
from vitrail.training.run_context import RunContext
from vitrail.training.trainer import Trainer

GOOD = Batch(torch.ones(4, 3), torch.zeros(4, 2), torch.ones(4))
BAD = Batch(torch.full((4, 3), torch.nan), torch.zeros(4, 2), torch.ones(4))
SETTINGS = {
    "steps": 10,
    "log_every": 4,
    "evaluate_every": 5,
    "checkpoint_every": 3,
    "max_rollbacks": 0,
    "device": "cpu",
    "compile": "off",
}


class Recorder:
    """Stands in for the progress display, the checkpoint manager and the checkpoint it keeps in memory."""

    folder = Path("nowhere")

    def __init__(self):
        self.rows, self.saved, self.tensors = [], [], {}

    def step(self, step):
        pass

    def log(self, row):
        self.rows.append(row)

    def rewind(self, step):
        self.rows = [row for row in self.rows if row["step"] <= step]

    def save(self, state, facts):
        self.saved.append(state.step)
        self.tensors = {name: tensor.clone() for name, tensor in state.tensors().items()}
        self.facts = {
            "step": state.step,
            "passed": state.skipped_batches,
            "rollbacks": 0,
            "evaluated": state.validated_step,
        }
        self.facts["unfit"] = int(state.nonfinite_steps)

    def latest_good(self, until, rejected):
        return self, []

    def load_into(self, state):
        state.load(self.tensors.keys(), lambda name, rows: self.tensors[name], self.facts)

    @property
    def events(self):
        return [row["event"] for row in self.rows if "event" in row]


class SquaredError:
    """A task for the trainer."""

    graph_safe = False

    def loss(self, model, batch):
        errors = ((model(batch.pixels) - batch.targets) ** 2).mean(-1)
        return Loss((errors * batch.weights).sum(), (errors < 0.5).float().sum())


def fit(log, *, net=None, batches=None, validate=None, lr=0.1, clip=0.0, interrupts=None, **train):
    """Train on `batches` (all good by default) and return the final state."""
    torch.manual_seed(0)
    config = RunConfig(
        optimizer=OptimizerConfig(name="sgd", lr=lr, momentum=0, clip_grad_norm=clip),
        schedule=ScheduleConfig(shape="constant"),
        precision=PrecisionConfig(compute="fp32"),
        train=TrainConfig(**(SETTINGS | train)),
    )
    steps = config.train.steps
    if not callable(batches):
        stream = batches or [GOOD] * steps
        batches = lambda start, skipped: iter(stream[start + skipped : steps + skipped])  # noqa: E731
    run = RunContext(Path(), Console(), interrupts or Interrupts(), SINGLE_PROCESS)
    validate = validate or (lambda model, last: {"val_top1": 0.5})
    trainer = Trainer(net or nn.Linear(3, 2), SquaredError(), batches, config, run, log, validate=validate)
    trainer.progress = log
    log.save(trainer.state, {})
    log.saved.clear()
    trainer.train()
    return trainer.state


def test_trains_any_module_with_any_loss():
    log = Recorder()
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
    fit(Recorder(), net=net, lr=1.0, clip=0.01, steps=1, log_every=1, evaluate_every=1, checkpoint_every=1)
    moved = torch.cat([(p - before[name]).flatten() for name, p in net.named_parameters()])
    assert moved.norm().item() == pytest.approx(0.01, rel=1e-3)


def test_a_step_with_a_non_finite_gradient_is_skipped_and_logged():
    """The weights are those of a run without the bad batch."""
    log, clean = Recorder(), Recorder()
    stream = [GOOD, GOOD, BAD, GOOD, GOOD, GOOD, GOOD, GOOD, GOOD, GOOD]
    state = fit(log, batches=stream)
    other = fit(clean, steps=9)
    assert all(torch.equal(a, b) for a, b in zip(state.model.parameters(), other.model.parameters(), strict=True))
    assert len(log.events) == 1 and "skipped 1 step" in log.events[0]
    first = next(row for row in log.rows if "loss" in row)
    assert first["step"] == 4 and 0 < first["loss"] < 10  # the mean of the other three steps
    assert state.skipped_batches == 0 and int(state.nonfinite_steps) == 0


def test_non_finite_steps_in_a_row_cause_a_rollback_that_skips_their_batches():
    plan = {"log_every": 2, "max_nonfinite_steps": 2, "max_rollbacks": 1}
    log = Recorder()
    state = fit(log, batches=[GOOD] * 4 + [BAD] * 2 + [GOOD] * 20, **plan)
    # Batches 5 and 6 are bad, which is detected at step 6. Training resumes from step 3 with the batches after them.
    assert state.step == 10 and state.skipped_batches == 3
    assert log.saved == [3, 6, 9, 10]
    assert any("at step 6" in event and "rolled back to step 3" in event for event in log.events)
    clean = fit(Recorder(), **plan)
    assert all(torch.equal(a, b) for a, b in zip(state.model.parameters(), clean.model.parameters(), strict=True))


def test_a_second_rollback_skips_the_batches_of_the_first_too():
    """Two groups of bad batches, 2 to 3 and 6 to 8, come before the first good checkpoint."""
    stream = [GOOD] * 2 + [BAD] * 2 + [GOOD] * 2 + [BAD] * 3 + [GOOD] * 30
    state = fit(Recorder(), batches=stream, log_every=1, checkpoint_every=5, max_nonfinite_steps=2, max_rollbacks=2)
    assert state.step == 10 and state.rollbacks == 2
    assert state.skipped_batches == 8  # all but the last bad batch, whose step is skipped


@pytest.mark.parametrize("rollbacks", [0, 2])
def test_divergence_after_all_rollbacks_is_an_error_and_keeps_the_last_good_checkpoint(rollbacks):
    log = Recorder()
    with pytest.raises(UserError, match=r"diverged.* at step \d+.*optimizer\.lr"):
        fit(log, batches=[GOOD] * 4 + [BAD] * 90, log_every=2, max_nonfinite_steps=2, max_rollbacks=rollbacks)
    assert log.saved == [3]
    assert all(torch.isfinite(tensor).all() for tensor in log.tensors.values())
    assert sum("rolled back" in event for event in log.events) == rollbacks


def test_non_finite_weights_are_never_saved():
    log = Recorder()
    with pytest.raises(UserError, match="diverged"):  # the gradients are finite, the updated weights are not
        fit(log, batches=[Batch(torch.full((4, 3), 100.0), GOOD.targets, GOOD.weights)] * 10, lr=3e38)
    assert log.saved == []
    assert all(torch.isfinite(tensor).all() for tensor in log.tensors.values())


@pytest.mark.parametrize("micro_batch", [1, 2, 3])
def test_micro_batches_give_the_gradient_of_the_full_batch(micro_batch):
    batch = Batch(torch.randn(4, 3), torch.randn(4, 2), torch.tensor([1.0, 0.5, 0.0, 2.0]))
    nets = []
    for size in (0, micro_batch):
        state = fit(Recorder(), batches=[batch] * 10, micro_batch_size=size)
        nets.append(torch.cat([p.detach().flatten() for p in state.model.parameters()]))
    torch.testing.assert_close(*nets, atol=1e-6, rtol=0)


@pytest.mark.parametrize("where", ["step", "validation"])
def test_a_signal_during_a_step_or_a_validation_saves_a_checkpoint(where):
    log = Recorder()
    with Interrupts() as interrupts:

        def validate(*_):
            if where == "validation":
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


def test_a_second_ctrl_c_stops_at_once_unless_it_repeats_the_first_signal(monkeypatch, capfd):
    """`timeout` sends a signal twice: to its child, and to the process group."""
    with Interrupts() as interrupts:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert interrupts.caught == signal.SIGINT
    monkeypatch.setattr(Interrupts, "REPEAT_WINDOW", 0.0)
    with pytest.raises(KeyboardInterrupt), Interrupts():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    assert capfd.readouterr().err == "stopped by a second Ctrl-C, without saving\n"


def test_a_second_ctrl_c_stops_at_once_with_a_closed_stderr(monkeypatch):
    monkeypatch.setattr(Interrupts, "REPEAT_WINDOW", 0.0)
    monkeypatch.setattr(os, "write", lambda *_: (_ for _ in ()).throw(BrokenPipeError))
    with pytest.raises(KeyboardInterrupt), Interrupts():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)


def test_a_second_ctrl_c_is_ignored_where_the_first_handler_ignores_it(monkeypatch, capfd):
    """As for a background job of a script."""
    monkeypatch.setattr(Interrupts, "REPEAT_WINDOW", 0.0)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            assert interrupts.caught == signal.SIGINT
    finally:
        signal.signal(signal.SIGINT, before)
    assert capfd.readouterr().err == ""


def test_a_second_sigterm_does_not_stop_at_once(monkeypatch):
    monkeypatch.setattr(Interrupts, "REPEAT_WINDOW", 0.0)
    with Interrupts() as interrupts:
        for _ in range(3):
            signal.raise_signal(signal.SIGTERM)
        assert interrupts.caught == signal.SIGTERM


def test_sighup_is_ignored_under_nohup():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts:
            signal.raise_signal(signal.SIGHUP)
            assert interrupts.caught is None
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_signal_handlers_are_restored():
    before = signal.getsignal(signal.SIGTERM)
    with Interrupts():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before
