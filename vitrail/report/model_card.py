"""A model card in Markdown, from the facts of the report: what weights are, what for, how good, and their limits."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from vitrail.report.page import ReportFacts, suspicion_sentence, write_whole
from vitrail.tasks.result import percent

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
    names = [one.name for one in facts.result.scores.per_class]
    parts = [
        FRONT,
        f"# {_plain(facts.title)}",
        f"{_plain(facts.subtitle)}.",
        "## What it is for",
        f"{facts.result.purpose} It is meant for images like those it was measured on; for others, measure it again "
        "with `vitrail evaluate`.",
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


def _measured(facts: ReportFacts) -> Iterator[str]:
    result = facts.result
    scores, less = result.scores, result.selective
    yield _plain(facts.split_used)
    low, high = map(percent, scores.interval)
    rows = [(f"{result.what}, {low} to {high}", percent(scores.headline))]
    yield _table(
        ("measure, with its 95 % interval", "value"), [*rows, *((what, value) for value, what in result.stats)]
    )
    yield _plain(" ".join([*result.verdict, result.calibration]))
    if less is not None and len(less.rows) > 1:
        shown = [(*map(percent, (one.share, one.right, one.at_least)), f"{one.threshold:.3f}") for one in less.rows]
        yield _table(("answering only", "right", "at least (95 %)", "from"), shown)
        at = f"From: the lowest probability that is answered, at a temperature of {less.temperature:.3g}."
        yield f"{at} {_plain(less.sentence)}".rstrip()
    few = "" if len(scores.per_class) <= WEAKEST else f", the weakest {WEAKEST} of {len(scores.per_class):,}"
    yield f"By class{few}:"
    columns = [column for column in result.columns if column.in_card]
    yield _table(
        ("class", *(column.heading for column in columns), "images"),
        [
            (one.name, *(percent(getattr(one, column.key)) for column in columns), f"{one.count:,}")
            for one in result.classes[:WEAKEST]
        ],
    )


def _limits(facts: ReportFacts) -> list[str]:
    told = ["Intervals say what other images of the same kind would change, and nothing about images of another kind."]
    if facts.num_label_errors:
        told.append(suspicion_sentence(facts))
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
