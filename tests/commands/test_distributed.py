"""Distributed runs: killed, stopped, restarted, and resumed with another number of processes."""

import contextlib
import csv
import errno
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests import ranks as processes
from tests.commands.conftest import assert_same_bits, weights
from vitrail.data.decode import BadImage
from vitrail.data.loader.loader import BatchDecoder
from vitrail.training import checkpoint
from vitrail.training.checkpoint import CheckpointManager
from vitrail.training.progress import TrainingProgress, read_metrics
from vitrail.training.step import TrainStep
from vitrail.workflows import batches, finish

pytestmark = pytest.mark.slow  # whole runs

# All settings in which processes could disagree. Dropout, whose seed depends on the rank, only where bits are compared.
COMMON = (
    "precision.compute=fp32",
    "data.workers=0",
    "optimizer.clip_grad_norm=1",
    "schedule.warmup=2",
    "train.batch_size=12",
    "train.ema=0.9",
    "augment.mixup=0.4",
    "augment.cutmix=1",
)
EXACT = (
    *COMMON,
    "model.dropout=0.1",
    "train.micro_batch_size=2",
    "train.steps=30",
    "train.checkpoint_every=2",
    "train.log_every=5",
    "train.evaluate_every=15",
)


def arguments(data, tiny, out, *settings):
    options = [part for setting in settings for part in ("--set", setting)]
    return ["train", data, "--from", tiny, "--recipe", "scratch", "--out", out, *options]


def resume(out):
    return ["train", "--resume", "--out", out]


def vitrail(world, folder, command, timeout=90):
    """Run a command that must succeed, and return its output."""
    started = processes.start(world, folder, processes.vitrail, *command)
    assert started.codes(timeout) == [0] * world, started.errors()
    assert not started.errors()
    return started.output()


KINDS = {
    "one": (1, ()),
    "one, muon": (1, ("optimizer.name=muon",)),
    "ddp": (2, ("train.parallel=ddp",)),
    "fsdp": (2, ("train.parallel=fsdp",)),
    "three": (3, ("train.parallel=ddp",)),  # gradients are summed in a fixed order
}


@pytest.fixture(scope="session")
def uninterrupted(photos, tiny, tmp_path_factory):
    """A function from a kind to its uninterrupted run, cached."""
    runs = {}

    def folder(kind):
        if kind not in runs:
            runs[kind] = tmp_path_factory.mktemp("whole") / "run"
            world, settings = KINDS[kind]
            vitrail(world, runs[kind].parent, arguments(photos, tiny, runs[kind], *EXACT, *settings))
        return runs[kind]

    return folder


@pytest.mark.parametrize(
    "kind", ["ddp", *(pytest.param(kind, marks=pytest.mark.full) for kind in KINDS if kind != "ddp")]
)
def test_killed_and_resumed_run_is_bit_identical(photos, tiny, tmp_path, uninterrupted, kind):
    world, settings = KINDS[kind]
    out, kills, chance = tmp_path / "run", 0, random.Random(kind)
    command = arguments(photos, tiny, out, *EXACT, *settings)
    expected = weights(uninterrupted(kind))
    while kills < 2:
        started = processes.start(world, tmp_path, processes.vitrail, *command)
        _wait_for_checkpoint(out, started)
        time.sleep(chance.uniform(0, 0.1))
        assert started.alive, started.errors() or "the run was too short to be killed"
        started.kill()
        kills, command = kills + 1, resume(out)
    assert "from step" in vitrail(world, tmp_path, command)
    assert_same_bits(expected, weights(out))
    steps = [row["step"] for row in read_metrics(out / "metrics.jsonl") if "loss" in row]
    assert steps == list(range(5, 31, 5))


def _wait_for_checkpoint(out, started):
    """Wait until this launch has written a checkpoint, so that every launch makes progress."""
    checkpoints = CheckpointManager(out / "checkpoints", 2)
    before, deadline = checkpoints.steps(), time.monotonic() + 60
    while started.alive and checkpoints.steps() == before and time.monotonic() < deadline:
        time.sleep(0.005)


LIKE_ONE = (*COMMON, "train.steps=50", "train.checkpoint_every=10", "train.log_every=1", "train.evaluate_every=25")


@pytest.fixture(scope="module")
def table(photos, tmp_path_factory):
    """A table of images with sample weights."""
    path = tmp_path_factory.mktemp("weighted") / "images.csv"
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["path", "label", "weight"])
        for number, image in enumerate(sorted(photos.rglob("*.png"))):
            rows.writerow([image, image.parent.name, 0.5 + number % 3])
    return path


def _with_one_unreadable(*command, stop_after=None):
    """Run the command in this process, with one undecodable image. Rank 0 stops after step `stop_after`."""
    pixels, step = BatchDecoder._pixels, TrainingProgress.step

    def broken(self, sample, draws):
        if sample == 3 and draws is not None:
            raise BadImage("it is broken")
        return pixels(self, sample, draws)

    def step_then_stop(self, number):
        step(self, number)
        if number == stop_after and os.environ["RANK"] == "0":
            signal.raise_signal(signal.SIGTERM)

    BatchDecoder._pixels, TrainingProgress.step = broken, step_then_stop
    processes.vitrail(*command)


def _stopped_after(step, *command):
    _with_one_unreadable(*command, stop_after=step)


@pytest.fixture(scope="module")
def single_process(table, tiny, tmp_path_factory):
    """The run of one process, without gradient accumulation."""
    out = tmp_path_factory.mktemp("single_process") / "run"
    command = arguments(table, tiny, out, *LIKE_ONE, "train.micro_batch_size=12")
    started = processes.start(1, out.parent, _with_one_unreadable, *command)
    assert started.codes() == [0], started.errors()
    assert started.output().count("can no longer be read and is skipped") == 1
    return out


def assert_close(folder, single_process):
    """Compare losses, validation metrics and the averaged weights, with float tolerance."""
    rows, expected = (read_metrics(run / "metrics.jsonl") for run in (folder, single_process))
    for key in ("loss", "val_loss", "accuracy", "grad_norm"):
        left, right = (torch.tensor([row[key] for row in history if key in row]) for history in (rows, expected))
        torch.testing.assert_close(left, right, rtol=2e-4, atol=1e-5)
    actual, expected = weights(folder), weights(single_process)
    assert actual.keys() == expected.keys()
    for name in actual:
        torch.testing.assert_close(actual[name], expected[name], rtol=0, atol=5e-5)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_match_one(table, tiny, tmp_path, single_process, parallel):
    """Fifty steps with mixup, cutmix, gradient accumulation, clipping, averaging, sample weights and a broken image."""
    command = arguments(
        table, tiny, tmp_path / "run", *LIKE_ONE, "train.micro_batch_size=4", f"train.parallel={parallel}"
    )
    started = processes.start(2, tmp_path, _with_one_unreadable, *command)
    assert started.codes() == [0, 0], started.errors()
    assert_close(tmp_path / "run", single_process)


@pytest.mark.parametrize(
    ("parallel", "worlds"), [("ddp", (2, 1, 2)), pytest.param("fsdp", (2, 1, 3), marks=pytest.mark.full)]
)
def test_resume_with_another_number_of_processes(table, tiny, tmp_path, single_process, parallel, worlds):
    out, stops = tmp_path / "run", iter((13, 31))
    command = arguments(table, tiny, out, *LIKE_ONE, "train.micro_batch_size=4", f"train.parallel={parallel}")
    for world in worlds[:-1]:
        stopped = processes.start(world, tmp_path, _stopped_after, next(stops), *command)
        assert stopped.codes() == [128 + signal.SIGTERM] * world, stopped.errors()
        how = "vitrail" if world == 1 else "torchrun ... -m vitrail"
        assert stopped.errors() == f"stopped and saved; resume with: {how} train --resume --out {out}\n"
        command = resume(out)
    last = processes.start(worlds[-1], tmp_path, _with_one_unreadable, *command)
    assert last.codes() == [0] * worlds[-1], last.errors()
    assert "from step 31 of 50" in last.output()
    assert_close(out, single_process)


MOMENTS = {  # object, method and number of the call that the signal interrupts, and the step that is saved
    "step": (TrainStep, "_gradients", 9, 9),
    "evaluation": (batches, "normalise", 16, 15),
    "checkpoint": (checkpoint, "save_file", 4, 7),
    "end": (finish, "measure", 1, 30),
}


def _signalled(moment, which, *command):
    """Run the command in this process; the rank `which`, or "all", gets SIGTERM at `moment`."""
    owner, name, number, _ = MOMENTS[moment]
    original, calls = getattr(owner, name), itertools.count(1)

    def signal_then_call(*values, **options):
        if next(calls) == number and which in ("all", int(os.environ["RANK"])):
            signal.raise_signal(signal.SIGTERM)
        return original(*values, **options)

    setattr(owner, name, signal_then_call)
    processes.vitrail(*command)


@pytest.mark.parametrize(
    ("moment", "kind", "which"),
    [
        ("step", "fsdp", 1),
        ("evaluation", "ddp", 1),
        ("checkpoint", "fsdp", "all"),
        ("end", "ddp", "all"),
    ],
)
def test_signal_saves_once_and_is_reported_once(photos, tiny, tmp_path, uninterrupted, moment, kind, which):
    world, settings = KINDS[kind]
    out = tmp_path / "run"
    command = arguments(photos, tiny, out, *EXACT, *settings)
    stopped = processes.start(world, tmp_path, _signalled, moment, which, *command)
    assert stopped.codes() == [128 + signal.SIGTERM] * world, stopped.errors()
    assert stopped.errors() == f"stopped and saved; resume with: torchrun ... -m vitrail train --resume --out {out}\n"
    assert CheckpointManager(out / "checkpoints", 2).steps()[-1][0] == MOMENTS[moment][3]
    vitrail(world, tmp_path, resume(out))
    assert_same_bits(weights(uninterrupted(kind)), weights(out))


def _signalled_on_separate_machines(*command):
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    _signalled("step", 1, *command)


def test_machines_stop_at_a_logged_step(photos, tiny, tmp_path, uninterrupted):
    """With one process per machine, ranks agree on stopping only at logged steps, to save communication."""
    out = tmp_path / "run"
    command = arguments(photos, tiny, out, *EXACT, "train.parallel=ddp")
    stopped = processes.start(2, tmp_path, _signalled_on_separate_machines, *command)
    assert stopped.codes() == [128 + signal.SIGTERM] * 2, stopped.errors()
    assert CheckpointManager(out / "checkpoints", 2).steps()[-1][0] == 10  # the signal came in step 9
    vitrail(2, tmp_path, resume(out))
    assert_same_bits(weights(uninterrupted("ddp")), weights(out))


@contextlib.contextmanager
def torchrun(*command):
    """Start torchrun as a user does, on a free port (`--standalone`), and kill all its processes at the end."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    started = subprocess.Popen(
        [*launcher, "--monitor-interval", "0.1", *map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield started
    finally:
        for number in (*_children(started.pid), started.pid) if started.poll() is None else ():
            os.kill(number, signal.SIGKILL)
        started.wait()


def test_signal_to_torchrun_and_its_processes(photos, tiny, tmp_path, uninterrupted):
    """As on a cluster: every process gets the signal, and torchrun forwards its own."""
    out = tmp_path / "run"
    with torchrun("-m", "vitrail", *arguments(photos, tiny, out, *EXACT, "train.parallel=ddp")) as started:
        while started.poll() is None and not list((out / "checkpoints").glob("step_000000004*")):
            time.sleep(0.005)
        for number in (*_children(started.pid), started.pid):
            os.kill(number, signal.SIGTERM)
        _, errors = started.communicate(timeout=60)
    assert started.returncode != 0
    assert errors.count(f"stopped and saved; resume with: torchrun ... -m vitrail train --resume --out {out}\n") == 1, (
        errors
    )
    assert "from step" in vitrail(2, tmp_path, resume(out))
    assert_same_bits(weights(uninterrupted("ddp")), weights(out))


def _children(parent):
    children = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                    children.append(int(entry.name))
    return children


DIES_ONCE = """
import os, signal
from vitrail.cli.main import main
from vitrail.training.progress import TrainingProgress
step = TrainingProgress.step

def step_or_die(self, number):
    step(self, number)
    if number == 7 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)

TrainingProgress.step = step_or_die
main()
"""


@pytest.mark.full
def test_run_resumes_when_torchrun_restarts_a_killed_process(photos, tiny, tmp_path, uninterrupted):
    out, script = tmp_path / "run", tmp_path / "dies_once.py"
    script.write_text(DIES_ONCE)
    command = arguments(photos, tiny, out, *EXACT, "train.parallel=fsdp")
    with torchrun("--max-restarts", "2", script, *command) as started:
        output, errors = started.communicate(timeout=90)
    assert started.returncode == 0, errors
    assert output.count("from step 6 of 30") == 1, output
    assert_same_bits(weights(uninterrupted("fsdp")), weights(out))


def test_user_errors_are_reported_once(photos, tiny, tmp_path):
    for command, message in (
        (["train", tmp_path / "nowhere"], "nowhere"),
        (
            arguments(photos, tiny, tmp_path / "run", "train.batch_size=7"),
            "train.batch_size=7 is not divisible by 2 processes",
        ),
        (arguments(photos, tiny, tmp_path / "x", "optimizer.name=muon", "train.parallel=fsdp"), "train.parallel=ddp"),
        (arguments(photos, tiny, tmp_path / "y", "optimizer.name=mouon"), "optimizer.name"),
    ):
        started = processes.start(2, tmp_path, processes.vitrail, *command)
        assert started.codes() == [2, 2], started.errors()
        assert message in started.errors() and started.errors().count("error:") == 1, started.errors()


def _disk_full_on_rank_1(*command):
    """Run the command in this process. For rank 1, the disk is full from the third checkpoint on."""
    sync, calls = os.fsync, itertools.count()

    def full(number):
        if os.environ["RANK"] == "1" and next(calls) >= 4:  # two calls per file: the file and its folder
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(number)

    os.fsync = full
    processes.vitrail(*command)


def test_full_disk_on_one_rank_ends_all_and_keeps_checkpoints(photos, tiny, tmp_path, uninterrupted):
    out = tmp_path / "run"
    command = arguments(photos, tiny, out, *EXACT, "train.parallel=fsdp")
    started = processes.start(2, tmp_path, _disk_full_on_rank_1, *command)
    assert started.codes() == [2, 2], started.errors()
    assert "No space left on device" in started.errors() and started.errors().count("error:") == 1, started.errors()
    names = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert names == [f"step_{step:09d}.part_{part}_of_2.safetensors" for step in (0, 2) for part in (1, 2)]
    vitrail(2, tmp_path, resume(out))
    assert_same_bits(weights(uninterrupted("fsdp")), weights(out))
