"""Full disks, NaN batches, dead workers, too little memory: a run ends with one error message, or recovers."""

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
from multiprocessing import active_children

import pytest
import torch
from rich.console import Console

from tests.commands.conftest import assert_same_bits, draw, stopped_at, weights
from vitrail.config import read_recipe
from vitrail.errors import UserError
from vitrail.training.checkpoint import CheckpointManager
from vitrail.training.progress import MetricsLog, TrainingProgress, read_metrics
from vitrail.training.step import TrainStep
from vitrail.training.tensorboard import TensorBoardWriter
from vitrail.workflows import batches, finish, new_run, run_training
from vitrail.workflows.train_run import train

pytestmark = pytest.mark.slow  # whole runs

SETTINGS = (
    "precision.compute=fp32",
    "data.workers=0",
    "schedule.warmup=1",
    "train.batch_size=8",
    "train.ema=0.9",
    "train.steps=8",
    "train.log_every=2",
    "train.evaluate_every=4",
    "train.checkpoint_every=2",
    "train.tensorboard=true",
    "model.dropout=0.1",
    "augment.mixup=0.4",
)


@pytest.fixture
def start(photos, tiny, quiet):
    """Start a run of the smallest network."""

    def begin(out, *settings, **options):
        options = {"console": quiet, "data": photos, **options}
        return train(from_=tiny, recipe="scratch", out=out, overrides=[*SETTINGS, *settings], **options)

    return begin


@pytest.fixture(scope="module")
def whole(photos, tiny, tmp_path_factory):
    """The weights of an undisturbed run."""
    out = tmp_path_factory.mktemp("whole") / "run"
    train(photos, from_=tiny, recipe="scratch", out=out, overrides=SETTINGS, console=Console(quiet=True))
    return weights(out)


def assert_loads(out):
    """Assert that the last checkpoint is complete and finite."""
    saved, damaged = CheckpointManager(out / "checkpoints", 2).latest()
    assert not damaged
    assert all(saved.read(name).isfinite().all() for name in saved.tensor_parts)
    return saved


class Disk:
    """A small file system that a test can fill."""

    def __init__(self, path):
        self.path, self.filler = path, path / "filler"

    def fill(self):
        with self.filler.open("ab", buffering=0) as file:
            for size in (1 << 20, 1 << 12, 1):
                with contextlib.suppress(OSError):
                    while file.write(bytes(size)) == size:
                        pass


@pytest.fixture
def disk(tmp_path):
    path = tmp_path / "disk"
    path.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "none", path], capture_output=True)
    if made.returncode:
        pytest.skip("a file system to fill needs the right to mount one")
    yield Disk(path)
    subprocess.run(["umount", "-l", path], check=True)


WRITES = {  # where the disk is full: which function begins to write, at which call, and what is told
    "config.toml": (new_run, "create_run_folder", 1, "cannot write to"),
    "first checkpoint": (CheckpointManager, "save", 1, "cannot write the checkpoint"),
    "later checkpoint": (CheckpointManager, "save", 3, "cannot write the checkpoint"),
    "metrics.jsonl": (MetricsLog, "write", 1, "metrics.jsonl"),
    "curves.svg": (run_training, "draw_training_curves", 1, "curves.svg"),
    "event file": (TensorBoardWriter, "write", 2, "tensorboard"),
    "predictions.csv": (finish, "write_predictions", 1, "cannot write the predictions"),
    "report.html": (finish, "write_report", 1, "cannot write the report"),
    "model_card.md": (finish, "write_model_card", 1, "cannot write the model card"),
    "model.safetensors": (finish, "write_bundle", 1, "model.safetensors"),
}


@pytest.mark.parametrize("what", WRITES)
def test_a_full_disk_gives_one_error_message_and_loses_nothing(disk, start, quiet, whole, what):
    owner, name, number, sentence = WRITES[what]
    before, calls, out = getattr(owner, name), itertools.count(1), disk.path / "run"

    def fill_then_write(*values, **options):
        if next(calls) == number:
            disk.fill()
            if what == "event file":  # a row does not fill what is left of its last page
                values = (values[0], {**values[1], "event": "x" * 4000})
        return before(*values, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, fill_then_write)
        with pytest.raises(UserError, match=r"No space left on device") as failed:
            start(out)
    assert sentence in str(failed.value) and "\n" not in str(failed.value)
    assert not (out / "model.safetensors").exists()
    assert not list(out.rglob("*.partial"))
    begun = what not in ("config.toml", "first checkpoint")
    if begun:
        assert_loads(out)
        if what == "later checkpoint":
            with pytest.raises(UserError, match="No space left on device"):  # and it says so again
                train(out=out, resume=True, console=quiet)
    disk.filler.unlink()
    start(out, resume=True)  # the same command, as a job that is started again: it goes on where there is anything
    assert_same_bits(whole, weights(out))
    steps = [row["step"] for row in read_metrics(out / "metrics.jsonl") if "loss" in row]
    assert steps == [2, 4, 6, 8]


@pytest.fixture
def poison(monkeypatch):
    """Put a NaN pixel into the batches at these positions of the stream."""
    places = set()
    augmented_batches = batches.augmented_batches

    def poisoned(batch, here, *rest):
        for place, prepared in zip(here, augmented_batches(batch, here, *rest), strict=True):
            if place in places:
                prepared.pixels[0, 0, 0, 0] = torch.nan
            yield prepared

    monkeypatch.setattr(batches, "augmented_batches", poisoned)
    return places


@pytest.fixture
def states(monkeypatch):
    """Weights and optimizer moments after each step, in order."""
    found = []
    step = TrainStep.__call__

    def remember(self, state, batch):
        done = step(self, state, batch)
        found.append({name: tensor.clone() for name, tensor in state.tensors().items()})
        return done

    monkeypatch.setattr(TrainStep, "__call__", remember)
    return found


def events(out):
    return [(row["step"], row["event"]) for row in read_metrics(out / "metrics.jsonl") if "event" in row]


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon"])
def test_a_nan_batch_is_skipped(start, tmp_path, poison, states, optimizer):
    poison |= {3}
    start(tmp_path / "run", f"optimizer.name={optimizer}")
    assert len(states) == 8
    for name, tensor in states[3].items():
        if not name.startswith("average/"):
            assert torch.equal(tensor, states[2][name]), name
    assert not all(torch.equal(states[4][name], states[3][name]) for name in states[3])
    ((step, event),) = events(tmp_path / "run")
    assert step == 4 and "skipped 1 step" in event
    assert all(tensor.isfinite().all() for tensor in weights(tmp_path / "run").values())


BACK = ("train.max_nonfinite_steps=2", "train.log_every=1", "train.checkpoint_every=3")


def test_many_nan_batches_in_a_row_roll_back_to_a_checkpoint(start, quiet, tmp_path, poison, monkeypatch):
    poison |= {4, 5, 6}  # after the checkpoint of step 3
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    start(whole, *BACK)
    ((step, event),) = [row for row in events(whole) if "rolled back" in row[1]]
    assert step == 3 and all(fact in event for fact in ("at step 6", "to step 3", "rollbacks left: 2"))
    losses = [row["step"] for row in read_metrics(whole / "metrics.jsonl") if "loss" in row]
    assert losses == [1, 2, 3, 5, 6, 7, 8]  # step 4 takes place 7 of the stream: 3 were passed over, and 6 was bad
    saved = assert_loads(whole)
    assert saved.facts["step"] == 8 and saved.facts["passed"] == 3

    with stopped_at(7, monkeypatch):  # after going back
        start(stopped, *BACK)
    assert assert_loads(stopped).facts["passed"] == 3
    train(out=stopped, resume=True, console=quiet)
    assert_same_bits(weights(whole), weights(stopped))


def test_after_max_rollbacks_the_run_ends_with_advice(start, quiet, tmp_path, poison):
    poison |= set(range(4, 100))
    with pytest.raises(UserError, match=r"diverged.* 2 rollbacks.*optimizer\.lr") as failed:
        start(tmp_path / "run", *BACK, "train.max_rollbacks=2")
    assert "\n" not in str(failed.value)
    saved = assert_loads(tmp_path / "run")
    assert saved.facts["step"] >= 3
    poison.clear()
    assert train(out=tmp_path / "run", resume=True, console=quiet).scores.n == 9


def test_checkpoints_without_finite_gradients_are_not_used_for_a_rollback(start, tmp_path, monkeypatch):
    """A step makes the weights huge but finite, and later steps are saved too: a rollback to them never helps."""
    step, broken = TrainStep.__call__, []

    def break_once(self, state, batch):
        done = step(self, state, batch)
        if state.step == 4 and not broken:
            broken.append(True)
            with torch.no_grad():
                for parameter in state.model.parameters():
                    parameter.fill_(1e30)
        return done

    monkeypatch.setattr(TrainStep, "__call__", break_once)
    out = tmp_path / "run"
    start(out, "train.max_nonfinite_steps=3", "train.log_every=1", "train.checkpoint_every=1")
    rollbacks = [event for _, event in events(out) if "rolled back" in event]
    assert "at step 7" in rollbacks[-1] and "to step 3" in rollbacks[-1]
    assert max(tensor.abs().max() for tensor in weights(out).values()) < 10
    assert assert_loads(out).facts["step"] == 8


def test_a_rollback_after_a_resume_is_the_same(start, quiet, tmp_path, poison, monkeypatch):
    """A resumed run rolls back to the checkpoint it started from, if it diverges before the next one."""
    poison |= {10, 11, 12}
    settings = ("train.max_nonfinite_steps=2", "train.log_every=1", "train.checkpoint_every=4", "train.steps=16")
    whole, killed, stopped = (tmp_path / name for name in ("whole", "killed", "stopped"))
    step = TrainingProgress.step

    def copy_then_step(self, number):
        if number == 9:  # what a kill would leave
            shutil.copytree(whole, killed, dirs_exist_ok=True)
        step(self, number)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingProgress, "step", copy_then_step)
        start(whole, *settings)
    with stopped_at(11, monkeypatch):  # amid the trouble
        start(stopped, *settings)
    assert [assert_loads(out).facts["step"] for out in (killed, stopped)] == [8, 11]
    for out in (killed, stopped):
        train(out=out, resume=True, console=quiet)
        assert_same_bits(weights(whole), weights(out))


def test_a_killed_worker_ends_the_run_and_it_can_be_resumed(start, quiet, tmp_path, whole, monkeypatch):
    out, step = tmp_path / "run", TrainingProgress.step

    def kill_a_worker(self, number):
        step(self, number)
        if number == 4:
            os.kill(active_children()[0].pid, signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingProgress, "step", kill_a_worker)
        with pytest.raises(UserError, match=r"signal 9.*data\.workers=1"):
            start(out, "data.workers=2", "train.steps=60")
    assert assert_loads(out).facts["step"] >= 4
    assert not active_children()
    config = (out / "config.toml").read_text()
    assert "steps = 60" in config
    (out / "config.toml").write_text(config.replace("steps = 60", "steps = 8"))
    train(out=out, resume=True, accept_changes=True, console=quiet)
    assert (out / "model.safetensors").is_file()


def test_the_same_command_starts_and_resumes_a_run(start, quiet, tmp_path, whole, monkeypatch, photos):
    out = tmp_path / "run"
    with stopped_at(3, monkeypatch):
        start(out, resume=True)  # there is nothing yet: it starts
    for setting, sentence in (
        ("optimizer.lr=0.5", r"started with optimizer.lr=[\d.e-]+, not 0.5"),
        ("train.batch_size=16", "started with train.batch_size=8, not 16"),
        ("train.ema=0", r"started with train.ema=0\.\d+, not 0"),
        ("augment.flip=false", "started with augment.flip=True, not False"),
    ):
        with pytest.raises(UserError, match=sentence):
            start(out, setting, resume=True)
    with pytest.raises(UserError, match=r"started with data.path="):
        start(out, data=tmp_path, resume=True)
    start(out, resume=True)
    assert_same_bits(whole, weights(out))
    assert start(out, resume=True).scores["n"] == 9  # there is nothing left to do, which is fine for a job script
    with pytest.raises(UserError, match="is finished"):
        train(out=out, resume=True, console=quiet)


def test_changes_of_settings_and_images_can_be_accepted(start, quiet, tmp_path, photos, monkeypatch):
    data, out = tmp_path / "photos", tmp_path / "run"
    shutil.copytree(photos, data)
    with stopped_at(3, monkeypatch):
        start(out, data=data)
    text = (out / "config.toml").read_text()
    (out / "config.toml").write_text(text.replace("steps = 8", "steps = 10"))
    draw(data / "red", (200, 90, 90), 4)
    with pytest.raises(UserError, match="--accept-changes"):
        train(out=out, resume=True, console=quiet)
    (out / "config.toml").write_text(text.replace("steps = 8", "steps = 2"))
    with pytest.raises(UserError, match=r"train\.steps=2 is too few.* 3 steps"):
        train(out=out, resume=True, accept_changes=True, console=quiet)
    (out / "config.toml").write_text(text.replace("steps = 8", "steps = 10"))
    with (tmp_path / "log").open("w") as file:
        train(out=out, resume=True, accept_changes=True, console=Console(file=file, width=300))
    output = (tmp_path / "log").read_text()
    assert "settings changed: train.steps 8 -> 10" in output
    assert "the images have changed since the run was started" in output
    assert assert_loads(out).facts["step"] == 10


def test_gradient_checkpointing_gives_the_same_weights(start, tmp_path, whole):
    start(tmp_path / "run", "train.gradient_checkpointing=true")
    assert_same_bits(whole, weights(tmp_path / "run"))


def test_too_little_memory_gives_a_micro_batch(start, tmp_path, monkeypatch):
    plain = ("model.dropout=0", "train.tensorboard=false")
    start(tmp_path / "whole", *plain)
    with monkeypatch.context() as patch:
        patch.setattr("vitrail.training.memory.available_memory", lambda: 1_160_000)
        with (tmp_path / "log").open("w") as file:
            start(tmp_path / "small", *plain, console=Console(file=file, width=300))
    chosen = read_recipe(str(tmp_path / "small" / "config.toml"))["train"]["micro_batch_size"]
    assert 0 < chosen < 8
    assert f"{chosen} images" in (tmp_path / "log").read_text()
    decisions = {row["what"]: row["value"] for row in assert_loads(tmp_path / "small").facts["decisions"]}
    assert decisions["micro-batch"] == f"{chosen} images"
    assert read_recipe(str(tmp_path / "whole" / "config.toml"))["train"]["micro_batch_size"] == 0
    left, right = weights(tmp_path / "whole"), weights(tmp_path / "small")
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=0, atol=1e-4)
