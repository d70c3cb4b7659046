"""The plots are valid SVG to embed in a page, whatever the numbers and names."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from PIL import Image

from vitrail.metrics.calibration import bin_confidence
from vitrail.metrics.selective import risk_coverage_curve
from vitrail.report import canvas, plots, training_plots

pytestmark = pytest.mark.slow  # draws plots

HISTORY = [
    *({"step": step, "loss": 2.0 - step / 200, "lr": 1e-3, "images_per_second": 80.0} for step in range(10, 201, 10)),
    *({"step": step, "val_top1": step / 250, "val_loss": 2.1 - step / 200} for step in range(50, 201, 50)),
]


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter("text")]


def ids(svg: str) -> list[str]:
    return [element.attrib["id"] for element in ElementTree.fromstring(svg).iter() if "id" in element.attrib]


def test_the_legend_does_not_cover_the_curves() -> None:
    rising = [row | ({"val_loss": row["step"] / 100} if "val_loss" in row else {}) for row in HISTORY]
    svg = ElementTree.fromstring(training_plots.learning_curves(rising, None)[0])
    height = {element.text: float(element.attrib["y"]) for element in svg.iter() if element.tag.endswith("text")}
    assert max(height["training"], height["validation"]) <= height["Loss"]  # next to the title


def test_plots_on_one_page_have_different_ids() -> None:
    diagram = plots.reliability_diagram(bin_confidence(np.linspace(0.1, 1, 50), np.arange(50) % 3 > 0))
    svgs = [*training_plots.learning_curves(HISTORY, 0.4), plots.confusion_matrix(np.eye(3, dtype=int), "abc"), diagram]
    every_id = [name for svg in svgs for name in ids(svg)]
    assert len(svgs) == 4 and len(every_id) == len(set(every_id)) > 0
    for svg in svgs:
        root = ElementTree.fromstring(svg)
        assert root.tag == "svg" and root.attrib["role"] == "img"
        assert "http" not in svg and "<style" not in svg and "<?xml" not in svg and "DejaVu" not in svg
        assert canvas.INK not in svg and "currentColor" in svg
        used = {element.attrib["href"][1:] for element in root.iter("use")}
        assert used <= set(ids(svg))


def test_curves_show_the_baseline_and_omit_empty_panels() -> None:
    loss, accuracy = training_plots.learning_curves(HISTORY, 0.4)
    assert "Loss" in texts(loss) and "lr" in texts(loss) and "validation" in texts(loss)
    assert any("baseline 40.0" in text for text in texts(accuracy))
    assert not any("baseline" in text for text in texts(training_plots.learning_curves(HISTORY, None)[1]))
    assert training_plots.learning_curves([], 0.4) == []
    assert len(training_plots.learning_curves([{"step": 5, "val_top1": 0.5}], 0.4)) == 1
    assert len(training_plots.learning_curves([{"step": 5, "loss": 0.5}, {"loss": 3}, {"step": 6}, {}], None)) == 1


def test_invalid_and_repeated_rows() -> None:
    rows = [
        {"step": 1, "loss": math.nan},
        {"step": 2, "loss": None},
        {"step": 3, "loss": 9.0},
        {"step": 3, "loss": 1.0},
    ]
    steps, values = training_plots._series(rows, "loss")
    assert steps.tolist() == [3] and values.tolist() == [1.0]  # a resumed run repeats steps: the last row counts
    assert training_plots.learning_curves(rows[:2], None) == []
    assert training_plots.learning_curves([{"step": 1, "loss": 0.0, "lr": 0.0}], None)


def test_a_long_history_makes_a_small_svg() -> None:
    rows = [{"step": step, "loss": 1 / (1 + step), "lr": 1e-4} for step in range(20_000)]
    assert len(training_plots.learning_curves(rows, None)[0]) < 100_000


def file_texts(path: Path) -> list[str]:
    return [element.text or "" for element in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")]


def test_training_curves_are_a_standalone_file(tmp_path: Path) -> None:
    events = [{"step": 120, "event": "3 steps were skipped <&>"}]
    training_plots.draw_training_curves([*HISTORY, *events], tmp_path / "curves.svg")
    found = file_texts(tmp_path / "curves.svg")
    assert {"Loss", "Accuracy", "Learning rate", "Images per second", "validation", "training"} <= set(found)
    assert "step 120: 3 steps were skipped <&>" in found
    text = (tmp_path / "curves.svg").read_text()
    assert canvas.INK not in text and "currentColor" in text and "prefers-color-scheme: dark" in text
    training_plots.draw_training_curves([*HISTORY, *events], tmp_path / "curves.png")
    with Image.open(tmp_path / "curves.png") as picture:
        pixels = np.asarray(picture.convert("RGB"))
        assert picture.width >= 1600
    for hue in (canvas.BLUE, canvas.RED, canvas.GREEN):  # training, validation, learning rate
        assert (pixels == [int(hue[at : at + 2], 16) for at in (1, 3, 5)]).all(-1).sum() > 100
    assert sorted(path.name for path in tmp_path.iterdir()) == ["curves.png", "curves.svg"]


def test_events_are_marked_in_every_panel(tmp_path: Path) -> None:
    def dotted(events: int) -> int:
        rows = [{"step": 10 * number, "event": f"event {number}"} for number in range(1, events + 1)]
        training_plots.draw_training_curves([*HISTORY, *rows], tmp_path / f"{events}.svg")
        return (tmp_path / f"{events}.svg").read_text().count("stroke-dasharray")

    assert dotted(0) == 0 and dotted(2) == 4 * 2 and dotted(9) == 4 * 9
    events = [text for text in file_texts(tmp_path / "9.svg") if "event" in text or "more" in text]
    assert events == ["step 10: event 1", "step 20: event 2", "step 30: event 3", "and 6 more in metrics.jsonl"]


def test_curves_with_few_values(tmp_path: Path) -> None:
    training_plots.draw_training_curves([], tmp_path / "none.svg")
    training_plots.draw_training_curves(
        [{"step": 3, "event": "stopped"}, {"step": 3, "loss": None}], tmp_path / "none.png"
    )
    assert not list(tmp_path.iterdir())
    training_plots.draw_training_curves([{"step": 5, "val_map": 0.5}], tmp_path / "one.svg")
    found = file_texts(tmp_path / "one.svg")
    assert "validation mean average precision" in found and "Loss" not in found
    rows = [{"step": step, "loss": 1 / (1 + step), "lr": 1e-4} for step in range(20_000)]
    training_plots.draw_training_curves(rows, tmp_path / "long.svg")
    assert (tmp_path / "long.svg").stat().st_size < 150_000


def test_the_coverage_plot_shows_the_target() -> None:
    rng = np.random.default_rng(0)
    confidence = rng.uniform(0.3, 1, 400)
    curve = risk_coverage_curve(confidence, rng.random(400) < confidence)
    assert any("target 95.0" in text for text in texts(plots.coverage_plot(curve, 400, 0.95)))
    assert not any("target" in text for text in texts(plots.coverage_plot(curve, 400)))
    one = risk_coverage_curve(np.array([0.5]), np.array([False]))
    assert "Accuracy" in texts(plots.coverage_plot(one, 1))


def test_only_small_matrices_show_counts() -> None:
    confusion = np.array([[123, 4], [0, 77]])
    assert {"123", "4", "77", "cat", "dog"} <= set(texts(plots.confusion_matrix(confusion, ["cat", "dog"])))
    large = plots.confusion_matrix(np.full((30, 30), 123), [f"c{i}" for i in range(30)])
    assert "123" not in texts(large) and "c29" in texts(large)


def test_a_large_matrix_shows_the_most_confused_classes() -> None:
    confusion = np.diag(np.full(300, 10))
    confusion[250, 7], confusion[3, 299], confusion[4, 5] = 6, 6, 1
    confusion[3, 3] = 0  # the same number of errors, but a larger fraction of its class
    assert plots.most_confused_classes(confusion).tolist() == [3, 4, 5, 7, 250, 299]
    assert plots.confused_pairs(confusion).tolist() == [[3, 299], [250, 7], [4, 5]]
    assert len(plots.most_confused_classes(np.ones((300, 300), dtype=int))) == 20
    assert plots.most_confused_classes(np.diag(np.full(300, 10))).size == 0
    assert "c250" in texts(plots.confusion_matrix(confusion, [f"c{i}" for i in range(300)]))


def test_class_names_are_not_interpreted() -> None:
    names = ["<script>&", "$x_2^{y}$", "#010203", "\x00\x1b\ud800", "日本語", "W" * 200]
    found = texts(plots.confusion_matrix(np.eye(6, dtype=int), names))
    assert {"<script>&", "$x_2^{y}$", "#010203", "···", "日本語", "W" * 19 + "…"} <= set(found)


@pytest.mark.filterwarnings("error")
def test_drawing_is_deterministic_and_changes_no_settings() -> None:
    before = dict(matplotlib.rcParams)
    first, second = (plots.confusion_matrix(np.eye(3, dtype=int), ["日", "b", "c"]) for _ in range(2))
    assert first == second
    assert dict(matplotlib.rcParams) == before


def test_pyplot_is_not_imported() -> None:
    code = "import sys, vitrail.report.page; sys.exit('matplotlib.pyplot' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
