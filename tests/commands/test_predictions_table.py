"""The contents of predictions.csv."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from tests.commands.conftest import draw
from vitrail.commands.evaluate import evaluate
from vitrail.inference.classifier import load
from vitrail.workflows.train_run import train

SETTINGS = ("train.steps=40", "train.batch_size=16", "data.group_similar=false", "precision.compute=fp32")


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_every_image_has_a_row(tiny, tmp_path, quiet):
    for name, shade in (("known", 60), ("new", 70)):
        draw(tmp_path / name / "red, dark", (200, shade, 60), 14)
        draw(tmp_path / name / "blue", (60, shade, 200), 12)
    for number in range(2):  # two red images are labelled blue
        (tmp_path / "new" / "red, dark" / f"00{number}.png").rename(tmp_path / "new" / "blue" / f"wrong{number}.png")
    result = train(tmp_path / "known", from_=tiny, out=tmp_path / "run", overrides=SETTINGS, console=quiet)
    test_rows = rows_of(result.folder / "predictions.csv")
    assert len(test_rows) == result.scores.n
    assert np.mean([row["prediction"] == row["label"] for row in test_rows]) == result.scores.top1
    scores = evaluate(result.weights, tmp_path / "new", report=tmp_path / "page.html", console=quiet)
    assert "Loss by step" in (tmp_path / "page.html").read_text()  # from the weights alone
    rows = rows_of(tmp_path / "page-predictions.csv")
    assert len(rows) == scores.n == 26
    predictions = load(result.weights).predict([tmp_path / "new" / row["name"] for row in rows])
    for row, one in zip(rows, predictions, strict=True):
        assert row["prediction"] == one.label and float(row["probability"]) == pytest.approx(one.probability, abs=1e-4)
        assert row["label"] == Path(row["name"]).parent.name
        assert (row["label_probability"] == row["probability"]) == (row["label"] == row["prediction"])
    suggested = {row["name"]: row["suggested_label"] for row in rows if row["suggested_label"]}
    assert suggested == {"blue/wrong0.png": "red, dark", "blue/wrong1.png": "red, dark"}


@pytest.mark.slow
def test_several_labels_are_in_one_cell(tiny, tmp_path, quiet):
    lines = ["path,labels"]
    for number, (colour, labels) in enumerate(
        {(200, 60, 60): "warm|red", (60, 60, 200): "", (200, 200, 60): "warm"}.items()
    ):
        draw(tmp_path / str(number), colour, 8)
        lines += [f"{number}/{image:03d}.png,{labels}" for image in range(8)]
    table = tmp_path / "labels.csv"
    table.write_text("\n".join(lines) + "\n")
    result = train(table, from_=tiny, out=tmp_path / "run", overrides=SETTINGS, console=quiet)
    rows = rows_of(result.folder / "predictions.csv")
    wanted = dict(line.split(",") for line in lines)
    assert {row["name"]: set(row["labels"].split("|")) for row in rows} == {
        row["name"]: set(wanted[row["name"]].split("|")) for row in rows
    }
    right = [set(row["labels"].split("|")) == set(row["predictions"].split("|")) for row in rows]
    assert np.mean(right) > 0.5 and len(rows) == result.scores.n
