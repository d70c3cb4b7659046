"""`vitrail compare`: the same images for all, and "better" only where they tell."""

import json
import shutil

import pytest
from safetensors.torch import load_file

from tests import ranks as processes
from tests.commands.conftest import draw
from vitrail.commands.compare import compare
from vitrail.commands.evaluate import evaluate
from vitrail.errors import UserError
from vitrail.weights.bundle import read_card, write_bundle
from vitrail.workflows.compare import differences
from vitrail.workflows.train_run import train

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(photos, tiny, tmp_path_factory):
    """One that was trained, and one that takes classes for each other."""
    from rich.console import Console

    root = tmp_path_factory.mktemp("compare")
    with open(root / "log", "w") as log:
        for name, steps, rate in (("good", 40, 3e-3), ("poor", 1, 1e-6)):
            overrides = (f"train.steps={steps}", f"optimizer.lr={rate}", "data.workers=0", "precision.compute=fp32")
            options = {"from_": tiny, "recipe": "scratch", "console": Console(file=log)}
            train(photos, out=root / name, overrides=overrides, **options)
    poor = root / "poor" / "model.safetensors"
    state = load_file(poor)
    turned = {name: state[name].roll(1, 0) for name in ("head.weight", "head.bias")}
    write_bundle(poor, state | turned, read_card(poor))  # even one step tells colours apart
    return root / "good", root / "poor"


@pytest.fixture(scope="module")
def more(tmp_path_factory):
    root = tmp_path_factory.mktemp("more") / "photos"
    for name, colour in (("red", (190, 70, 60)), ("green", (60, 190, 70)), ("blue", (70, 60, 190))):
        draw(root / name, colour, 11)
    return root


def test_scores_are_those_of_evaluate_and_the_better_one_is_found(runs, more, quiet, tmp_path):
    poor, good = compare(runs[::-1], data=more, device="cpu", console=quiet)
    for run, row in zip(runs[::-1], (poor, good), strict=True):
        alone = evaluate(run, more, report=tmp_path / "r.html", device="cpu", console=quiet)
        assert (row.scores.top1, row.scores.nll) == (alone.top1, alone.nll)
    assert poor.against_first is None and good.against_first.different and good.against_first.difference > 0.3
    assert good.settings["train.steps"] == 40 and poor.settings["train.steps"] == 1
    assert "train.batch_size" not in good.settings  # the same in both
    json.dumps([poor.to_dict(), good.to_dict()])


def test_without_data_it_is_what_the_first_run_held_out(runs, quiet):
    rows = compare(runs, device="cpu", console=quiet)
    assert rows[0].scores.n == 9
    assert rows[0].scores.top1 == read_card(runs[0] / "model.safetensors").metrics["top1"]


def test_images_that_answers_were_fitted_on_are_told(runs, more, quiet, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("vitrail.workflows.tune.FEWEST", 1)
    shutil.copy(runs[0] / "model.safetensors", tmp_path / "own.safetensors")
    evaluate(tmp_path / "own.safetensors", more, write=True, device="cpu", console=quiet)
    rows = compare([runs[1], tmp_path / "own.safetensors"], data=more, device="cpu")
    assert [row.to_dict()["fitted"] for row in rows] == [False, True]
    assert (
        f"on which temperature and thresholds of {tmp_path / 'own.safetensors'} were fitted" in capsys.readouterr().out
    )


def test_classes_in_another_order_are_matched_by_name(runs, more, quiet, tmp_path):
    card = read_card(runs[0] / "model.safetensors")
    state = load_file(runs[0] / "model.safetensors")
    order = [2, 0, 1]
    state |= {name: state[name][order].clone() for name in ("head.weight", "head.bias")}
    turned = card.model_copy(update={"classes": tuple(card.classes[i] for i in order)})
    write_bundle(tmp_path / "turned.safetensors", state, turned)
    rows = compare([runs[0], tmp_path / "turned.safetensors"], data=more, device="cpu", console=quiet)
    assert rows[0].scores.top1 == rows[1].scores.top1
    assert rows[1].against_first.p == 1 and rows[1].against_first.only_second == 0


def test_what_cannot_be_compared_is_told(runs, more, quiet, tmp_path):
    copy = tmp_path / "alone.safetensors"
    shutil.copy(runs[0] / "model.safetensors", copy)
    card, state = read_card(copy), load_file(copy)
    other = card.model_copy(update={"classes": ("red", "green", "teal")})
    write_bundle(tmp_path / "other.safetensors", state, other)
    for names, words in [
        ([runs[0]], "two runs or more"),
        ([runs[0], runs[0]], "named twice"),
        ([copy, runs[0]], "does not tell which images"),
        ([runs[0], tmp_path / "other.safetensors"], "do not know the same classes: only one of them knows 'blue'"),
        ([runs[0], tmp_path / "nothing"], "no weights at"),
    ]:
        with pytest.raises(UserError, match=words):
            compare(names, console=quiet)


def test_settings_that_differ():
    found = differences([{"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}, "d": 4}])
    assert found == [{"a.c": 2, "d": None}, {"a.c": 3, "d": 4}]


@pytest.mark.slow
def test_any_number_of_processes_compares_the_same(runs, more, tmp_path):
    said = []
    for world in (1, 2, 3):
        command = ["compare", *runs, "--data", more, "--json", "--device", "cpu"]
        started = processes.start(world, tmp_path, processes.vitrail, *command)
        assert started.codes() == [0] * world, started.errors()
        said.append(json.loads(started.output()))
    assert said[0] == said[1] == said[2] and said[0][0]["scores"]["n"] == 33
