"""`vitrail compare`: all runs are scored on the same images, and differences are tested for significance."""

import json
import re
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
    """A trained run, and one whose classes are swapped."""
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
    write_bundle(poor, state | turned, read_card(poor))  # even one step separates the colours
    return root / "good", root / "poor"


@pytest.fixture(scope="module")
def more(tmp_path_factory):
    root = tmp_path_factory.mktemp("more") / "photos"
    for name, colour in (("red", (190, 70, 60)), ("green", (60, 190, 70)), ("blue", (70, 60, 190))):
        draw(root / name, colour, 11)
    return root


def test_scores_match_evaluate_and_the_better_run_is_found(runs, more, quiet, tmp_path):
    poor, good = compare(runs[::-1], data=more, device="cpu", console=quiet)
    for run, row in zip(runs[::-1], (poor, good), strict=True):
        alone = evaluate(run, more, report=tmp_path / "r.html", device="cpu", console=quiet)
        assert (row.scores.top1, row.scores.nll) == (alone.top1, alone.nll)
    assert poor.against_first is None and good.against_first.different and good.against_first.difference > 0.3
    assert good.settings["train.steps"] == 40 and poor.settings["train.steps"] == 1
    assert "train.batch_size" not in good.settings  # the same in both
    json.dumps([poor.to_dict(), good.to_dict()])


def test_without_data_the_images_are_those_of_the_first_run(runs, quiet):
    rows = compare(runs, device="cpu", console=quiet)
    assert rows[0].scores.n == 9
    assert rows[0].scores.top1 == read_card(runs[0] / "model.safetensors").metrics["top1"]


def test_runs_fitted_to_the_images_are_reported(runs, more, quiet, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("vitrail.workflows.tune.FEWEST", 1)
    shutil.copy(runs[0] / "model.safetensors", tmp_path / "fitted.safetensors")
    evaluate(tmp_path / "fitted.safetensors", more, write=True, device="cpu", console=quiet)
    rows = compare([runs[1], tmp_path / "fitted.safetensors"], data=more, device="cpu")
    assert [row.to_dict()["fitted"] for row in rows] == [False, True]
    assert re.search(rf"thresholds of {tmp_path / 'fitted.safetensors'} were fitted", capsys.readouterr().out)


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


def test_runs_that_cannot_be_compared(runs, more, quiet, tmp_path):
    copy = tmp_path / "alone.safetensors"
    shutil.copy(runs[0] / "model.safetensors", copy)
    card, state = read_card(copy), load_file(copy)
    other = card.model_copy(update={"classes": ("red", "green", "teal")})
    write_bundle(tmp_path / "other.safetensors", state, other)
    for names, facts in [
        ([runs[0]], "at least two runs"),
        ([runs[0], runs[0]], "listed twice"),
        ([copy, runs[0]], r"config\.toml .*--data"),
        ([runs[0], tmp_path / "other.safetensors"], "different classes: .*'blue'"),
        ([runs[0], tmp_path / "nothing"], "no weights at"),
    ]:
        with pytest.raises(UserError, match=facts):
            compare(names, console=quiet)


def test_settings_that_differ():
    found = differences([{"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}, "d": 4}])
    assert found == [{"a.c": 2, "d": None}, {"a.c": 3, "d": 4}]


@pytest.mark.slow
def test_the_result_does_not_depend_on_the_number_of_processes(runs, more, tmp_path):
    outputs = []
    for world in (1, 2, 3):
        command = ["compare", *runs, "--data", more, "--json", "--device", "cpu"]
        started = processes.start(world, tmp_path, processes.vitrail, *command)
        assert started.codes() == [0] * world, started.errors()
        outputs.append(json.loads(started.output()))
    assert outputs[0] == outputs[1] == outputs[2] and outputs[0][0]["scores"]["n"] == 33
