"""A model card in Markdown, from the facts of the report: what weights are, what for, how good, and their limits."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from vitrail.metrics.accuracy import Scores
from vitrail.metrics.multilabel import TagScores
from vitrail.report.page import ReportFacts, calibration_text, worst_first, write_whole
from vitrail.report.summary import percent, summarise, suspicion_sentence
from vitrail.report.tuning import abstention_sentence, answered_rows

CLASSES_NAMED = 200
WEAKEST = 10
FRONT = """---
library_name: vitrail
pipeline_tag: image-classification
---"""


def write_model_card(path: str | Path, facts: ReportFacts) -> None:
    """Write the card; an existing file is replaced only by a complete one."""
    write_whole(path, model_card(facts), "the model card")


def model_card(facts: ReportFacts) -> str:
    scores, names = facts.scores, [one.name for one in facts.scores.per_class]
    parts = [
        FRONT,
        f"# {_plain(facts.title)}",
        f"{_plain(facts.subtitle)}.",
        "## What it is for",
        _purpose(scores, len(names)),
        f"Classes: {_list(names)}",
        "## How good it is",
        *_measured(facts),
        "## Limits",
        _bullets(_limits(facts)),
        "## How it was made",
        _table(
            ("what", "value"), [*facts.card, *((f"data: {name}", value) for name, value in facts.data), *facts.cost]
        ),
        *([_table(("choice", "value", "why"), facts.decisions)] if facts.decisions else []),
        *(["Use it, repeat it:", "\n".join(_command(one) for one in facts.commands)] if facts.commands else []),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _purpose(scores: Scores | TagScores, count: int) -> str:
    if isinstance(scores, TagScores):
        answer = f"It says of each of {count:,} labels whether an image has it."
        beyond = "It knows no other labels."
    else:
        answer = f"It gives an image one of {count:,} classes, with a probability."
        beyond = "An image of something else gets one of these classes too, unless a threshold is set."
    return (
        f"{answer} {beyond} It is meant for images like those it was measured on; for others, measure it again with "
        "`vitrail evaluate`."
    )


def _measured(facts: ReportFacts) -> Iterator[str]:
    scores = facts.scores
    summary = summarise(scores, facts.reliability, facts.baseline)
    yield _plain(facts.split_used)
    low, high = map(percent, summary.interval)
    rows = [(f"{summary.what}, {low} to {high}", percent(summary.number))]
    yield _table(
        ("measure, with its 95 % interval", "value"), [*rows, *((what, value) for value, what in summary.stats)]
    )
    yield _plain(" ".join([*summary.verdict, calibration_text(facts)]))
    if isinstance(scores, Scores) and scores.tuned is not None:
        answered = answered_rows(scores.tuned.coverage, scores.n)
        if len(answered) > 1:
            shown = [(*map(percent, (one.share, one.right, one.at_least)), f"{one.threshold:.3f}") for one in answered]
            head = ("answering only", "right", "at least (95 %)", "from")
            at = f"From: the lowest probability that is answered, at a temperature of {scores.tuned.temperature:.3g}."
            yield _table(head, shown)
            yield f"{at} {_plain(abstention_sentence(scores))}".rstrip()
    weakest = sorted(scores.per_class, key=worst_first)[:WEAKEST]
    few = "" if len(scores.per_class) <= WEAKEST else f", the weakest {WEAKEST} of {len(scores.per_class):,}"
    yield f"By class{few}:"
    yield _table(
        ("class", "recall", "precision", "images"),
        [(one.name, percent(one.recall), percent(one.precision), f"{one.count:,}") for one in weakest],
    )


def _limits(facts: ReportFacts) -> list[str]:
    scores = facts.scores
    told = ["Intervals say what other images of the same kind would change, and nothing about images of another kind."]
    if facts.suspected and isinstance(scores, Scores):
        told.append(suspicion_sentence(facts.suspected, scores.n, scores.top1))
    return [*told, *facts.notes]


def _plain(text: str) -> str:
    """Text that Markdown leaves as it is, on one line."""
    return re.sub(r"([\\`*_\[\]<>|#~])", r"\\\1", " ".join(str(text).splitlines()))


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - CLASSES_NAMED:,} more" if len(names) > CLASSES_NAMED else ""
    return ", ".join(map(_plain, names[:CLASSES_NAMED])) + more + "."


def _bullets(sentences: Sequence[str]) -> str:
    return "\n".join(f"* {_plain(one)}" for one in sentences)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *(list(map(_plain, row)) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _command(words: Sequence[str]) -> str:
    """As typed in the folder of the card: of a path its last name, since the rest tells about a machine."""
    short = [Path(word).name if "/" in word and ":" not in word else word for word in words]
    return "    " + " ".join(shlex.join(short).splitlines())
