"""Whole runs on data other than class folders: tables with multilabel images and weights, and packed shards."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import average_precision_score

import vitrail
from tests.commands.conftest import draw
from tests.commands.conftest import vitrail as command
from tests.small import SMALL
from vitrail.commands.evaluate import evaluate
from vitrail.commands.pack import pack
from vitrail.config import DataConfig
from vitrail.data.dataset import open_dataset
from vitrail.data.samples import LabelSets
from vitrail.errors import UserError
from vitrail.interrupt import Interrupts
from vitrail.metrics.multilabel import rescale_thresholds
from vitrail.metrics.tuning import MultilabelTuning
from vitrail.tasks.table import prediction_task
from vitrail.training.progress import read_metrics
from vitrail.weights.bundle import Postprocess, read_card, replace_card
from vitrail.workflows.measure import measure
from vitrail.workflows.train_run import train

pytestmark = pytest.mark.slow  # whole runs
STEPS = (*SMALL, "train.steps=60", "optimizer.lr=3e-3", "augment.crop=none", "augment.flip=false")
COLOURS = {"red": 0, "green": 1, "blue": 2}


@pytest.fixture(scope="module")
def tagged(tmp_path_factory) -> Path:
    """Images whose channels are on or off, and a table of labels for the channels that are on."""
    root = tmp_path_factory.mktemp("tagged")
    rng = np.random.default_rng(0)
    lines = ["path,labels,weight"]
    for number in range(64):
        on = [name for name, channel in COLOURS.items() if number >> channel & 1]
        pixels = rng.integers(0, 80, (20, 20, 3))
        for name in on:
            pixels[..., COLOURS[name]] += 160
        Image.fromarray(pixels.astype(np.uint8)).save(root / f"{number}.png")
        lines.append(f"{number}.png,{'|'.join(on)},{1 + number % 2}")
    (root / "list.csv").write_text("\n".join(lines) + "\n")
    return root / "list.csv"


@pytest.fixture(scope="module")
def run(tagged, tmp_path_factory):
    return train(tagged, recipe="scratch", out=tmp_path_factory.mktemp("runs") / "run", overrides=STEPS)


def test_multilabel_training_and_evaluation(run, tagged):
    assert run.scores.mean_ap > 0.9 > run.scores.chance
    card = read_card(run.weights)
    assert card.task == "multilabel" and card.classes == ("blue", "green", "red")
    assert card.recipe["objective"]["loss"] == "sigmoid"
    val = open_dataset(tagged).splits["val"]
    clf = vitrail.load(run.weights)
    truth = val.labels_of(np.arange(len(val)))
    predictions = clf.predict([val.read(i) for i in range(len(val))], top=3)
    chances = np.array([[dict(p.top)[name] for name in card.classes] for p in predictions])
    assert run.scores.mean_ap == pytest.approx(average_precision_score(truth, chances, average="macro"), abs=1e-6)
    for prediction, row in zip(predictions, chances, strict=True):
        assert set(prediction.labels) == {name for name, p in zip(card.classes, row, strict=True) if p >= 0.5}
    assert "mean average precision" in run.report.read_text()


def test_multilabel_on_the_command_line(run, tagged):
    done = command("predict", run.folder, tagged.parent / "7.png", tagged.parent / "0.png", "--json")
    white, black = (json.loads(line) for line in done.stdout.splitlines())
    assert set(white["labels"]) <= set(COLOURS) and white["label"] == ", ".join(white["labels"])
    assert black["labels"] or black["label"] is None
    assert white["probability"] == (white["probabilities"] or [None])[0]
    done = command("evaluate", run.folder, tagged, "--json")
    assert json.loads(done.stdout)["mean_ap"] == pytest.approx(run.scores.mean_ap)


def test_multilabel_weights_and_single_label_data_do_not_mix(run, tagged, photos, quiet, tmp_path):
    with pytest.raises(UserError, match=r"objective\.loss=sigmoid"):
        train(tagged, recipe="scratch", out=tmp_path / "a", overrides=(*STEPS, "objective.loss=softmax"), console=quiet)
    rows = [f"{tagged.parent}/{i}.png,{'red' if i % 2 else 'blue'}" for i in range(8)]
    (tmp_path / "one.csv").write_text("\n".join(["path,label", *rows]))
    with pytest.raises(UserError, match=r"weights are multilabel, but the images of .* one label each"):
        evaluate(run.weights, tmp_path / "one.csv", console=quiet)


def test_packed_images_train_to_the_same_bits(photos, quiet, tmp_path):
    pack(photos, tmp_path / "packed", console=quiet)
    steps = (*SMALL, "train.steps=12", "augment.mixup=0.2", "train.seed=3")
    folder = train(photos, recipe="scratch", out=tmp_path / "a", overrides=steps, console=quiet)
    shards = train(tmp_path / "packed", recipe="scratch", out=tmp_path / "b", overrides=steps, console=quiet)
    assert folder.scores.nll == shards.scores.nll
    first, second = (vitrail.load(result.weights).net.state_dict() for result in (folder, shards))
    assert all((first[key] == second[key]).all() for key in first)


@pytest.mark.parametrize("channels", [1, 4])
def test_other_channels_from_training_to_prediction(photos, quiet, tmp_path, channels):
    steps = (*SMALL, "train.steps=4", f"model.channels={channels}")
    result = train(photos, recipe="scratch", out=tmp_path / "run", overrides=steps, console=quiet)
    clf = vitrail.load(result.weights)
    assert clf.preprocess.channels == channels == clf.card.model.channels
    assert clf.predict([photos / "red" / "000.png"])[0].label in clf.classes


def test_an_image_of_weight_zero_is_measured(tagged, run, quiet, tmp_path):
    lines = tagged.read_text().splitlines()
    rows = [f"{tagged.parent}/{line.rsplit(',', 1)[0]},0" for line in lines[1:]]
    (tmp_path / "list.csv").write_text("\n".join([lines[0], *rows]))
    scores = evaluate(run.weights, tmp_path / "list.csv", split="all", report=tmp_path / "r.html", console=quiet)
    assert scores.n == len(rows) - len(open_dataset(tagged).splits["train"])  # those trained on are left out


def test_multilabel_thresholds_are_written_and_used(run, tagged, quiet, tmp_path, monkeypatch):
    weights = tmp_path / "model.safetensors"
    monkeypatch.setattr("vitrail.workflows.tune.FEWEST", 1)
    shutil.copy(run.weights, weights)
    scores = evaluate(weights, tagged, report=tmp_path / "r.html", write=True, console=quiet)
    card = vitrail.load(weights).card
    assert card.postprocess.thresholds == tuple(scores.tuned.thresholds)
    assert len(card.postprocess.thresholds) == len(card.classes)
    samples = open_dataset(tagged).splits["val"]
    for one in vitrail.load(weights).predict([samples.read(i) for i in range(len(samples))], top=len(card.classes)):
        least = dict(zip(card.classes, card.postprocess.thresholds, strict=True))
        assert set(one.labels) == {name for name, p in one.top if p >= least[name]}
    with pytest.raises(UserError, match="--target-accuracy"):
        evaluate(weights, tagged, target_accuracy=0.9, console=quiet)


def test_worse_thresholds_are_not_written(run, tagged, quiet, tmp_path, monkeypatch):
    weights = tmp_path / "model.safetensors"
    monkeypatch.setattr("vitrail.workflows.tune.FEWEST", 1)
    monkeypatch.setattr(
        "vitrail.tasks.multilabel.tune_multilabel",
        lambda *_, **__: MultilabelTuning(2.0, 1.0, 0.3, 0.3, 0.5, [0.9] * 3),
    )
    shutil.copy(run.weights, weights)
    before = Postprocess(thresholds=(0.2, 0.5, 0.7))
    replace_card(weights, read_card(weights).model_copy(update={"postprocess": before}))
    evaluate(weights, tagged, report=tmp_path / "r.html", write=True, console=quiet)
    after = read_card(weights).postprocess
    assert after.temperature == 2 and after.thresholds == pytest.approx(
        rescale_thresholds(np.array([0.2, 0.5, 0.7]), 2)
    )


def test_a_prediction_in_the_set_of_labels_is_correct(photos, quiet, tmp_path):
    """ImageNet ReaL: top-1 and top-5 count a prediction that is any of an image's labels."""
    result = train(photos, recipe="scratch", out=tmp_path / "run", overrides=(*SMALL, "train.steps=2"), console=quiet)
    clf = vitrail.load(result.weights)
    samples = open_dataset(photos).splits["val"]
    sets = [[0, 1] if i % 3 else [2] for i in range(len(samples))]
    samples = replace(samples, sets=LabelSets.of(sets))
    device = torch.device("cpu")
    found = measure(
        clf.net,
        "set",
        samples,
        clf.preprocess,
        DataConfig(),
        device,
        Interrupts(),
        task=prediction_task("classification", 3),
    )
    output = [clf.classes.index(p.label) for p in clf.predict([samples.read(i) for i in range(len(samples))], top=1)]
    assert found.scores.top1 == pytest.approx(np.mean([one in own for one, own in zip(output, sets, strict=True)]))
    first = samples.subset(np.arange(1))
    found = measure(
        clf.net,
        "set",
        first,
        clf.preprocess,
        DataConfig(),
        device,
        Interrupts(),
        task=prediction_task("classification", 3),
    )
    assert found.sentence == "Measured on 1 image of the set."


def test_predict_labels_every_row_of_a_table_in_its_order(run, tagged, tmp_path):
    names = [f"{tagged.parent}/{i}.png" for i in (9, 3, 5)]
    (tmp_path / "inbox.csv").write_text("\n".join(["file,note", *(f"{name},x" for name in names), "gone.png,x"]))
    done = command("predict", run.folder, tmp_path / "inbox.csv", "--json")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["file"] for row in rows] == [*names, "gone.png"]
    assert all("labels" in row for row in rows[:3]) and "the file cannot be found" in rows[3]["error"]


def test_a_table_with_changed_splits_is_other_data(tagged, tmp_path):
    rows = [f"{tagged.parent}/{i}.png,{'odd' if i % 2 else 'even'}," for i in range(40)]

    def fingerprint(first, second):
        parts = [row + (first if number < 20 else second) for number, row in enumerate(rows)]
        (tmp_path / "list.csv").write_text("\n".join(["path,label,split", *parts]))
        return open_dataset(tmp_path / "list.csv").fingerprint

    assert fingerprint("train", "test") != fingerprint("test", "train")


def test_without_validation_all_training_images_are_trained_on(tmp_path, quiet):
    """Only the test images are measured, once at the end."""
    for split, count in (("train", 9), ("test", 5)):
        draw(tmp_path / "data" / split / "red", (200, 60, count), count)
        draw(tmp_path / "data" / split / "blue", (60, count, 200), count)
    steps = (*SMALL, "train.steps=6", "data.val_fraction=0")
    result = train(tmp_path / "data", recipe="scratch", out=tmp_path / "run", overrides=steps, console=quiet)
    card = read_card(result.weights)
    assert card.data["images"] == {"train": 18, "test": 10} and card.metrics["n"] == 10
    assert not any("val_top1" in row for row in read_metrics(tmp_path / "run" / "metrics.jsonl"))
    again = evaluate(tmp_path / "run", tmp_path / "data", console=quiet)
    assert again.n == 10 and again.top1 == card.metrics["top1"]
