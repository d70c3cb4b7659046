"""Prints the rows of `vitrail predict` as text, JSON lines or CSV, batch by batch."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, TextIO

from rich.console import Console

from vitrail import strict_json
from vitrail.data.files import NOT_FOUND
from vitrail.data.formats import UNSUPPORTED_FORMAT, extension_of, format_counts
from vitrail.spreadsheet import SafeCsvWriter
from vitrail.terminal import escape, make_console, printable, printable_json

if TYPE_CHECKING:
    from vitrail.commands.predict import Row


def print_rows(
    batches: Iterable[list[Row]], output_format: str, top: int, console: Console | None = None
) -> tuple[int, list[str]]:
    """Print each batch when it is ready, with `top` classes per row.

    Returns the number of images without a prediction, and a summary line for each kind of error.
    """
    missing, foreign, broken = Counter[str](), Counter[str](), Counter[str]()

    def count_errors() -> Iterator[list[Row]]:
        for rows in batches:
            for row in rows:
                if row.error is not None:
                    absent, not_read = row.error.startswith(NOT_FOUND), row.error.startswith(UNSUPPORTED_FORMAT)
                    counts = missing if absent else foreign if not_read else broken
                    counts[extension_of(row.file) or "no extension"] += 1
            yield rows
            sys.stdout.flush()

    match output_format:
        case "json":
            _jsonl(count_errors(), sys.stdout)
        case "csv":
            _csv(count_errors(), sys.stdout, top)
        case _:
            _text(count_errors(), console or make_console())
    kinds = {"missing": missing, "in unsupported formats": foreign, "unreadable": broken}
    failed = sum(counts.total() for counts in kinds.values())
    return failed, [f"{counts.total():,} {kind}: {format_counts(counts)}" for kind, counts in kinds.items() if counts]


def _text(batches: Iterator[list[Row]], console: Console) -> None:
    for row in (row for rows in batches for row in rows):
        if row.prediction is None:
            console.print(f"{escape(row.file)}  [red]{escape(row.error or '')}[/]")
            continue
        prediction = row.prediction
        labels = dict(zip(prediction.labels, prediction.probabilities, strict=True))
        label = ", ".join(f"[bold]{escape(name)}[/] {p:.1%}" for name, p in labels.items())
        rest = "".join(f"  [dim]{escape(name)} {p:.1%}[/]" for name, p in prediction.top if name not in labels)
        console.print(f"{escape(row.file)}  {label or f'[bold]{prediction.label}[/]'}{rest}")


def _jsonl(batches: Iterator[list[Row]], out: TextIO) -> None:
    for row in (row for rows in batches for row in rows):
        values: dict[str, object] = {"file": row.file}
        if row.prediction is None:
            values["error"] = row.error
        else:
            prediction = row.prediction
            has_label = bool(prediction.labels)  # False: no class reaches the threshold
            values |= {
                "label": prediction.label if has_label else None,
                "probability": prediction.probability if has_label else None,
            }
            values |= {"top": [{"label": name, "probability": p} for name, p in prediction.top]}
            values |= {"labels": list(prediction.labels), "probabilities": list(prediction.probabilities)}
        out.write(printable_json(strict_json.dumps(values, ensure_ascii=False)) + "\n")


def _csv(batches: Iterator[list[Row]], out: TextIO, top: int) -> None:
    """Write CSV. The labels of a multilabel image share one cell, and so do their probabilities.

    Control characters are escaped, since the rows may be printed on a terminal.
    """
    table = SafeCsvWriter(out)
    extra = [f"{name}_{rank}" for rank in range(1, top + 1) for name in ("top", "probability")] if top > 1 else []
    table.writerow(["file", "label", "probability", *extra, "error"])
    for row in (row for rows in batches for row in rows):
        if row.prediction is None:
            table.writerow([printable(row.file), "", "", *[""] * len(extra), printable(row.error or "")])
        else:
            prediction = row.prediction
            probabilities = ", ".join(f"{p:.6f}" for p in prediction.probabilities)
            ranked = [cell for name, p in prediction.top for cell in (printable(name), f"{p:.6f}")] if extra else []
            table.writerow([printable(row.file), printable(prediction.label), probabilities, *ranked, ""])
