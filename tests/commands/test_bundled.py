"""`bundled` wherever weights are named, on the command line."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.commands.conftest import draw

pytestmark = [
    pytest.mark.usefixtures("bundled"),
    pytest.mark.filterwarnings("ignore:Cyclopts application invoked"),
]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with images of classes that the stand-in knows, and with a stray folder called bundled."""
    for name, colour in {"a": (200, 60, 60), "b": (60, 60, 200)}.items():
        draw(tmp_path / "known" / "train" / name, colour, 6)
        draw(tmp_path / "known" / "test" / name, colour, 4)
    draw(tmp_path / "bundled" / "c", (60, 200, 60), 2)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("predict", "bundled", "bundled/c"),
        ("fewshot", "bundled", "known", "--shots", "2"),
        ("knn", "bundled", "known"),
        ("explain", "bundled", "known/test/a/000.png"),
        ("convert", "bundled", "own.safetensors", "--to", "vitrail"),
        ("compare", "bundled", "own.safetensors", "--data", "known"),
        ("train", "known", "--from", "bundled", "--recipe", "probe"),
        ("train", "known", "--recipe", "scratch", "--model", "Ti/8", "--set", "objective.teacher=bundled", "--set",
         "train.steps=1"),
    ],
    ids=lambda words: words[0],
)  # fmt: skip
def test_every_command_takes_the_name(words, place, bundled, typed):
    if words[0] == "compare":
        shutil.copy(bundled, place / "own.safetensors")
    code, _, error = typed(*words)
    if "objective.teacher=bundled" in words:  # found, and told that it knows other classes
        assert code == 2 and "classes" in error
    else:
        assert code == 0, error


def test_what_is_measured_is_told_here_and_not_in_a_folder_of_that_name(place, typed):
    code, out, error = typed("evaluate", "bundled", "known", "--json")
    assert code == 0, error
    assert json.loads(out)["n"] == 8 and (place / "evaluation-known.html").is_file()
    assert typed("evaluate", "bundled", "known", "--split", "train")[0] == 0
    assert (place / "evaluation-known-train.html").is_file()  # and not over the other
    error = typed("evaluate", "bundled", "known", "--write")[2]
    assert "--write needs a weights file of vitrail" in error and "'bundled'" in error


def test_models_lists_it_by_what_its_card_says(typed):
    out = " ".join(typed("models")[1].split())
    told = (
        "bundled Ti/8 at 64 px, 0 million parameters, 0 MB, for research, learned from 1,234 images of other-pictures"
    )
    assert f"{told} top-1 43.2%. Measured on 100 images of the val split." in out


def test_models_are_listed_without_it_too(tmp_path, monkeypatch, typed):
    monkeypatch.setattr("vitrail.weights.names.BUNDLED_FILE", tmp_path / "gone.safetensors")
    code, out, _ = typed("models")
    assert code == 0 and "R50+B/16" in out and "bundled: this installation lacks the bundled weights" in out
