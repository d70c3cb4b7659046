"""The model card in Markdown, with the contents of the report."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from vitrail.report.page import ReportFacts, label_error_sentence, write_text_file
from vitrail.tasks.result import percent

MAX_CLASSES = 200  # class names listed
MAX_CLASS_ROWS = 10  # classes in the table, lowest scores first
FRONT = """---
library_name: vitrail
pipeline_tag: image-classification
---"""


def write_model_card(path: str | Path, facts: ReportFacts) -> None:
    """Write the card. An existing file is replaced only when the new one is complete."""
    write_text_file(path, model_card(facts), "the model card")


def model_card(facts: ReportFacts) -> str:
    """Return the card as Markdown."""
    names = [class_.name for class_ in facts.result.scores.per_class]
    parts = [
        FRONT,
        f"# {_plain(facts.title)}",
        f"{_plain(facts.subtitle)}.",
        "## Intended use",
        f"{facts.result.purpose} Use it on images like those it was evaluated on. For other images, run "
        "`vitrail evaluate` first.",
        f"Classes: {_list(names)}",
        "## Evaluation",
        *_evaluation(facts),
        "## Limitations",
        _bullets(_limitations(facts)),
        "## Training and provenance",
        _table(
            ("property", "value"), [*facts.card, *((f"data: {name}", value) for name, value in facts.data), *facts.cost]
        ),
        *([_table(("automatic choice", "value", "reason"), facts.decisions)] if facts.decisions else []),
        *(["## Reproduce", "\n".join(_command(command) for command in facts.commands)] if facts.commands else []),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _evaluation(facts: ReportFacts) -> Iterator[str]:
    result = facts.result
    scores, selective = result.scores, result.selective
    yield _plain(facts.split_used)
    low, high = map(percent, scores.interval)
    headline = (f"{result.metric}, {low} to {high}", percent(scores.headline))
    yield _table(
        ("metric, with 95 % confidence interval", "value"), [headline, *((what, value) for value, what in result.stats)]
    )
    yield _plain(" ".join([*result.verdict, result.calibration]))
    if selective is not None and len(selective.rows) > 1:
        rows = [
            (*map(percent, (row.coverage, row.accuracy, row.accuracy_lower_bound)), f"{row.threshold:.3f}")
            for row in selective.rows
        ]
        yield _table(("coverage", "accuracy", "lower bound (95 %)", "threshold"), rows)
        yield (
            "Coverage: fraction of images with a prediction. Threshold: lowest accepted probability, at temperature "
            f"{selective.temperature:.3g}. {_plain(selective.sentence)}"
        ).rstrip()
    classes = len(scores.per_class)
    yield f"Per class, lowest {MAX_CLASS_ROWS} of {classes:,}:" if classes > MAX_CLASS_ROWS else "Per class:"
    columns = [column for column in result.columns if column.in_card]
    yield _table(
        ("class", *(column.heading for column in columns), "images"),
        [
            (class_.name, *(percent(getattr(class_, column.key)) for column in columns), f"{class_.count:,}")
            for class_ in result.classes[:MAX_CLASS_ROWS]
        ],
    )


def _limitations(facts: ReportFacts) -> list[str]:
    sentences = ["Confidence intervals hold for images of the same kind, not for images from another source."]
    if facts.num_label_errors:
        sentences.append(label_error_sentence(facts))
    return [*sentences, *facts.notes]


def _plain(text: str) -> str:
    """Escape Markdown and join lines."""
    return re.sub(r"([\\`*_\[\]<>|#~])", r"\\\1", " ".join(str(text).splitlines()))


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_CLASSES:,} more" if len(names) > MAX_CLASSES else ""
    return ", ".join(map(_plain, names[:MAX_CLASSES])) + more + "."


def _bullets(sentences: Sequence[str]) -> str:
    return "\n".join(f"* {_plain(sentence)}" for sentence in sentences)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *(list(map(_plain, row)) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _command(arguments: Sequence[str]) -> str:
    """Return the command as typed in the folder of the card; paths lose their folders, which are private."""
    short = [Path(argument).name if "/" in argument and ":" not in argument else argument for argument in arguments]
    return "    " + " ".join(shlex.join(short).splitlines())
