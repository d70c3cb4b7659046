"""The run folder: only files of vitrail are replaced or removed; a run that cannot continue ends with an error."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console

from tests import ranks as processes
from tests.commands.conftest import weights
from tests.lock.data import OLD
from vitrail.commands.check import check
from vitrail.commands.demo import demo
from vitrail.commands.evaluate import evaluate
from vitrail.commands.explain import explain
from vitrail.commands.pack import pack
from vitrail.data import scan
from vitrail.data.loader import workers
from vitrail.errors import UserError
from vitrail.interrupt import Interrupted
from vitrail.training import state, trainer
from vitrail.training.checkpoint import CheckpointManager
from vitrail.training.progress import TrainingProgress
from vitrail.weights.bundle import read_bundle, read_card, replace_card
from vitrail.weights.formats import format_named
from vitrail.weights.output_path import free_output_path, staged_output
from vitrail.workflows import finish, linear_probe
from vitrail.workflows.run_folder import check_output_folder, lock_run_folder, move_into_place
from vitrail.workflows.train_run import train

SETTINGS = (
    "precision.compute=fp32",
    "data.workers=0",
    "train.batch_size=8",
    "train.steps=4",
    "train.log_every=1",
    "train.checkpoint_every=2",
)


@pytest.fixture
def start(photos, tiny, quiet):
    def begin(out, *settings, data=photos, from_=tiny, recipe="scratch", **options):
        own = SETTINGS if recipe == "scratch" else SETTINGS[1:2]
        return train(data, from_=from_, recipe=recipe, out=out, overrides=[*own, *settings], console=quiet, **options)

    return begin


@pytest.fixture(scope="module")
def finished(photos, tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished") / "run"
    options = {"overrides": SETTINGS, "console": Console(quiet=True)}
    train(photos, from_=tiny, recipe="scratch", out=folder, **options)
    return folder


@pytest.fixture
def run(finished, tmp_path):
    return Path(shutil.copytree(finished, tmp_path / "run"))


def contents(folder: Path) -> dict[str, object]:
    return {
        str(path.relative_to(folder)): path.readlink() if path.is_symlink() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


def table(path: Path, photos: Path) -> Path:
    rows = [f"{image},{image.parent.name}" for image in sorted(photos.rglob("*.png"))]
    path.write_text("\n".join(["path,label", *rows]) + "\n")
    return path


@pytest.mark.slow
def test_predictions_under_their_former_name_are_replaced(run, photos, tmp_path, quiet, finished):
    """By a new run, by the end of a run that an earlier version started, and by an evaluation."""
    old = (OLD / "run" / "answers.csv").read_bytes()
    (run / "answers.csv").write_bytes(old)
    for name in ("model.safetensors", "predictions.csv"):
        (run / name).unlink()
    train(out=run, resume=True, console=quiet)
    assert (run / "predictions.csv").is_file() and not (run / "answers.csv").exists()
    (run / "answers.csv").write_bytes(old)
    for name in ("page-answers.csv", "other-answers.csv"):
        (tmp_path / name).write_bytes(old)
    (tmp_path / "mine-answers.csv").write_text("name,answer\n1,2\n")
    for page in ("page", "mine"):
        evaluate(run, photos, report=tmp_path / f"{page}.html", console=quiet)
    assert sorted(path.name for path in tmp_path.glob("*-answers.csv")) == ["mine-answers.csv", "other-answers.csv"]
    train(photos, from_=finished, recipe="scratch", out=run, overrides=SETTINGS, overwrite=True, console=quiet)
    assert (run / "predictions.csv").is_file() and not (run / "answers.csv").exists()


# ---- what --overwrite removes


@pytest.mark.parametrize("what", ["images", "table", "weights", "weights file", "list", "packed"])
def test_files_that_a_run_reads_are_not_overwritten(start, run, photos, what, quiet):
    options: dict[str, object] = {"overwrite": True}
    if what == "images":
        for name in ("red", "green", "blue"):
            shutil.copytree(photos / name, run / "checkpoints" / name)
        options["data"] = run / "checkpoints"
    elif what == "table":
        options["data"] = table(run / "predictions.csv", photos)
    elif what == "packed":
        pack(photos, run.with_name("packed"), console=quiet)
        run = run.with_name("packed")
        options["data"] = run
    elif what == "list":
        (run / "predictions.csv").write_text("name,digest,reason\n")
        options["quarantine"] = run / "predictions.csv"
    else:
        options["from_"] = run if what == "weights" else run / "model.safetensors"
    before = contents(run)
    with pytest.raises(UserError):
        start(run, **options)
    assert contents(run) == before


@pytest.mark.parametrize("name", ["predictions.csv", "config.toml", "metrics.jsonl", "model_card.md", "report.html",
                                  "curves.svg", "model.safetensors", "checkpoints/step_000000007.safetensors",
                                  "tensorboard"])  # fmt: skip
def test_a_file_of_the_user_with_a_name_of_vitrail_stays(run, name):
    check_output_folder(run, overwrite=True)
    path = run / name
    path.unlink(missing_ok=True)
    path.write_text('recipe = "scratch"\n')
    before = contents(run)
    for overwrite, again in ((True, False), (False, True), (False, False)):
        with pytest.raises(UserError):
            check_output_folder(run, overwrite, again)
    assert contents(run) == before


@pytest.mark.slow
def test_overwriting_removes_files_of_a_run_and_links_but_not_their_targets(start, run, tmp_path):
    mine = ["notes.txt", "checkpoints/best.pt", "checkpoints/old/step_000000001.safetensors", "tensorboard/mine.txt",
            "tensorboard/events.out.tfevents.1.host.2.0", "figures/a.png"]  # fmt: skip
    for name in mine:
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_text(name)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "step_000000001.safetensors").write_text("mine")
    for name in ("report.html", "curves.svg", "checkpoints/step_000000009.safetensors"):
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(outside / "step_000000001.safetensors")
    (run / ".vitrail-new").symlink_to(outside)
    left = run / "checkpoints" / ".step_000000003.safetensors.0123abcd.partial"
    left.write_text("what a killed process left")
    before = {path.name for path in (run / "checkpoints").glob("step_*")}
    start(run, "train.steps=3", "train.tensorboard=true", overwrite=True)
    assert [(run / name).read_text() for name in mine] == mine
    assert contents(outside) == {"step_000000001.safetensors": b"mine"}
    assert not any(path.is_symlink() for path in run.rglob("*"))
    now = {path.name for path in (run / "checkpoints").glob("step_*")}
    assert before >= {"step_000000004.safetensors"} and "step_000000004.safetensors" not in now
    assert not left.exists() and not (run / ".vitrail-new").exists()
    events = set((run / "tensorboard").glob("*.vitrail"))
    assert events
    start(run, "train.steps=3", "train.tensorboard=true", overwrite=True)
    assert not events & set((run / "tensorboard").glob("*.vitrail"))
    assert [(run / name).read_text() for name in mine] == mine


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["by an error", "by a signal", "in the last write of a probe"])
def test_a_finished_run_stays_until_another_has_saved(start, run, monkeypatch, ends):
    before = contents(run)

    def fail(*_: object) -> None:
        if ends == "by a signal":
            signal.raise_signal(signal.SIGTERM)
        raise UserError("no room")

    probe = ends == "in the last write of a probe"
    with monkeypatch.context() as patch:
        patch.setattr(*((finish, "write_bundle") if probe else (CheckpointManager, "save")), fail)
        if ends == "by a signal":
            patch.setattr(trainer, "build_train_state", fail)
        with pytest.raises(Interrupted if ends == "by a signal" else UserError) as failed:
            start(run, recipe="probe" if probe else "scratch", overwrite=True)
    assert "resume" not in str(failed.value)
    assert contents(run) == before
    start(run, *(["train.seed=3"] if not probe else []), recipe="probe" if probe else "scratch", overwrite=True)
    assert contents(run)["model.safetensors"] != before["model.safetensors"]


@pytest.mark.slow
def test_a_finished_run_is_kept_until_the_next_is_finished(start, run, photos, monkeypatch):
    """A new run that diverges, is stopped or cannot write leaves the old one complete, even after a checkpoint."""
    before = {name: value for name, value in contents(run).items() if name != ".lock"}
    with pytest.raises(UserError):
        start(run, "optimizer.lr=1e30", "train.max_nonfinite_steps=1", "train.max_rollbacks=0", overwrite=True)
    old = run / ".vitrail-old"
    assert {name: value for name, value in contents(old).items() if name != ".lock"} == before
    with pytest.raises(UserError), monkeypatch.context() as patch:  # the next one fails as well
        patch.setattr(trainer, "TrainStep", lambda *_: _fails())
        start(run, overwrite=True)
    assert (old / "model.safetensors").read_bytes() == before["model.safetensors"]
    start(run, overwrite=True)
    assert not old.exists() and not (run / ".vitrail-new").exists() and (run / "model.safetensors").is_file()


def _fails() -> None:
    raise UserError("it fails")


@pytest.mark.parametrize("fails_at", [1, 4, 8])
def test_a_run_that_cannot_be_moved_stays_where_it_was(run, monkeypatch, fails_at):
    (run / ".vitrail-new/checkpoints").mkdir(parents=True)
    for name in ("config.toml", "metrics.jsonl", "checkpoints/step_000000000.safetensors"):
        origin = next((run / "checkpoints").iterdir()) if "/" in name else run / name
        shutil.copy(origin, run / ".vitrail-new" / name)
    before, moved, replace = contents(run), [], Path.replace

    def move(path: Path, target: Path) -> Path:
        moved.append(path)
        if len(moved) == fails_at:
            raise OSError(5, "Input/output error")
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", move)
    with pytest.raises(UserError, match="Input/output error"):
        move_into_place(run)
    monkeypatch.undo()
    kept = {name: value for name, value in contents(run).items() if not name.startswith(".vitrail-old")}
    assert kept == before
    assert move_into_place(run) and contents(run / ".vitrail-old")["model.safetensors"] == before["model.safetensors"]


@pytest.mark.parametrize(("name", "text"), [
    ("metrics.jsonl", '{"step": 1, "tool": "another"}\n'), ("metrics.jsonl", '{"notes": 1}'),
    ("excluded.csv", "name,reason\r\na.jpg,blurred\r\n"),
    ("predictions.csv", "name,label,prediction,probability,label_probability,suggested_label\r\n"),
])  # fmt: skip
def test_file_names_of_other_programs_belong_to_vitrail_only_in_a_run(tmp_path, name, text):
    (tmp_path / name).write_bytes(text.encode())
    with pytest.raises(UserError, match="was not written by vitrail"):
        check_output_folder(tmp_path, overwrite=True)


def test_a_table_with_another_column_is_not_replaced(run):
    text = (run / "predictions.csv").read_text().replace("suggested_label", "suggested_label,my review", 1)
    (run / "predictions.csv").write_text(text)
    with pytest.raises(UserError, match="was not written by vitrail"):
        check_output_folder(run, overwrite=True)


def test_the_recipe_of_a_run_is_not_overwritten(start, run):
    text = (run / "config.toml").read_text()
    with pytest.raises(UserError, match="holds the recipe"):
        start(run, recipe=str(run / "config.toml"), overwrite=True)
    assert (run / "config.toml").read_text() == text


def test_a_new_card_keeps_the_mode_of_a_file_and_links_to_it(run, tmp_path):
    path, link = run / "model.safetensors", tmp_path / "link.safetensors"
    path.chmod(0o600)
    link.symlink_to(path)
    card = read_card(path)
    replace_card(link, card.model_copy(update={"licence": "other"}))
    assert link.is_symlink() and read_card(path).licence == "other"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.slow
def test_a_finished_run_survives_a_kill_before_the_next_has_saved(start, run, tmp_path, photos, tiny):
    before = contents(run)
    assert processes.start(1, tmp_path, _killed_at_first_save, run, photos, tiny).codes() == [-signal.SIGKILL]
    now = contents(run)
    assert {name: now[name] for name in before} == before
    start(run, overwrite=True)
    assert not (run / ".vitrail-new").exists() and (run / "model.safetensors").is_file()


def _killed_at_first_save(run: Path, photos: Path, tiny: Path) -> None:
    save = CheckpointManager.save

    def save_then_die(self: CheckpointManager, *values: object) -> None:
        save(self, *values)  # type: ignore[arg-type]
        os.kill(os.getpid(), signal.SIGKILL)

    CheckpointManager.save = save_then_die  # type: ignore[method-assign, assignment]
    train(photos, from_=tiny, recipe="scratch", out=run, overrides=SETTINGS, overwrite=True)


# ---- links and other files that somebody prepared


def test_a_lock_that_is_a_link_or_not_empty_is_not_changed(run, tmp_path):
    target = tmp_path / "precious.txt"
    target.write_text("all my work")
    (run / ".lock").symlink_to(target)
    with pytest.raises(UserError, match="link"), lock_run_folder(run):
        pass
    assert target.read_text() == "all my work" and (run / ".lock").is_symlink()
    (run / ".lock").unlink()
    (run / ".lock").write_text("of another program")
    with lock_run_folder(run):
        pass
    assert (run / ".lock").read_text() == "of another program"


def test_a_lock_that_is_a_pipe_does_not_block(run):
    os.mkfifo(run / ".lock")
    with pytest.raises(UserError, match="regular"), lock_run_folder(run):
        pass


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoints", "tensorboard", "tensorboard/events.x", "config.toml"])
def test_a_run_does_not_resume_through_a_link(run, tmp_path, name, quiet):
    (run / "model.safetensors").unlink()  # as if it had been stopped before the end
    (run / name).parent.mkdir(exist_ok=True)
    target = tmp_path / "target"
    if (run / name).exists():
        shutil.move(run / name, target)
    else:
        target.mkdir()
    (run / name).symlink_to(target)
    before = contents(tmp_path)
    with pytest.raises(UserError, match="link"):
        train(out=run, resume=True, console=quiet)
    assert contents(tmp_path) == before


def test_check_keeps_an_edited_list_and_pages_of_the_user(photos, tmp_path, quiet):
    out = tmp_path / "checked"
    for _ in range(2):
        check(photos, out=out, console=quiet)
    listed = out / "quarantine.csv"
    as_written = listed.read_bytes()
    listed.write_text("name,digest,reason\nred/000.png,,blurred\n")
    with pytest.raises(UserError, match=r"quarantine\.csv"):
        check(photos, out=out, console=quiet)
    assert "blurred" in listed.read_text()
    listed.write_bytes(as_written)
    (out / "report.html").write_text("<h1>mine</h1>")
    with pytest.raises(UserError, match=r"report\.html"):
        check(photos, out=out, console=quiet)
    assert (out / "report.html").read_text() == "<h1>mine</h1>"


@pytest.mark.slow
def test_commands_replace_no_page_or_table_of_the_user(run, photos, tmp_path, quiet):
    mine = table(tmp_path / "labels.csv", photos)
    before = mine.read_bytes()
    with pytest.raises(UserError, match=r"labels\.csv"):
        evaluate(run, mine, report=mine, console=quiet)
    shutil.copy(mine, tmp_path / "page-predictions.csv")
    with pytest.raises(UserError, match=r"page-predictions\.csv"):
        evaluate(run, photos, report=tmp_path / "page.html", console=quiet)
    assert mine.read_bytes() == before == (tmp_path / "page-predictions.csv").read_bytes()
    site = tmp_path / "site"
    site.mkdir()
    (site / "index.html").write_text("mine")
    with pytest.raises(UserError, match=r"index\.html"):
        demo(site, console=quiet)
    (site / "explain.html").write_text("mine")
    with pytest.raises(UserError, match=r"explain\.html"):
        explain(run, out=site, console=quiet)
    (site / "explain.html").unlink()
    (site / "figures").mkdir()
    (site / "figures" / "filters.png").write_text("mine")
    with pytest.raises(UserError, match=r"filters\.png"):
        explain(run, out=site, console=quiet)
    shutil.move(site / "figures", tmp_path / "figures")
    (site / "figures").symlink_to(tmp_path / "figures")
    with pytest.raises(UserError, match="figures"):
        explain(run, out=site, console=quiet)
    assert contents(tmp_path / "figures") == {"filters.png": b"mine"}
    assert {path.name for path in site.iterdir()} == {"index.html", "figures"}


def test_convert_refuses_a_folder_as_output_file(tmp_path):
    (tmp_path / "model" / "config.json").mkdir(parents=True)
    (tmp_path / "model" / "config.json" / "photo.png").touch()
    with pytest.raises(UserError, match="was not written by vitrail"):
        free_output_path("elsewhere", str(tmp_path / "model"), "timm", True)


# ---- a folder that is removed while its run is at work


@pytest.fixture
def at_step(monkeypatch):
    """Do something after a step."""

    def patch(step: int, do: Callable[[], object]) -> None:
        shown = TrainingProgress.step

        def stepped(self: TrainingProgress, number: int) -> None:
            shown(self, number)
            if number == step:
                do()

        monkeypatch.setattr(TrainingProgress, "step", stepped)

    return patch


@pytest.mark.slow
@pytest.mark.parametrize("then", ["it is logged", "it is saved", "a signal", "another run begins there"])
def test_a_removed_folder_ends_the_run_with_an_error_that_nothing_is_saved(start, tmp_path, at_step, then):
    out = tmp_path / "run"

    def remove() -> None:
        shutil.rmtree(out)
        if then == "a signal":
            signal.raise_signal(signal.SIGTERM)
        if then == "another run begins there":
            out.mkdir()
            (out / "config.toml").write_text("another")
            (out / ".lock").touch()

    at_step(1, remove)
    never = () if then == "it is logged" else ("train.log_every=4",)
    with pytest.raises(UserError, match=f"{out} was (removed|deleted)"):
        start(out, *never)
    if then == "another run begins there":
        assert set(contents(out)) == {"config.toml", ".lock"}
    else:
        assert not out.exists()


@pytest.mark.slow
def test_removed_checkpoints_are_written_again(start, tmp_path, at_step, quiet, finished):
    out = tmp_path / "run"

    def remove() -> None:
        shutil.rmtree(out / "checkpoints")
        signal.raise_signal(signal.SIGTERM)

    at_step(3, remove)
    with pytest.raises(Interrupted, match="and saved; resume with"):
        start(out)
    assert [step for step, _ in CheckpointManager(out / "checkpoints", 1).steps()] == [3]
    train(out=out, resume=True, console=quiet)
    ours, theirs = weights(out), weights(finished)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["run", "run, then a signal", "checkpoints, then a signal"])
def test_files_removed_before_the_last_write(start, tmp_path, monkeypatch, what):
    out, measure = tmp_path / "run", finish.measure

    def remove_then_measure(*values: object, **options: object) -> object:
        shutil.rmtree(out / "checkpoints" if what.startswith("checkpoints") else out)
        if "signal" in what:
            signal.raise_signal(signal.SIGTERM)
        return measure(*values, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(finish, "measure", remove_then_measure)
    with pytest.raises((UserError, Interrupted)) as failed:
        start(out)
    assert isinstance(failed.value, Interrupted) == ("signal" in what)
    assert "removed" in str(failed.value) and "go on" not in str(failed.value)
    assert out.exists() == what.startswith("checkpoints")


# ---- signals while there is nothing to save


def signalled(launched: processes.Started, number: int, begun: Path) -> float:
    """Seconds until the processes ended after a signal to each of them, workers too."""
    deadline = time.monotonic() + 60
    while not begun.exists() and launched.alive and time.monotonic() < deadline:
        time.sleep(0.01)
    assert begun.exists(), launched.errors()
    since = time.monotonic()
    (pid,) = (process.pid for process in launched.processes)
    children = Path(f"/proc/{pid}/task/{pid}/children")
    for one in [pid, *(children.read_text().split() if children.exists() else [])]:
        os.kill(int(one), number)
    launched.processes[0].join(20)
    return time.monotonic() - since


def _slow(where: str, begun: Path, *arguments: object) -> None:
    """A command whose scan, probe, first step or workers take long."""

    def sleep(*_: object, **__: object) -> None:
        begun.touch()
        time.sleep(5)

    def then(call: Callable[..., object]) -> Callable[..., object]:
        def slowed(*values: object, **options: object) -> object:
            sleep()
            return call(*values, **options)

        return slowed

    place, name = {
        "scan": (scan, "scan_image"),
        "check": (scan, "scan_image"),
        "probe": (linear_probe, "fit_probe"),
        "workers": (workers, "_serve"),
        "optimizer": (state, "build_optimizer"),
        "first step": (trainer.TrainStep, "__call__"),
        "measurement": (finish, "measure"),
    }[where]
    setattr(place, name, then(getattr(place, name)))
    processes.vitrail(*arguments)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "number"),
    [("scan", signal.SIGTERM), ("scan", signal.SIGINT), ("check", signal.SIGTERM), ("probe", signal.SIGTERM),
     ("workers", signal.SIGINT), ("workers", signal.SIGTERM), ("optimizer", signal.SIGTERM),
     ("first step", signal.SIGTERM), ("measurement", signal.SIGTERM)],
)  # fmt: skip
def test_a_signal_stops_at_once_if_nothing_has_to_be_saved(photos, tiny, tmp_path, where, number):
    out, data = tmp_path / "run", tmp_path / "photos"
    shutil.copytree(photos, data)  # which no scan has seen
    settings = [*SETTINGS, "data.workers=2", "data.cache=none"] if where == "workers" else SETTINGS
    words = ["train", data, "--from", tiny, "--recipe", "scratch", "--out", out]
    words += [word for setting in settings for word in ("--set", setting)]
    if where == "check":
        words = ["check", data, "--out", out]
    launched = processes.start(1, tmp_path, _slow, where, tmp_path / "begun", *words)
    seconds = signalled(launched, number, tmp_path / "begun")
    assert launched.codes() == [128 + number], launched.errors()
    assert seconds < 2
    errors = launched.errors()
    assert errors.startswith("stopped") and errors.count("\n") == 1, errors
    saved = where in ("first step", "measurement")
    assert ("saved; resume with" in errors) == saved
    assert bool(CheckpointManager(out / "checkpoints", 1).steps()) == saved
    assert saved or not out.exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_the_import_of_modules(tmp_path, number, photos):
    """Instead of torch, import a slow module that catches every exception."""
    slow = "import pathlib, time\npathlib.Path('begun').touch()\ntry:\n    time.sleep(20)\nexcept BaseException: pass\n"
    (tmp_path / "torch.py").write_text(f"{slow}raise ImportError('no torch')\n")
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path, str(root)])}
    command = [sys.executable, "-m", "vitrail", "train", str(photos)]
    launched = subprocess.Popen(command, env=environment, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (tmp_path / "begun").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    since = time.monotonic()
    launched.send_signal(number)
    assert launched.wait(20) == 128 + number
    assert time.monotonic() - since < 2
    assert launched.stderr is not None and launched.stderr.read() == "stopped\n"


# ---- the user's umask


@pytest.mark.slow
@pytest.mark.parametrize("mask", [0o022, 0o027])
def test_files_are_written_with_the_users_umask(start, photos, tiny, tmp_path, quiet, mask, monkeypatch):
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    before = os.umask(mask)
    try:
        start(tmp_path / "run", "train.tensorboard=true")
        pack(photos, tmp_path / "packed", resize=16, console=quiet)
        check(photos, out=tmp_path / "checked", console=quiet)
        evaluate(tmp_path / "run", photos, report=tmp_path / "page.html", write=True, console=quiet)
        monkeypatch.undo()  # pictures are drawn
        explain(tmp_path / "run", out=tmp_path / "explained", console=quiet)
        card, state = read_bundle(tmp_path / "run" / "model.safetensors")
        for to, name in (("timm", "timm"), ("huggingface", "hf"), ("google", "g.npz"), ("vitrail", "v.safetensors")):
            with staged_output(tmp_path / name, format_named(to).folder) as place:
                format_named(to).write(place, format_named(to).adopt_constants(card), state)
    finally:
        os.umask(before)
    written = [path for path in tmp_path.rglob("*") if not path.is_dir()]
    modes = {str(path.relative_to(tmp_path)): stat.S_IMODE(path.stat().st_mode) for path in written}
    assert len(modes) > 25 and set(modes.values()) == {0o666 & ~mask}, modes
    folders = [path for path in tmp_path.rglob("*") if path.is_dir()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in folders} == {0o777 & ~mask}
