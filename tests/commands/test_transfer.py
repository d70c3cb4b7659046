"""The protocol of the paper: a learning rate chosen on held-out training images, and test images measured once."""

from __future__ import annotations

import io
import json
import math
import shutil
import signal
import statistics
import tomllib
from pathlib import Path

import pytest
from rich.console import Console

from tests import ranks as processes
from tests.commands.conftest import draw
from vitrail.commands.transfer import transfer
from vitrail.config import RunConfig, read_recipe
from vitrail.data.dataset import open_dataset
from vitrail.data.splits import SplitRule
from vitrail.errors import UserError
from vitrail.interrupt import Interrupted
from vitrail.models.variants import config_from_name
from vitrail.weights.bundle import read_card, read_trained_on
from vitrail.workflows.train_run import train
from vitrail.workflows.transfer import Transfer, default_rates

STEPS = (
    "train.steps=3",
    "train.batch_size=8",
    "precision.compute=fp32",
    "data.group_similar=false",
    "data.val_fraction=0.25",
)


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("split") / "birds"
    for name, count in (("train", 16), ("test", 7)):
        draw(root / name / "red", (112, 100, count), count)  # not too different: a rate far too high gets them wrong
        draw(root / name / "blue", (100, count, 112), count)
    return root


def test_rows_are_printed_as_in_the_paper():
    found = Transfer({}, 0.01, [0.98, 0.985, 0.99], 100)
    assert found.row == "98.50 ± 0.50" and found.deviation == pytest.approx(statistics.stdev([0.98, 0.985, 0.99]))
    assert Transfer({}, 0.01, [0.9876], 100).row == "98.76"


def test_learning_rates_are_those_of_table_4_or_around_that_of_the_recipe(tmp_path):
    plain = config_from_name("B/16", 10, 224)
    for recipe in ("paper-finetune", "paper-finetune-cifar", "paper-finetune-pets"):
        assert default_rates(recipe, plain) == (0.001, 0.003, 0.01, 0.03)
    assert default_rates("paper-finetune-imagenet-518", plain) == (0.003, 0.01, 0.03)
    for name in ("R50x1", "R50+B/16"):  # by the paper's text
        assert default_rates("paper-finetune-imagenet", config_from_name(name, 10, 224)) == (0.003, 0.01, 0.03, 0.06)
    assert default_rates("paper-finetune-vtab", plain) == (0.01,)
    own = tmp_path / "own.toml"
    own.write_text('base = "paper-finetune-imagenet"\n[train]\nsteps = 10\n')
    assert default_rates(str(own), plain) == (0.003, 0.01, 0.03)
    own.write_text('base = "paper-finetune-imagenet"\n[optimizer]\nlr = 0.3\n')
    assert default_rates(str(own), plain) == (0.1, 0.3, 0.9)
    low, middle, high = default_rates("finetune", plain)
    assert middle == RunConfig.model_validate(read_recipe("finetune")).optimizer.lr
    assert high / middle == pytest.approx(3, rel=0.05) and middle / low == pytest.approx(3, rel=0.05)


@pytest.mark.slow
def test_the_protocol(split, tiny, tmp_path, quiet, monkeypatch):
    rates = (1e-4, 3e-2, 300.0)  # unsure, good, and so high that nothing is learned
    ask = {"from_": tiny, "recipe": "paper-finetune", "rates": rates, "seeds": 2, "out": tmp_path / "runs"}
    sizes = ("model.image_size=[16, 16]", *STEPS)
    found = transfer(split, **ask, overrides=sizes, console=quiet)
    folder = tmp_path / "runs"
    runs = ["rate-0.0001", "rate-0.03", "rate-300", "seed-0", "seed-1"]
    assert sorted(path.name for path in folder.iterdir()) == [*runs, "transfer.json"]
    cards = {path.name: read_card(path / "model.safetensors") for path in folder.iterdir() if path.is_dir()}
    for name in runs[:3]:  # the test images are left alone
        assert cards[name].data["images"] == {"train": 24, "val": 8} and cards[name].metrics["n"] == 8
    for name in ("seed-0", "seed-1"):  # all training images, and the test images
        assert cards[name].data["images"] == {"train": 32, "test": 14} and cards[name].metrics["n"] == 14
        written = tomllib.loads((folder / name / "config.toml").read_text())
        assert written["optimizer"]["lr"] == found.rate and written["train"]["seed"] == int(name[-1])
    assert found.tried == {rate: cards[f"rate-{rate:g}"].metrics["top1"] for rate in rates}
    assert found.tried[found.rate] == max(found.tried.values()) > found.tried[300.0]
    assert found.tried[1e-4] == found.tried[3e-2] and found.rate == 3e-2  # the likelihood tells equals apart
    assert found.test == [cards["seed-0"].metrics["top1"], cards["seed-1"].metrics["top1"]]
    facts = json.loads((folder / "transfer.json").read_text())
    assert facts["mean"] == found.mean and facts["tried"] == {f"{rate}": found.tried[rate] for rate in rates}
    monkeypatch.setattr("vitrail.workflows.train_run.train_in_folder", lambda *_, **__: pytest.fail("trained again"))
    assert transfer(split, **ask, overrides=sizes, console=quiet) == found  # all runs are there


@pytest.mark.slow
def test_a_validation_split_alone_is_the_test_split(split, tiny, tmp_path, quiet):
    """As in ImageNet: the same images as a validation split give the same result."""
    shutil.copytree(split, tmp_path / "birds")
    (tmp_path / "birds" / "test").rename(tmp_path / "birds" / "val")
    ask = {"from_": tiny, "rates": (1e-4, 3e-2), "seeds": 1, "overrides": ("model.image_size=[16, 16]", *STEPS)}
    one, two = (
        transfer(data, **ask, out=tmp_path / data.parent.name, console=quiet) for data in (split, tmp_path / "birds")
    )
    assert one == two and two.tested == 14


@pytest.mark.slow
def test_a_recipe_without_validation_compares_rates_on_some_images(split, tiny, tmp_path, quiet):
    own = tmp_path / "own.toml"
    own.write_text('base = "paper-finetune"\n[data]\nval_fraction = 0.0\n')
    ask = {"from_": tiny, "recipe": str(own), "rates": (1e-4, 3e-2), "seeds": 1, "out": tmp_path / "runs"}
    transfer(split, **ask, overrides=("model.image_size=[16, 16]", *STEPS[:-1]), console=quiet)
    counts = {
        name: read_card(tmp_path / "runs" / name / "model.safetensors").data["images"]
        for name in ("rate-0.03", "seed-0")
    }
    assert counts == {"rate-0.03": {"train": 28, "val": 4}, "seed-0": {"train": 32, "test": 14}}


@pytest.mark.slow
def test_two_processes_work_like_one_and_print_once(split, tiny, tmp_path):
    def ask(world: int, *more: object) -> processes.Started:
        to = ("--from", tiny, "--rates", "1e-3,1e-2", "--seeds", 1, "--out", tmp_path / str(world))
        settings = [word for setting in ("model.image_size=[16,16]", *STEPS) for word in ("--set", setting)]
        return processes.start(world, tmp_path, processes.vitrail, "transfer", split, *to, *settings, *more)

    both, alone = ask(2), ask(1)
    assert both.codes() == [0, 0] and alone.codes() == [0], both.errors()
    assert "1 seed at" in alone.output()
    assert both.output().count("seed-0 ─") == both.output().count("transfer.json") == 1
    two, one = (json.loads((tmp_path / name / "transfer.json").read_text()) for name in ("2", "1"))
    assert two == one and two["tested"] == 14
    wrong = ask(2, "--set", "augment.crop=none")  # the finished runs were others: seen within one of them
    assert wrong.codes() == [2, 2]
    assert wrong.errors().count("augment.crop") == 1


def test_invalid_options_are_one_message(split, photos, tiny, tmp_path, quiet):
    def ask(data: Path, **options: object) -> None:
        transfer(data, **{"from_": tiny, "out": tmp_path / "x", "console": quiet, "overrides": STEPS} | options)

    with pytest.raises(UserError, match="no test or validation split"):
        ask(photos)
    with pytest.raises(UserError, match=r"--set optimizer.lr .*--rates"):
        ask(split, overrides=("optimizer.lr=1.0",))
    with pytest.raises(UserError, match=r"--set data.use_test "):
        ask(split, overrides=("data.use_test=false",))
    with pytest.raises(UserError, match="does not fine-tune"):
        ask(split, recipe="masked")
    with pytest.raises(UserError, match="at least one seed"):
        ask(split, seeds=0)
    with pytest.raises(UserError, match="learning rates above 0"):
        ask(split, rates=(0.01, math.inf))
    table = tmp_path / "tags.csv"
    names = [path.relative_to(split) for path in sorted(split.rglob("*.png"))]
    rows = [f"{split / name},{name.parent.name}|coloured,{name.parts[0]}" for name in names]
    table.write_text("\n".join(["path,labels,split", *rows]) + "\n")
    with pytest.raises(UserError, match="multilabel"):
        ask(table)
    assert not (tmp_path / "x").exists()


@pytest.mark.slow
def test_runs_on_different_images_are_not_combined(split, tiny, tmp_path, quiet):
    data = shutil.copytree(split, tmp_path / "birds")
    ask = {"from_": tiny, "rates": (0.01,), "out": tmp_path / "out", "console": quiet}
    ask["overrides"] = ("model.image_size=[16, 16]", *STEPS)
    assert transfer(data, **ask, seeds=1).seen_before == 0
    next((data / "train" / "red").iterdir()).unlink()
    with pytest.raises(UserError, match=r"seed-0 and seed-1 were trained on different images"):
        transfer(data, **ask, seeds=2)


@pytest.mark.slow
def test_test_images_seen_by_the_starting_weights_are_reported(split, tiny, tmp_path, quiet):
    settings = ("model.image_size=[16, 16]", *STEPS)
    start = train(split / "test", from_=tiny, out=tmp_path / "start", overrides=settings, console=quiet)
    seen = len(read_trained_on(start.weights))
    text = io.StringIO()
    ask = {"from_": start.weights, "rates": (0.01,), "seeds": 1, "out": tmp_path / "out", "overrides": settings}
    found = transfer(split, **ask, console=Console(file=text, width=200))
    assert 0 < seen == found.seen_before == json.loads((tmp_path / "out" / "transfer.json").read_text())["seen_before"]
    assert f"the starting weights were trained on {seen} of the 14 test images" in text.getvalue()


@pytest.mark.parametrize(
    ("of_the_run", "text"),
    [
        (" and saved; resume with: vitrail train", "stopped and saved; resume with the same command"),
        ("", "stopped; resume with the same command"),
        (", and nothing is saved: it was removed", "stopped, and nothing is saved: it was removed"),
    ],
)
def test_when_stopped_it_states_how_to_resume(split, tiny, tmp_path, quiet, monkeypatch, of_the_run, text):
    ask = {"from_": tiny, "rates": (0.01,), "seeds": 1, "out": tmp_path / "out", "console": quiet}
    seen = []

    def stop(*_: object, **__: object) -> None:
        seen.append(Interrupted(signal.SIGTERM))
        seen[0].advice = of_the_run
        raise seen[0]

    monkeypatch.setattr("vitrail.workflows.transfer.train", stop)
    with pytest.raises(Interrupted):
        transfer(split, **ask, overrides=STEPS)
    assert str(seen[0]) == text


def test_without_validation_the_validation_split_is_trained_on(split, tmp_path):
    draw(tmp_path / "d" / "val" / "red", (200, 90, 90), 4)
    draw(tmp_path / "d" / "val" / "blue", (90, 90, 200), 4)
    for name in ("train", "test"):
        (tmp_path / "d" / name).symlink_to(split / name)
    sizes = {
        share: {
            name: len(part) for name, part in open_dataset(tmp_path / "d", SplitRule(val_fraction=share)).splits.items()
        }
        for share in (0, 0.1)
    }
    assert sizes == {0: {"train": 40, "test": 14}, 0.1: {"train": 32, "val": 8, "test": 14}}
