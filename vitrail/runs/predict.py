"""`vitrail predict`: labels for files and folders."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch
from rich.console import Console
from rich.markup import escape

from vitrail.config import Size
from vitrail.errors import UserError, did_you_mean
from vitrail.images.files import is_image_name
from vitrail.infer.predict import Classifier, Prediction, load
from vitrail.runs.show import make_console

BATCH = 32


@dataclass(frozen=True)
class Row:
    """One file's outcome: a prediction, or the reason there is none."""

    file: str
    prediction: Prediction | None
    error: str | None


def predict(
    weights: str | Path,
    images: Sequence[str | Path],
    *,
    top: int = 1,
    threshold: float = 0.0,
    form: str = "table",
    image_size: Size | None = None,
    device: str = "auto",
    console: Console | None = None,
) -> int:
    """Print a label for every image; returns how many could not be read."""
    files = list(image_files(images))
    if not files:
        raise UserError(f"no images in {', '.join(map(str, images))}")
    classifier = load(weights, image_size=image_size, device=device)
    rows = predict_files(classifier, files, top, threshold)
    write = {"table": _table, "json": _jsonl, "csv": _csv}[form]
    return write(rows, sys.stdout, console or make_console())


def image_files(paths: Sequence[str | Path]) -> Iterator[Path]:
    """Files as given; folders as the images below them, in order, hidden ones left out."""
    for path in map(Path, paths):
        if path.is_dir():
            below = (p for p in sorted(path.rglob("*")) if is_image_name(p.name) and p.is_file())
            yield from (p for p in below if not any(part.startswith(".") for part in p.relative_to(path).parts))
        elif path.exists():
            yield path
        else:
            siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
            raise UserError(f"{path} does not exist{did_you_mean(path.name, siblings)}")


def predict_files(classifier: Classifier, files: Sequence[Path], top: int, threshold: float) -> Iterator[Row]:
    """A row per file, in order; a file that cannot be read does not stop the others."""
    for start in range(0, len(files), BATCH):
        group = files[start : start + BATCH]
        pixels, errors = [], {}
        for file in group:
            try:
                pixels.append(classifier.pixels(file))
            except UserError as error:
                errors[file] = str(error).removeprefix(f"{file}: ")
        found = iter(classifier.predict_pixels(torch.stack(pixels), top, threshold) if pixels else [])
        for file in group:
            yield Row(str(file), None, errors[file]) if file in errors else Row(str(file), next(found), None)


def _table(rows: Iterator[Row], _: TextIO, console: Console) -> int:
    failed = 0
    for row in rows:
        if row.prediction is None:
            failed += 1
            console.print(f"{escape(row.file)}  [red]{escape(row.error or '')}[/]")
            continue
        best, *others = row.prediction.top
        rest = "".join(f"  [dim]{escape(name)} {p:.1%}[/]" for name, p in others)
        label = f"[bold]{escape(row.prediction.label)}[/] {best[1]:.1%}"
        console.print(f"{escape(row.file)}  {label}{rest}")
    return failed


def _jsonl(rows: Iterator[Row], out: TextIO, _: Console) -> int:
    failed = 0
    for row in rows:
        failed += row.prediction is None
        values: dict[str, object] = {"file": row.file}
        if row.prediction is None:
            values["error"] = row.error
        else:
            top = [{"label": name, "probability": p} for name, p in row.prediction.top]
            values |= {"label": row.prediction.label, "probability": row.prediction.probability, "top": top}
        out.write(json.dumps(values, ensure_ascii=False) + "\n")
    return failed


def _csv(rows: Iterator[Row], out: TextIO, _: Console) -> int:
    failed = 0
    table = csv.writer(out)
    table.writerow(["file", "label", "probability", "error"])
    for row in rows:
        failed += row.prediction is None
        if row.prediction is None:
            table.writerow([row.file, "", "", row.error])
        else:
            table.writerow([row.file, row.prediction.label, f"{row.prediction.probability:.6f}", ""])
    return failed
