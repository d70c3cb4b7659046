"""Every command of docs/evaluate.md runs, on small images in place of the reader's."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from tests.runs.conftest import SMALL, draw
from tests.runs.test_vtab import lists
from vitrail.runs.train import train

PAGE = (Path(__file__).parents[1] / "docs" / "evaluate.md").read_text()
COMMANDS = re.findall(r"^\$ (vitrail .*)$", PAGE, re.M)


@pytest.mark.slow
def test_every_command_runs(tmp_path):
    for name, colour in {"heron": (200, 60, 60), "egret": (60, 60, 200)}.items():
        draw(tmp_path / "photos" / name, colour, 20)
        draw(tmp_path / "more_photos" / name, colour, 8, size=18)
    lists(tmp_path / "vtab-1k" / "patch_camelyon", (800, 200, 20))
    with open(os.devnull, "w") as nowhere:
        for out in ("photos", "photos-2"):
            overrides = (*SMALL, "train.steps=2")
            train(tmp_path / "photos", out=tmp_path / "runs" / out, overrides=overrides, console=Console(file=nowhere))
    assert {command.split()[1] for command in COMMANDS} == {"evaluate", "compare", "fewshot", "knn", "vtab"}
    for command in COMMANDS:
        words = [sys.executable, "-m", *shlex.split(command)]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, command + done.stdout + done.stderr


def test_links_point_to_files_that_exist():
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", PAGE):
        assert (Path(__file__).parents[1] / "docs" / target).is_file(), target
