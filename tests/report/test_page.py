"""The report is one complete, safe, self-contained page, whatever its contents."""

from __future__ import annotations

import base64
import io
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitrail.metrics.accuracy import score_classification
from vitrail.metrics.multilabel import score_multilabel
from vitrail.metrics.selective import risk_coverage_curve
from vitrail.metrics.tuning import tune, tune_multilabel
from vitrail.report import page
from vitrail.report.page import ReportFacts, ReportImage, label_error_sentence, render_report, write_report
from vitrail.tasks.classification import classification_verdict
from vitrail.tasks.result import coverage_rows, percent
from vitrail.tasks.table import prediction_task

VOID = {"meta", "link", "img", "br", "wbr"}
EVIL = ["<script>alert(1)</script>", "a\"b'c&d", "日本語 ünïcode", "W" * 200, "\x00\ud800", "{{ 1234 * 7 }}"]


class Reader(HTMLParser):
    """Collects tags, and fails on one that closes in the wrong place."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


SINGLE, MULTI = (prediction_task(name, 3) for name in ("classification", "multilabel"))


def bare(classes: list[str], n: int = 60, strength: float = 3.0, seed: int = 0) -> ReportFacts:
    """A report of which only the scores are known."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(len(classes), size=n)
    logits = rng.normal(size=(n, len(classes))) + strength * np.eye(len(classes))[labels]
    result = SINGLE.result(score_classification(logits, labels, classes))
    return ReportFacts("title", "subtitle", result, "Measured on the test split.")


def tags() -> ReportFacts:
    """The same for any number of labels, with thresholds tuned."""
    rng = np.random.default_rng(0)
    truth = rng.random((80, 3)) < 0.4
    logits = rng.normal(size=(80, 3)) + 2 * truth - 3  # a half is too much to ask
    scores = score_multilabel(logits, truth, ["red", "round", "big"])
    scores = replace(scores, tuned=tune_multilabel(logits, truth, np.full(3, 0.5)))
    return ReportFacts("title", "subtitle", MULTI.result(scores), "Measured on the test split.")


def test_a_multilabel_report_has_average_precision_and_no_confusion_matrix() -> None:
    facts = tags()
    scores = facts.result.scores
    words = " ".join("\u202f".join(part.split()) for part in Reader(render_report(facts)).words if part.strip())
    words = words.replace("\u202f", " ").replace(" %", "\u202f%")
    assert f"{percent(scores.mean_ap)} mean average precision" in words
    assert f"score {percent(scores.chance)}" in words
    assert "average precision recall precision" in words and "Confusion matrix" not in words
    assert f"would increase from {percent(scores.tuned.macro_f1_before)} to {percent(scores.tuned.macro_f1)}" in words
    assert "at a threshold of 0.5" in words
    for one in scores.per_class:
        assert f"{one.name} {percent(one.average_precision)} {percent(one.recall)}" in words


def test_thresholds_in_use_are_reported_and_worse_ones_are_not() -> None:
    facts = tags()
    scores = facts.result.scores
    own = [replace(one, threshold=0.3, count=40) for one in scores.per_class]
    worse = replace(scores.tuned, macro_f1=0.3, macro_f1_before=0.5)
    result = MULTI.result(replace(scores, per_class=own, tuned=worse))
    words = " ".join(Reader(render_report(replace(facts, result=result))).words)
    assert "at the threshold of each label" in words and "at a threshold of 0.5" not in words
    assert "interval is too narrow" not in words
    rare = [replace(one, count=4) for one in own]
    words = " ".join(MULTI.result(replace(scores, per_class=rare)).verdict)
    assert "4 images per label" in words and "interval is too narrow" in words
    assert "mean F1" not in words


def picture(size: tuple[int, ...], name: str = "test/cat_1.png", truth: str = "cat") -> ReportImage:
    image = np.random.default_rng(0).integers(256, size=size, dtype=np.uint8)
    return ReportImage(image, name, truth, "dog", 0.93, 0.02)


def with_map(one: ReportImage, why: str) -> ReportImage:
    return replace(one, map=np.random.default_rng(1).integers(256, size=(70, 70, 3), dtype=np.uint8), why=why)


def full(classes: list[str]) -> ReportFacts:
    word, facts = classes[0], bare(classes)
    return replace(
        facts,
        result=SINGLE.result(facts.result.scores, (word, 0.2)),
        title=word,
        subtitle=word,
        split_used=word,
        history=[{"step": 1, "loss": 2.0, "lr": 0.1}, {"step": 2, "val_top1": 0.4, "val_loss": 1.0}],
        confident_errors=[with_map(picture((32, 32, 3), word, word), word), picture((300, 200, 3))],
        least_confident=[picture((40, 40, 1))],
        label_errors=[picture((32, 32, 3), word, word)],
        num_label_errors=5,
        decisions=[(word, word, word)],
        data=[(word, word)],
        excluded=[(f"{word}/{i}", word) for i in range(150)],
        notes=[word],
        cost=[(word, word)],
        config_toml=f'name = "{word}"',
        commands=[["vitrail", "predict", word]],
        card=[(word, word)],
    )


def test_the_page_is_complete_and_loads_nothing(tmp_path: Path) -> None:
    write_report(tmp_path / "report.html", full(["cat", "dog", "owl"]))
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    read = Reader(text)
    assert "http:" not in text and "https:" not in text and "@import" not in text and "url(http" not in text
    for tag, attributes in read.tags:
        for key in ("src", "href", "xlink:href", "srcset", "action"):
            value = attributes.get(key)
            assert value is None or value.startswith(("data:", "#")), (tag, key, value)
    policy = next(a["content"] for tag, a in read.tags if tag == "meta" and a.get("http-equiv"))
    assert policy and policy.startswith("default-src 'none'")
    found = [attributes["id"] for _, attributes in read.tags if "id" in attributes]
    assert len(found) == len(set(found))
    headings = " ".join(read.words)
    for name in (
        "Accuracy",
        "Training curves",
        "Confusion matrix",
        "Per-class",
        "Calibration",
        "Most confident errors",
        "Data",
    ):
        assert name in headings
    assert "Possible label errors" in headings and "5 of 60 labels" in headings
    assert sum(a.get("alt") == "evidence for cat" for tag, a in read.tags if tag == "img") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, len(EVIL)))])
def test_all_text_is_escaped(first: int, tmp_path: Path) -> None:
    classes = EVIL[first:] + EVIL[:first]
    write_report(tmp_path / "report.html", full(classes))
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    read = Reader(text)
    assert sum(tag == "script" for tag, _ in read.tags) == 1 and "<script>alert" not in text
    assert "8638" not in text and "\0" not in text
    assert classes[0].replace("\0", "\ufffd").replace("\ud800", "?") in read.words
    for _, attributes in read.tags:
        assert not any(key.startswith("on") for key in attributes)


def test_empty_sections_are_omitted() -> None:
    headings = " ".join(Reader(render_report(bare(["cat", "dog"]))).words)
    for name in ("Training curves", "Most confident errors", "Least confident", "Cost", "Configuration", "Reproduce"):
        assert name not in headings
    assert "top-5" not in headings


def tuned(n: int, accuracy: float | None = None) -> ReportFacts:
    """A report on an overconfident network."""
    rng = np.random.default_rng(0)
    labels = rng.integers(3, size=n)
    logits = 5 * (rng.normal(size=(n, 3)) + 1.5 * np.eye(3)[labels])
    scores = replace(score_classification(logits, labels, ["cat", "dog", "owl"]), tuned=tune(logits, labels, accuracy))
    return ReportFacts("title", "subtitle", SINGLE.result(scores), "Measured on the test split.")


@pytest.mark.slow
def test_the_result_of_tuning_is_shown() -> None:
    facts = tuned(600, 0.9)
    words = " ".join(" ".join(Reader(render_report(facts)).words).split())
    found = facts.result.scores.tuned
    assert f"temperature of {found.temperature:.3g} would reduce the calibration error" in words
    assert "Selective prediction" in words and f"a threshold of {found.abstention.threshold:.3f} on" in words
    assert f"lowest accepted probability, at temperature {found.temperature:.3g}." in words
    low, high = facts.result.scores.balanced_interval
    assert f"balanced accuracy, {percent(low)} to {percent(high)}".replace("\u202f", " ") in words
    low, high = facts.result.scores.nll_interval
    assert f"log-loss in nats, {low:.3f} to {high:.3f}" in words
    assert "No threshold gives" in " ".join(Reader(render_report(tuned(600, 0.9999))).words)
    assert "Selective prediction" not in render_report(tuned(20))  # too few to say anything


def test_rows_of_selective_prediction_lie_on_the_curve() -> None:
    confidence, correct = np.linspace(1, 0, 200, endpoint=False), np.arange(200) < 120
    rows = coverage_rows(risk_coverage_curve(confidence, correct), 200)
    assert [row.coverage for row in rows] == [1.0, 0.9, 0.75, 0.5, 0.25]  # a tenth are 20 answers, which say nothing
    np.testing.assert_allclose([row.accuracy for row in rows], [0.6, 120 / 180, 0.8, 1, 1])
    assert all(row.accuracy_lower_bound < row.accuracy for row in rows)
    for row in rows:
        assert (confidence >= row.threshold).mean() == pytest.approx(row.coverage)


def test_many_possible_label_errors_are_not_to_be_relied_on() -> None:
    facts = bare(["cat", "dog"], n=1000)
    few, many = (label_error_sentence(replace(facts, num_label_errors=count)) for count in (10, 500))
    assert "10 of 1,000" in few and "500 of 1,000" in many
    assert percent(facts.result.scores.headline) in many and percent(facts.result.scores.headline) not in few


def test_a_class_without_images_has_a_dash_and_comes_last() -> None:
    classes = ["cat", "dog", "owl"]
    labels = np.array([0, 0, 1, 1])
    logits = np.array([[2.0, 1, 0], [0, 2, 1], [0, 2, 1], [1, 2, 0]])
    facts = ReportFacts("t", "s", SINGLE.result(score_classification(logits, labels, classes)), "On four.")
    rows = re.findall(r"<tr><td><span[^>]*>(\w+)</span></td><td data-v", render_report(facts))
    assert rows == ["cat", "dog", "owl"]
    assert "–" in Reader(render_report(facts)).words


@pytest.mark.slow
def test_many_classes_make_a_small_page() -> None:
    text = render_report(bare([f"class {i}" for i in range(300)], n=900))
    assert "The 20 most often confused of 300 classes." in text
    assert len(text) < 500_000
    perfect = render_report(bare([f"class {i}" for i in range(300)], n=900, strength=60))
    assert "No image was assigned to a wrong class." in perfect


def test_small_images_are_exact_and_large_ones_are_scaled_down() -> None:
    def decode(image: np.ndarray) -> Image.Image:
        source = page.image_data_uri(image)
        return Image.open(io.BytesIO(base64.b64decode(source.partition(",")[2])))

    small = picture((32, 24, 3)).image
    np.testing.assert_array_equal(np.asarray(decode(small)), small)
    grey = picture((20, 20, 1)).image
    np.testing.assert_array_equal(np.asarray(decode(grey)), np.repeat(grey, 3, axis=2))
    large = decode(picture((600, 300, 3)).image)
    assert large.format == "JPEG" and large.size == (128, 256)
    assert decode(picture((65, 3, 3)).image).format == "JPEG"


def test_the_verdict_follows_the_intervals() -> None:
    classes = [f"class {i}" for i in range(4)]
    facts = bare(classes, n=200, strength=2.0)
    low, high = facts.result.scores.top1_interval
    words = [
        " ".join(classification_verdict(facts.result.scores, ("a guess", level)))
        for level in (low - 0.2, low, high + 0.01)
    ]
    assert "% fewer errors" in words[0]
    assert "within the confidence interval" in words[1]
    assert "this model is worse" in words[2]
    commonest = max(facts.result.scores.per_class, key=lambda one: one.count)
    assert f"Always predicting “{commonest.name}” would score {percent(commonest.count / 200)}." in words[0]
    low, high = bare(["cat", "dog"], n=100, strength=60).result.scores.top1_interval
    assert high == 1 and 0.95 < low < 0.97  # no mistake in 100 images does not mean that there are none


def test_a_balanced_test_set_is_compared_with_guessing() -> None:
    labels = np.arange(8) % 4
    logits = 3 * np.eye(4)[labels]
    assert f"Guessing would score {percent(0.25)}." in classification_verdict(
        score_classification(logits, labels, list("abcd")), None
    )


def test_an_error_keeps_the_previous_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")

    def broken(facts: ReportFacts) -> str:
        raise RuntimeError("no ink")

    monkeypatch.setattr(page, "render_report", broken)
    with pytest.raises(RuntimeError, match="no ink"):
        write_report(path, bare(["cat", "dog"]))
    assert path.read_text() == "old" and [one.name for one in tmp_path.iterdir()] == ["report.html"]
