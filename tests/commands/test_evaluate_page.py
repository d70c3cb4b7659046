"""Every command of docs/evaluate.md runs, on small images."""

import os
import re
import shlex
from pathlib import Path

import pytest
from rich.console import Console

from tests.commands.conftest import draw, vitrail
from tests.commands.test_vtab import lists
from vitrail.workflows.train_run import train

PAGE = (Path(__file__).parents[2] / "docs" / "evaluate.md").read_text()
QUICK = ("train.steps=2", "precision.compute=fp32", "data.workers=0")
COMMANDS = re.findall(r"^\$ (vitrail .*)$", PAGE, re.M)


@pytest.mark.slow
def test_all_commands_run(tiny, tmp_path):
    for name, colour in {"heron": (200, 60, 60), "egret": (60, 60, 200)}.items():
        draw(tmp_path / "photos" / name, colour, 20)
        draw(tmp_path / "more_photos" / name, colour, 8, size=18)
    lists(tmp_path / "vtab-1k" / "patch_camelyon", (800, 200, 20))
    with open(os.devnull, "w") as devnull:
        for out in ("photos", "photos-2"):
            options = {"overrides": QUICK, "from_": tiny, "recipe": "scratch", "console": Console(file=devnull)}
            train(tmp_path / "photos", out=tmp_path / "runs" / out, **options)
    assert {command.split()[1] for command in COMMANDS} == {"evaluate", "compare", "fewshot", "knn", "vtab"}
    for command in COMMANDS:
        done = vitrail(*shlex.split(command)[1:], cwd=tmp_path)
        assert done.returncode == 0, command + done.stderr


def test_links_point_to_existing_files():
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", PAGE):
        assert (Path(__file__).parents[2] / "docs" / target).is_file(), target
