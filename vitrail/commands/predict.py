"""`vitrail predict`: labels for files, folders, archives, tables and shards."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

import torch
from rich.console import Console

from vitrail import strict_json
from vitrail.config import Size
from vitrail.data.files import ABSENT
from vitrail.data.formats import NOT_READ, READ_HERE, ending_of, told
from vitrail.errors import UserError
from vitrail.inference.classifier import NOT_FINITE, Classifier, load
from vitrail.spreadsheet import SafeTable
from vitrail.terminal import escape, make_console, visible, visible_json
from vitrail.workflows.inputs import Item, Row, find_images, opened

BATCH = 32


def predict(
    weights: str | Path,
    images: Sequence[str | Path],
    *,
    top: int = 1,
    threshold: float | None = None,
    form: str = "table",
    image_size: Size | None = None,
    follow_links: bool = True,
    device: str = "auto",
    console: Console | None = None,
) -> int:
    """Print a label for every image; returns how many could not be read. What was ignored beside them, and what kinds
    of files failed, goes to standard error."""
    classifier = load(weights, image_size=image_size, device=device)
    notes: list[str] = []
    found = list(find_images(images, notes, follow_links))
    if not found:
        there = f" ({' '.join(notes)})" if notes else ""
        raise UserError(f"no images in {', '.join(map(str, images))}{there}; vitrail reads {READ_HERE}")
    failures = Failures()
    rows = failures.watch(predict_items(classifier, found, top, threshold))
    match form:
        case "json":
            failed = _jsonl(rows, sys.stdout)
        case "csv":
            failed = _csv(rows, sys.stdout, min(top, len(classifier.classes)))
        case _:
            failed = _table(rows, console or make_console())
    remarks = make_console(stderr=True)
    for note in [*notes, *failures.sentences()]:
        remarks.print(note, markup=False)
    return failed


class Failures:
    """The rows without a prediction: files that are not there, pictures of formats that are not read, broken ones."""

    def __init__(self) -> None:
        self.kinds: dict[str, Counter[str]] = {"missing": Counter(), "of formats that are not read": Counter()}
        self.kinds["broken"] = Counter()

    def watch(self, rows: Iterator[Row]) -> Iterator[Row]:
        for row in rows:
            if row.error is not None:
                missing, foreign = row.error.startswith(ABSENT), row.error.startswith(NOT_READ)
                kind = "missing" if missing else "of formats that are not read" if foreign else "broken"
                self.kinds[kind][ending_of(row.file) or "no ending"] += 1
            yield row

    def sentences(self) -> list[str]:
        """One for each kind there is, with the endings of the files."""
        return [f"{counts.total():,} {kind}: {told(counts)}" for kind, counts in self.kinds.items() if counts]


def predict_items(
    classifier: Classifier, found: Sequence[Item | Row], top: int, threshold: float | None
) -> Iterator[Row]:
    """A row per image, in order; one that cannot be read does not stop the others."""
    for start in range(0, len(found), BATCH):
        group = [opened(classifier, item) if isinstance(item, Item) else item for item in found[start : start + BATCH]]
        pixels = [item[1] for item in group if isinstance(item, tuple)]
        predictions = iter(classifier.predict_pixels(torch.stack(pixels), top, threshold) if pixels else [])
        for item in group:
            if isinstance(item, tuple):
                answer = next(predictions)
                yield Row(item[0], answer, None if answer else NOT_FINITE)
            else:
                yield item


def _table(rows: Iterator[Row], console: Console) -> int:
    failed = 0
    for row in rows:
        if row.prediction is None:
            failed += 1
            console.print(f"{escape(row.file)}  [red]{escape(row.error or '')}[/]")
            continue
        found = row.prediction
        given = dict(zip(found.labels, found.probabilities, strict=True))
        label = ", ".join(f"[bold]{escape(name)}[/] {p:.1%}" for name, p in given.items())
        rest = "".join(f"  [dim]{escape(name)} {p:.1%}[/]" for name, p in found.top if name not in given)
        console.print(f"{escape(row.file)}  {label or f'[bold]{found.label}[/]'}{rest}")
    return failed


def _jsonl(rows: Iterator[Row], out: TextIO) -> int:
    failed = 0
    for row in rows:
        failed += row.prediction is None
        values: dict[str, object] = {"file": row.file}
        if row.prediction is None:
            values["error"] = row.error
        else:
            found = row.prediction
            known = bool(found.labels)  # else no class is likely enough
            values |= {"label": found.label if known else None, "probability": found.probability if known else None}
            values |= {"top": [{"label": name, "probability": p} for name, p in found.top]}
            values |= {"labels": list(found.labels), "probabilities": list(found.probabilities)}
        out.write(visible_json(strict_json.dumps(values, ensure_ascii=False)) + "\n")
    return failed


def _csv(rows: Iterator[Row], out: TextIO, top: int) -> int:
    """Of several labels, their probabilities stand in one cell as they do. More than one class to show are columns.
    Control characters are shown as escapes: the rows may go to a terminal."""
    failed = 0
    table = SafeTable(out)
    more = [f"{name}_{place}" for place in range(1, top + 1) for name in ("top", "probability")] if top > 1 else []
    table.row(["file", "label", "probability", *more, "error"])
    for row in rows:
        failed += row.prediction is None
        if row.prediction is None:
            table.row([visible(row.file), "", "", *[""] * len(more), visible(row.error or "")])
        else:
            found = row.prediction
            chances = ", ".join(f"{p:.6f}" for p in found.probabilities)
            ranked = [cell for name, p in found.top for cell in (visible(name), f"{p:.6f}")] if more else []
            table.row([visible(row.file), visible(found.label), chances, *ranked, ""])
    return failed
