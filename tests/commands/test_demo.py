"""`vitrail demo`: one network twice, with a bundled network whose Ti is small and few images."""

from __future__ import annotations

import re
import shlex
import shutil
import signal
import sys
from pathlib import Path

import pytest
from rich.console import Console

from tests.commands.conftest import draw
from vitrail.commands.demo import demo, next_commands
from vitrail.config import RunConfig, read_recipe, validate
from vitrail.errors import UserError
from vitrail.interrupt import Interrupted
from vitrail.training.progress import TrainingProgress
from vitrail.weights.bundle import read_card
from vitrail.workflows.network import network_from_weights, new_network

pytestmark = pytest.mark.filterwarnings("ignore:Cyclopts application invoked")


COLOURS = {"blue": (60, 60, 200), "green": (60, 200, 60), "red": (200, 60, 60)}


@pytest.fixture
def few_images(tmp_path, monkeypatch):
    for name, colour in COLOURS.items():
        draw(tmp_path / "few" / "train" / name, colour, 30)
        draw(tmp_path / "few" / "test" / name, tuple(255 - value for value in colour), 10)
    monkeypatch.setattr("vitrail.commands.demo.bundled_images", lambda: tmp_path / "few")


def run(folder, log, **options):
    with log.open("w") as file:
        demo(
            folder,
            overrides=("train.steps=4", "train.batch_size=16", "train.log_every=2", "precision.compute=fp32"),
            console=Console(file=file, width=300),
            **options,
        )
    return log.read_text()


def test_both_runs_have_the_same_network_and_steps(bundled):
    pretrained, scratch = (validate(RunConfig, read_recipe(name), name) for name in ("demo", "demo-scratch"))
    start = read_card(bundled).model
    assert network_from_weights(start, pretrained.model, 10) == new_network(scratch.model, 10)
    assert pretrained.model.weights == "bundled" and not scratch.model.weights
    assert (pretrained.train.steps, pretrained.train.batch_size) == (scratch.train.steps, scratch.train.batch_size)


@pytest.mark.parametrize(
    ("path", "called", "begin"),
    [
        ("/env/bin/vitrail", "/env/bin/vitrail", "vitrail predict "),
        (None, "/env/bin/vitrail", "/env/bin/vitrail predict "),
        (None, "/lib/vitrail/__main__.py", f"{shlex.quote(sys.executable)} -m vitrail predict "),
    ],
)
def test_the_next_commands_run_in_this_shell(path, called, begin, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda _: path)
    monkeypatch.setattr("sys.argv", [called, "demo"])
    assert next_commands(Path("runs/demo"))[0].startswith(begin)


@pytest.mark.slow
def test_the_demo_resumes_compares_and_lists_the_next_commands(bundled, few_images, tmp_path, monkeypatch, typed):
    folder, log = tmp_path / "demo", tmp_path / "log"
    monkeypatch.setattr("sys.argv", ["vitrail"])
    step, seen = TrainingProgress.step, []

    def stop_in_the_second_run(self, number):
        step(self, number)
        seen.append(number)
        if len(seen) == 6:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingProgress, "step", stop_in_the_second_run)
        with pytest.raises(Interrupted, match=r"^stopped; .*resume"):
            run(folder, log)
    assert log.read_text().count("baseline: ") == 2

    text = run(folder, log)
    assert f"the run in {folder / 'pretrained'} is finished" in text
    assert "scratch from step 2 of 4" in text
    assert re.search(r"4 steps \(.*minutes\): [\d.]+ % .*after pre-training, [\d.]+ % from random", text)
    assert re.search(r"-?[\d.]+ points .*McNemar's test.* p = ", text)

    page = (folder / "index.html").read_text()
    assert page.count("<figure") == len(COLOURS) and page.count("data:image/png") == 3 * len(COLOURS)
    assert "1,234 images of other-pictures" in page
    for link in re.findall(r'href="([^"d][^"]*)"', page):
        assert (folder / link).is_file(), link

    commands = [shlex.split(line) for line in text.partition("next:\n")[2].splitlines()]
    assert [words[1] for words in commands] == ["predict", "explain", "train"]
    for name, colour in COLOURS.items():
        draw(tmp_path / "photos" / name, colour, 8)
    monkeypatch.chdir(tmp_path)
    for words in commands:
        words = words[: words.index("photos/") + 1] if "photos/" in words else words
        quick = ["--set", "train.steps=2", "--set", "precision.compute=fp32"] if words[1] == "train" else []
        assert typed(*words[1:], *quick)[0] == 0, words

    before = (folder / "pretrained" / "model.safetensors").stat().st_mtime_ns
    again = run(folder, log, again=True)
    assert "is finished" not in again and (folder / "pretrained" / "model.safetensors").stat().st_mtime_ns > before

    shutil.rmtree(folder / "scratch")
    (folder / "scratch").mkdir()
    (folder / "scratch" / "config.toml").write_text('recipe = "scratch"')
    with pytest.raises(UserError, match="scratch holds another run"):
        run(folder, log, again=True)
