"""Every command and code block of the README and the documentation runs, on small images."""

import os
import re
import runpy
import shlex
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import vitrail as vitrail_module
from tests import ranks as processes
from tests.commands.conftest import draw, vitrail
from tests.small import SMALL

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
EXPLAIN, DEPLOYING, PYTHON = ((ROOT / "docs" / f"{name}.md").read_text() for name in ("explain", "deploying", "python"))
PAGES = README + (ROOT / "docs" / "data.md").read_text() + EXPLAIN + DEPLOYING
COMMANDS = [
    line.removeprefix("$ ")
    for block in re.findall(r"```console\n(.*?)```", PAGES, re.S)
    for line in block.splitlines()
    if line.startswith("$ ")
]
QUICK = [part for setting in (*SMALL, "train.steps=2") for part in ("--set", setting)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the images that the README uses."""
    root = tmp_path_factory.mktemp("readme")
    for name, colour in {"heron": (200, 60, 60), "egret": (60, 60, 200)}.items():
        draw(root / "photos" / name, colour, 8)
        draw(root / "more_photos" / name, colour, 3)
    draw(root, (200, 60, 60), 1)
    (root / "000.png").rename(root / "new.jpg")
    return root


def run_script(folder, code):
    """Run a script and return its output."""
    (folder / "example.py").write_text(code)
    started = processes.start(1, folder, _script, folder)
    assert started.codes() == [0], started.errors()
    return started.output()


def _script(folder):
    os.chdir(folder)
    runpy.run_path("example.py", run_name="__main__")


@pytest.mark.slow
def test_every_command_runs(folder, monkeypatch):
    monkeypatch.setenv(processes.NO_PLOTS, "1")
    offline = [c for c in COMMANDS if "hf-hub:" not in c and c.startswith("vitrail ")]
    assert len(offline) >= 4
    for command in offline:
        words = shlex.split(re.sub(r"train\.steps=\d+", "train.steps=3", command))
        training = words[1] == "train"
        few = ["--set", "precision.compute=fp32", "--set", "train.batch_size=8"]
        start = few if "--from" in words else QUICK
        if "--from" in words and not any(word.startswith("train.steps") for word in words):
            start = [*start, "--set", "train.steps=3"]
        done = vitrail(*words[1:], *(start if training else []), cwd=folder)
        assert done.returncode == 0, command + done.stderr


def test_the_readme_is_short():
    assert len(README.split()) <= 1000


def test_other_commands_only_install():
    others = [c for c in COMMANDS if not c.startswith(("vitrail ", "make "))]
    assert others == ["source .venv/bin/activate"]


def test_the_make_targets_exist():
    makefile = (Path(__file__).parents[1] / "Makefile").read_text()
    targets = [c.split()[1] for c in COMMANDS if c.startswith("make")]
    assert targets and all(re.search(rf"^{target}:", makefile, re.M) for target in targets)


def test_makefile_installs_the_pinned_hub_extra():
    """huggingface_hub and all its dependencies are pinned."""
    assert "--editable '.[hub]'" in (ROOT / "Makefile").read_text()
    pins = map(Requirement, re.findall(r"^[\w.-]+==\S+", (ROOT / "constraints.txt").read_text(), re.M))
    pinned = {canonicalize_name(pin.name) for pin in pins}
    needed = ["huggingface-hub"]
    for name in needed:
        assert name in pinned
        for part in map(Requirement, requires(name) or ()):
            here = part.marker is None or part.marker.evaluate({"extra": ""})
            needed += [canonicalize_name(part.name)] if here and canonicalize_name(part.name) not in needed else []


@pytest.mark.slow
def test_python_example_runs(folder):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.S)
    small = f"overrides={[*SMALL, 'train.steps=2']!r}"
    code = code.replace('out="runs/python")', f'out="runs/python", {small})')
    assert small in code
    assert "('egret', 'heron')" in run_script(folder, code)


@pytest.mark.slow
def test_python_page_runs(folder, monkeypatch):
    """The examples of the page are one script."""
    monkeypatch.setenv(processes.NO_PLOTS, "1")
    code = "\n".join(re.findall(r"```python\n(.*?)```", PYTHON, re.S))
    assert all(f"vitrail.{name}(" in code for name in vitrail_module.__all__)
    small = f"overrides={[*SMALL, 'train.steps=2']!r}"
    code = code.replace('out="runs/photos", epochs=20', f'out="runs/page", {small}').replace(
        "runs/own", "runs/page-own"
    )
    assert small in code
    printed = run_script(folder, code)
    assert re.search(r"of \d images", printed) and "model.safetensors" in printed
    assert (folder / "explained" / "photos" / "explain.html").is_file()


@pytest.mark.slow
def test_python_example_of_explain_runs(folder, monkeypatch):
    monkeypatch.setenv(processes.NO_PLOTS, "1")
    (code,) = re.findall(r"```python\n(.*?)```", EXPLAIN, re.S)
    assert vitrail("train", "photos/", "--out", "runs/explained", *QUICK, cwd=folder).returncode == 0
    assert "px" in run_script(
        folder, code.replace("runs/photos", "runs/explained").replace("explained/photos", "explained/own")
    )


@pytest.mark.slow
def test_python_example_of_deploying_runs(folder):
    (code,) = re.findall(r"```python\n(.*?)```", DEPLOYING, re.S)
    assert vitrail("train", "photos/", "--out", "runs/deployed", *QUICK, cwd=folder).returncode == 0
    assert "('egret', 'heron')" in run_script(folder, code.replace("runs/photos", "runs/deployed"))


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda page: page.stem
)
def test_links_point_to_files_that_exist(page):
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text()):
        assert (page.parent / target).is_file(), target
