"""`bundled` as the name of weights in all commands."""

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
def folder(tmp_path, monkeypatch):
    """A folder with images of the classes of the weights, and an unrelated folder named bundled."""
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
def test_all_commands_accept_the_name(words, folder, bundled, typed):
    if words[0] == "compare":
        shutil.copy(bundled, folder / "own.safetensors")
    code, _, error = typed(*words)
    if "objective.teacher=bundled" in words:  # found, but an error since its classes differ
        assert code == 2 and "classes" in error
    else:
        assert code == 0, error


def test_reports_are_in_the_current_folder_and_not_in_a_folder_of_that_name(folder, typed):
    code, out, error = typed("evaluate", "bundled", "known", "--json")
    assert code == 0, error
    assert json.loads(out)["n"] == 8 and (folder / "evaluation-known.html").is_file()
    assert typed("evaluate", "bundled", "known", "--split", "train")[0] == 0
    assert (folder / "evaluation-known-train.html").is_file()  # a report of its own
    error = typed("evaluate", "bundled", "known", "--write")[2]
    assert "--write needs a weights file of vitrail" in error and "'bundled'" in error


def test_models_lists_it_with_its_card(typed):
    out = " ".join(typed("models")[1].split())
    line = "bundled Ti/8 at 64 px, 0 million parameters, 0 MB; trained on 1,234 images of other-pictures"
    assert f"{line}; licence: for research top-1 43.2%. Measured on 100 images of the val split." in out


def test_models_are_listed_without_the_file(tmp_path, monkeypatch, typed):
    monkeypatch.setattr("vitrail.weights.names.BUNDLED_FILE", tmp_path / "gone.safetensors")
    code, out, _ = typed("models")
    assert code == 0 and "R50+B/16" in out and "gone.safetensors" in out
