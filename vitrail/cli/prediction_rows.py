"""Rows of `vitrail predict` as text, JSON lines or CSV, written as they come."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, TextIO

from rich.console import Console

from vitrail import strict_json
from vitrail.data.files import NOT_FOUND
from vitrail.data.formats import NOT_SUPPORTED, extension_of, format_counts
from vitrail.spreadsheet import SafeCsvWriter
from vitrail.terminal import escape, make_console, printable, printable_json

if TYPE_CHECKING:
    from vitrail.commands.predict import Row


def print_rows(
    batches: Iterable[list[Row]], form: str, top: int, console: Console | None = None
) -> tuple[int, list[str]]:
    """Print each batch as it comes; returns how many images have no prediction, and sentences that count them by kind.
    `top`: classes in a row."""
    missing, foreign, broken = Counter[str](), Counter[str](), Counter[str]()

    def watched() -> Iterator[list[Row]]:
        for rows in batches:
            for row in rows:
                if row.error is not None:
                    absent, not_read = row.error.startswith(NOT_FOUND), row.error.startswith(NOT_SUPPORTED)
                    counts = missing if absent else foreign if not_read else broken
                    counts[extension_of(row.file) or "no ending"] += 1
            yield rows
            sys.stdout.flush()

    match form:
        case "json":
            _jsonl(watched(), sys.stdout)
        case "csv":
            _csv(watched(), sys.stdout, top)
        case _:
            _text(watched(), console or make_console())
    kinds = {"missing": missing, "of formats that are not read": foreign, "broken": broken}
    failed = sum(counts.total() for counts in kinds.values())
    return failed, [f"{counts.total():,} {kind}: {format_counts(counts)}" for kind, counts in kinds.items() if counts]


def _text(batches: Iterator[list[Row]], console: Console) -> None:
    for row in (row for rows in batches for row in rows):
        if row.prediction is None:
            console.print(f"{escape(row.file)}  [red]{escape(row.error or '')}[/]")
            continue
        found = row.prediction
        given = dict(zip(found.labels, found.probabilities, strict=True))
        label = ", ".join(f"[bold]{escape(name)}[/] {p:.1%}" for name, p in given.items())
        rest = "".join(f"  [dim]{escape(name)} {p:.1%}[/]" for name, p in found.top if name not in given)
        console.print(f"{escape(row.file)}  {label or f'[bold]{found.label}[/]'}{rest}")


def _jsonl(batches: Iterator[list[Row]], out: TextIO) -> None:
    for row in (row for rows in batches for row in rows):
        values: dict[str, object] = {"file": row.file}
        if row.prediction is None:
            values["error"] = row.error
        else:
            found = row.prediction
            known = bool(found.labels)  # else no class is likely enough
            values |= {"label": found.label if known else None, "probability": found.probability if known else None}
            values |= {"top": [{"label": name, "probability": p} for name, p in found.top]}
            values |= {"labels": list(found.labels), "probabilities": list(found.probabilities)}
        out.write(printable_json(strict_json.dumps(values, ensure_ascii=False)) + "\n")


def _csv(batches: Iterator[list[Row]], out: TextIO, top: int) -> None:
    """Of several labels, their probabilities stand in one cell as they do. More than one class to show are columns.
    Control characters are shown as escapes: the rows may go to a terminal."""
    table = SafeCsvWriter(out)
    more = [f"{name}_{place}" for place in range(1, top + 1) for name in ("top", "probability")] if top > 1 else []
    table.writerow(["file", "label", "probability", *more, "error"])
    for row in (row for rows in batches for row in rows):
        if row.prediction is None:
            table.writerow([printable(row.file), "", "", *[""] * len(more), printable(row.error or "")])
        else:
            found = row.prediction
            chances = ", ".join(f"{p:.6f}" for p in found.probabilities)
            ranked = [cell for name, p in found.top for cell in (printable(name), f"{p:.6f}")] if more else []
            table.writerow([printable(row.file), printable(found.label), chances, *ranked, ""])
