import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from tests import ranks as processes
from tests.commands.conftest import assert_same_bits, draw, stopped_at, vitrail, weights
from tests.small import SMALL
from vitrail import load
from vitrail.errors import UserError
from vitrail.workflows import train_run as module
from vitrail.workflows.train_run import train

# Everything that could drift: dropout, mixup, crops, flips, averaging, momentum.
RUN = [
    "train.batch_size=8",
    "precision.compute=fp32",
    "train.steps=60",
    "train.ema=0.9",
    "model.dropout=0.1",
    "augment.mixup=0.4",
    "train.checkpoint_every=3",
    "train.log_every=4",
    "train.evaluate_every=20",
]
SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
SETTINGS = [part for assignment in RUN for part in ("--set", assignment)]

pytestmark = pytest.mark.slow  # whole runs


def start(tiny):
    return ["--from", tiny, "--recipe", "scratch"]


@pytest.fixture(scope="module")
def reference(photos, tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference") / "run"
    done = vitrail("train", photos, *start(tiny), "--out", folder, *SETTINGS)
    assert done.returncode == 0, done.stderr
    return folder


def test_kill_9_at_random_moments_changes_no_bit(photos, tiny, tmp_path, reference):
    out = tmp_path / "killed"
    chance = random.Random(1)
    kills, arguments = 0, [photos, *start(tiny), "--out", out, *SETTINGS]
    while True:
        launched = processes.start(1, tmp_path, processes.vitrail, "train", *arguments)
        if kills == 4:
            break
        _wait_for_checkpoint(out, launched)
        time.sleep(chance.uniform(0.0, 0.15))
        if not launched.alive:
            break
        launched.kill()
        kills, arguments = kills + 1, ["--resume", "--out", out]
    assert launched.codes() == [0], launched.errors()
    assert kills >= 3, "the run was hardly interrupted: the test shows nothing"
    assert_same_bits(weights(reference), weights(out))


def _wait_for_checkpoint(out, launched):
    """Wait until the running process has written a checkpoint, so that every start makes progress."""
    before = set((out / "checkpoints").glob("step_*"))
    deadline = time.monotonic() + 60
    while launched.alive and time.monotonic() < deadline:
        if set((out / "checkpoints").glob("step_*")) - before:
            return
        time.sleep(0.01)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_saves_prints_how_to_resume_and_loses_nothing(photos, tiny, tmp_path, reference, number):
    out = tmp_path / "stopped"
    arguments = [photos, *start(tiny), "--out", out, *SETTINGS]
    launched = processes.start(1, tmp_path, processes.vitrail, "train", *arguments)
    _wait_for_checkpoint(out, launched)
    launched.signal(number)
    assert launched.codes() == [128 + number], launched.output()
    assert launched.errors() == f"stopped and saved; resume with: vitrail train --resume --out {out}\n"
    done = vitrail("train", "--resume", "--out", out)
    assert done.returncode == 0, done.stderr
    assert "from step" in done.stdout
    assert_same_bits(weights(reference), weights(out))


def test_a_run_whose_terminal_is_closed_is_saved(photos, tiny, tmp_path, reference):
    """By then, its live line can no longer be written."""
    out, (ours, theirs) = tmp_path / "closed", os.openpty()
    command = [sys.executable, "-m", "vitrail", "train", photos, *start(tiny), "--out", out, *SETTINGS]
    take_terminal = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    launch = [sys.executable, "-c", take_terminal + "os.execv(sys.argv[1], sys.argv[1:])", *map(str, command)]
    launched = subprocess.Popen(launch, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    received = b""
    while not list((out / "checkpoints").glob("step_*[1-9].safetensors")):
        received += os.read(ours, 4096)  # else it waits for room to write
    os.close(ours)
    assert launched.wait(60) == 128 + signal.SIGHUP, received
    done = vitrail("train", "--resume", "--out", out)
    assert done.returncode == 0, done.stderr
    assert "from step" in done.stdout
    assert_same_bits(weights(reference), weights(out))


def _unheard(output, *arguments):
    if output == "disk full":
        os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
    else:
        reader, writer = os.pipe()
        os.dup2(writer, 1)
        os.close(reader)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 -- one that knows what is behind it
    processes.vitrail(*arguments)


@pytest.mark.parametrize("output", ["reader gone", "disk full"])
def test_a_run_without_output_continues(photos, tiny, tmp_path, reference, output):
    out = tmp_path / "unheard"
    command = ["train", photos, *start(tiny), "--out", out, *SETTINGS]
    launched = processes.start(1, tmp_path, _unheard, output, *command)
    assert launched.codes(120) == [0], launched.errors()
    assert launched.errors() == "" == launched.output()
    assert_same_bits(weights(reference), weights(out))


OTHERS = [pytest.param(number, marks=pytest.mark.full) for number in SIGNALS[1:]]


@pytest.mark.parametrize("number", [signal.SIGINT, *OTHERS])
def test_a_signal_that_also_ends_the_reader_of_the_output(photos, tiny, tmp_path, number):
    """`vitrail train ... 2>&1 | tee log`, where Ctrl-C ends tee at once."""
    out = tmp_path / "piped"
    command = [sys.executable, "-m", "vitrail", "train", photos, *start(tiny), "--out", out, *SETTINGS]
    launched = subprocess.Popen(map(str, command), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    while not list((out / "checkpoints").glob("step_*[1-9].safetensors")):
        assert launched.poll() is None
        time.sleep(0.01)
    launched.stdout.close()
    launched.send_signal(number)
    assert launched.wait(60) == 128 + number
    done = vitrail("train", "--resume", "--out", out)
    assert done.returncode == 0 and "from step" in done.stdout, done.stderr


def _with_two_threads(*arguments):
    torch.set_num_threads(2)
    processes.vitrail(*arguments)


def test_another_number_of_threads_stays_within_a_stated_tolerance(photos, tiny, tmp_path, reference):
    """Thread counts change the order of sums: logits agree within 1e-3, not to the bit."""
    words = ["train", photos, *start(tiny), "--out", tmp_path / "two", *SETTINGS]
    launched = processes.start(1, tmp_path, _with_two_threads, *words)
    assert launched.codes() == [0], launched.errors()
    images = sorted(photos.rglob("*.png"))[::5]
    pixels = torch.stack([load(reference).pixels(image) for image in images])
    logits = [load(folder).net(pixels.float() / 127.5 - 1) for folder in (reference, tmp_path / "two")]
    np.testing.assert_allclose(logits[0].numpy(), logits[1].numpy(), atol=1e-3)


@pytest.fixture
def unfinished(photos, tmp_path, quiet, monkeypatch):
    """A run that was stopped by a signal after its fourth step."""
    data = tmp_path / "photos"
    shutil.copytree(photos, data)
    with stopped_at(4, monkeypatch):
        train(data, out=tmp_path / "run", overrides=[*SMALL, "train.steps=10"], console=quiet)
    return data, tmp_path / "run"


def test_resume_refuses_changed_images(unfinished, quiet):
    data, run = unfinished
    original = (data / "red" / "000.png").read_bytes()
    draw(data / "red", (1, 2, 3), 1)
    with pytest.raises(UserError, match=r"images .* have changed .*the number is the same"):
        train(out=run, resume=True, console=quiet)
    (data / "red" / "000.png").write_bytes(original)
    for number in range(5):
        (data / "red" / f"{number:03}.png").unlink()
    with pytest.raises(UserError, match=r"have changed .*: \d+ train, 9 val then, \d+ train, \d val now"):
        train(out=run, resume=True, console=quiet)


@pytest.fixture
def beside(photos, tiny, tmp_path, monkeypatch):
    """Images, weights and recipes in the working directory, with relative paths."""
    shutil.copytree(photos, tmp_path / "photos")
    shutil.copy(tiny, tmp_path / "tiny.safetensors")
    monkeypatch.chdir(tmp_path)
    settings = '[model]\nweights = "tiny.safetensors"\n[data]\npath = "photos"\nworkers = 0\n'
    Path("own.toml").write_text(f'base = "scratch"\n{settings}[train]\nbatch_size = 8\nepochs = 1.5\n')
    return tmp_path


@pytest.mark.parametrize("recipe", ["own.toml", "first/config.toml"])
def test_the_same_command_resumes_with_a_recipe_file(beside, recipe, quiet, monkeypatch):
    if recipe != "own.toml":
        train(recipe="own.toml", out="first", console=quiet)
    with stopped_at(3, monkeypatch):
        train(recipe=recipe, out="run", resume=True, console=quiet)
    assert train(recipe=f"./{recipe}", out="run", resume=True, console=quiet).scores.n == 9
    assert train(recipe=recipe, out="run", resume=True, console=quiet).scores["n"] == 9  # nothing is left to do


def test_another_number_of_epochs_is_refused(beside, quiet, monkeypatch):
    with stopped_at(3, monkeypatch):
        train(recipe="own.toml", out="run", console=quiet)
    typed = {"recipe": "own.toml", "out": "run", "resume": True, "console": quiet}
    sentence = r"started with train.steps=\d+, not \d+: leave"
    with pytest.raises(UserError, match=sentence):
        train(overrides=["train.epochs=4"], **typed)
    text = Path("own.toml").read_text()
    Path("own.toml").write_text(text.replace("epochs = 1.5", "epochs = 3"))
    with pytest.raises(UserError, match=sentence):
        train(**typed)
    train(overrides=["train.epochs=1.5"], **typed)
    with pytest.raises(UserError, match=sentence):  # after its end too
        train(**typed)


def test_a_changed_teacher_is_refused(photos, tmp_path, quiet, monkeypatch):
    settings = [*SMALL, "train.steps=4"]
    train(photos, out=tmp_path / "teacher", overrides=settings, console=quiet)
    settings = [*settings, f"objective.teacher={tmp_path / 'teacher'}"]
    with stopped_at(2, monkeypatch):
        train(photos, out=tmp_path / "run", overrides=settings, console=quiet)
    shutil.copytree(tmp_path / "run", tmp_path / "same")
    train(out=tmp_path / "same", resume=True, console=quiet)
    train(photos, out=tmp_path / "teacher", overwrite=True, overrides=[*SMALL, "train.steps=5"], console=quiet)
    with pytest.raises(UserError, match=r"the teacher, .*, has changed since"):
        train(out=tmp_path / "run", resume=True, console=quiet)
    train(out=tmp_path / "run", resume=True, accept_changes=True, console=quiet)


def test_resume_without_a_folder_takes_the_newest_run_of_the_data(photos, tmp_path, quiet, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = [*SMALL, "train.steps=4"]
    with stopped_at(2, monkeypatch):
        train(photos, resume=True, overrides=settings, console=quiet)
    assert train(photos, resume=True, overrides=settings, console=quiet).folder == Path("runs/photos")
    assert train(photos, overrides=settings, console=quiet).folder == Path("runs/photos-2")
    assert train(f"{photos}/", resume=True, overrides=settings, console=quiet).folder == Path("runs/photos-2")


def test_resume_refuses_an_edited_config(unfinished, quiet):
    _, run = unfinished
    text = (run / "config.toml").read_text()
    (run / "config.toml").write_text(text.replace("split_seed = 0", "split_seed = 1"))
    with pytest.raises(UserError, match=r"config\.toml was changed .*--accept-changes"):
        train(out=run, resume=True, console=quiet)
    (run / "config.toml").write_text(text)
    assert train(out=run, resume=True, console=quiet).scores.n == 9


def test_resume_refuses_other_settings_and_missing_runs(unfinished, quiet, tmp_path):
    data, run = unfinished
    with pytest.raises(UserError, match=r"started with train\.steps=10, not 20: leave"):
        train(data, out=run, resume=True, overrides=["train.steps=20"], console=quiet)
    with pytest.raises(UserError, match=r"vitrail train --resume --out"):
        train(resume=True, console=quiet)
    with pytest.raises(UserError, match="holds no run"):
        train(out=tmp_path / "nowhere", resume=True, console=quiet)
    with pytest.raises(UserError, match="holds an unfinished run"):
        train(data, out=run, console=quiet)


def test_metrics_after_a_resume_have_each_step_once(unfinished, quiet):
    from vitrail.training.progress import read_metrics

    _, run = unfinished
    train(out=run, resume=True, console=quiet)
    steps = [row["step"] for row in read_metrics(run / "metrics.jsonl") if "val_top1" in row]
    assert steps == sorted(set(steps)) and steps[-1] == 10


def test_removed_data_stops_the_run_and_keeps_its_checkpoints(unfinished, quiet, monkeypatch):
    data, run = unfinished
    monkeypatch.setattr("vitrail.data.loader.memory.MAX_CACHE_BYTES", 0)  # as for images that do not fit in memory
    before = sorted((run / "checkpoints").iterdir())
    read_run = module.read_run

    def read_then_remove(*arguments):
        found = read_run(*arguments)
        data.rename(data.with_name("gone"))
        return found

    with monkeypatch.context() as patch:
        patch.setattr(module, "read_run", read_then_remove)
        with pytest.raises(UserError, match=r"can (no longer )?be read .*--resume"):
            train(out=run, resume=True, console=quiet)
    assert sorted((run / "checkpoints").iterdir()) == before
    data.with_name("gone").rename(data)
    assert train(out=run, resume=True, console=quiet).scores.n == 9


def test_a_file_damaged_during_training_is_reported_and_skipped(photos, tmp_path, monkeypatch):
    """The file is truncated after the scan."""
    from rich.console import Console

    data = tmp_path / "photos"
    shutil.copytree(photos, data)
    start = module.prepare_run

    def cut_then_start(plan, *rest):
        name = plan.dataset.splits["train"].name(0)
        (data / name).write_bytes((data / name).read_bytes()[:60])
        return start(plan, *rest)

    monkeypatch.setattr(module, "prepare_run", cut_then_start)
    with (tmp_path / "log").open("w") as file:
        overrides = [*SMALL, "train.steps=6"]
        train(data, out=tmp_path / "run", overrides=overrides, console=Console(file=file, width=200))
    text = (tmp_path / "log").read_text()
    assert text.count("can no longer be read and is skipped") == 1


def test_two_processes_never_share_a_folder(unfinished, quiet):
    """The lock of another process ends with it."""
    data, run = unfinished
    hold = (
        "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX); print('held', flush=True)"
    )
    command = [sys.executable, "-c", f"{hold}; time.sleep(60)", str(run / ".lock")]
    other = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert other.stdout.readline() == "held\n"
    for options in ({"resume": True}, {"data": data, "overwrite": True}):
        with pytest.raises(UserError, match="another process is writing to"):
            train(out=run, console=quiet, **options)
    assert (run / "config.toml").is_file()
    other.kill()
    other.wait()
    assert train(out=run, resume=True, console=quiet).scores.n == 9
    assert not (run / ".lock").exists()
