"""The model card has the numbers of the report, in Markdown that is safe with any name."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.report.test_page import EVIL, SINGLE, bare, full, tags
from vitrail.metrics.tuning import tune
from vitrail.report.model_card import model_card, write_model_card
from vitrail.report.page import ReportFacts, render_report
from vitrail.tasks.result import percent


def tables(text: str) -> list[list[list[str]]]:
    """Return the cells of every table, header first. Fails if a name breaks a row."""
    found = []
    for block in text.split("\n\n"):
        if block.startswith("|"):
            rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in block.splitlines()]
            assert len({len(row) for row in rows}) == 1 and set(rows[1]) == {"---"}
            found.append([rows[0], *rows[2:]])
    return found


def two_column_rows(facts: ReportFacts) -> dict[str, str]:
    """Return the second cell of every two-column row by the first."""
    return {row[0]: row[1] for table in tables(model_card(facts)) for row in table if len(row) == 2}


def test_the_card_has_the_numbers_of_the_report() -> None:
    facts = replace(
        bare(["cat", "dog", "owl"], n=200),
        split_used="Measured on 200 images of the test split.",
        card=[("data fingerprint", "0123abc"), ("preprocessing", "resized to 32x32 px"), ("licence", "Apache 2.0")],
        notes=["Two classes have few images."],
        data=[("test", "200 images")],
    )
    card, page = model_card(facts), render_report(facts)
    scores = facts.result.scores
    low, high = map(percent, scores.top1_interval)
    rows = two_column_rows(facts)
    assert rows[f"top-1 accuracy, {low} to {high}"] == percent(scores.top1)
    assert rows["data fingerprint"] == "0123abc" and rows["data: test"] == "200 images"
    for value in (percent(scores.top1), low, high, percent(scores.balanced_accuracy), f"{scores.nll:.3f}"):
        assert value in card and value in page
    assert "Measured on 200 images of the test split." in card and "* Two classes have few images." in card
    assert "Classes: cat, dog, owl." in card
    classes = next(table for table in tables(card) if table[0][0] == "class")
    recalls = {one.name: percent(one.recall) for one in scores.per_class}
    assert {row[0]: row[1] for row in classes[1:]} == recalls


@pytest.mark.parametrize("first", range(len(EVIL)))
def test_names_are_escaped(first: int, tmp_path: Path) -> None:
    names = [*EVIL[first:], *EVIL[:first], "a | b", "*bold* _it_ [x](http://y) `c`", "line\nbreak", "# head"]
    write_model_card(tmp_path / "model_card.md", full(names))
    text = (tmp_path / "model_card.md").read_text(encoding="utf-8")
    assert "<script>" not in text.replace("\\<script", "") and "\0" not in text
    assert "](" not in text.replace("\\](", "") and "*bold" not in text.replace("\\*bold", "")
    assert [line for line in text.splitlines() if line.startswith("# ")] == [text.splitlines()[5]]  # the title alone
    assert tables(text)


def test_commands_do_not_contain_private_folders() -> None:
    commands = [
        ["vitrail", "evaluate", "/home/anna/my runs/birds/model.safetensors", "/data/birds"],
        ["vitrail", "predict", "hf-hub:owner/name", "photo.jpg"],
    ]
    text = model_card(replace(bare(["cat", "dog"]), commands=commands))
    assert "    vitrail evaluate model.safetensors birds\n    vitrail predict hf-hub:owner/name photo.jpg" in text
    assert "anna" not in text


def test_the_result_of_tuning_is_in_the_card() -> None:
    rng = np.random.default_rng(0)
    labels = rng.integers(3, size=400)
    logits = 4 * (rng.normal(size=(400, 3)) + 2 * np.eye(3)[labels])
    facts = bare(["cat", "dog", "owl"], n=400)
    assert "coverage" not in model_card(facts)
    found = tune(logits, labels, 0.9)
    result = SINGLE.result(replace(facts.result.scores, tuned=found))
    text = model_card(replace(facts, result=result, label_errors=(), num_label_errors=7))
    rows = next(table for table in tables(text) if table[0][0] == "coverage")
    assert rows[1][:2] == [percent(1.0), percent(found.coverage.accuracy[-1])]
    shares = [float(row[0].split("\u202f")[0]) for row in rows[1:]]
    assert shares == sorted(shares, reverse=True) and min(shares) * 4 >= 30
    assert found.abstention is not None and f"a threshold of {found.abstention.threshold:.3f}" in text
    assert "* 7 of 400 labels" in text


def test_multilabel() -> None:
    text = model_card(tags())
    assert "for each of 3 labels whether an image has it" in text
    assert "mean average precision" in text and "top-1" not in text
