"""`vitrail predict`: labels for files, folders, archives, tables and shards."""

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
from torch import Tensor

from vitrail.config import Size
from vitrail.errors import UserError, did_you_mean
from vitrail.images.files import Files, FolderFiles, ZipFiles
from vitrail.images.sources.manifest import is_manifest, read_paths
from vitrail.images.sources.packed import is_packed, read_packed
from vitrail.images.sources.parquet import is_parquet, read_images
from vitrail.infer.predict import Classifier, Prediction, load
from vitrail.runs.show import make_console

BATCH = 32


@dataclass(frozen=True)
class Item:
    """An image to label: what the user calls it, and where its bytes are."""

    name: str
    files: Files
    key: str


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
    threshold: float | None = None,
    form: str = "table",
    image_size: Size | None = None,
    device: str = "auto",
    console: Console | None = None,
) -> int:
    """Print a label for every image; returns how many could not be read."""
    found = list(find_images(images))
    if not found:
        raise UserError(f"no images in {', '.join(map(str, images))}")
    classifier = load(weights, image_size=image_size, device=device)
    rows = predict_items(classifier, found, top, threshold)
    write = {"table": _table, "json": _jsonl, "csv": _csv}[form]
    return write(rows, sys.stdout, console or make_console())


def find_images(paths: Sequence[str | Path]) -> Iterator[Item | Row]:
    """Files as given; folders and archives as the images in them, in order; tables and shards as their rows.

    What is there but cannot be opened is a row that says why.
    """
    for path in map(Path, paths):
        if is_packed(path):
            packed = read_packed(path, [])
            yield from (Item(entry.name, packed.files, entry.name) for entry in packed.entries)
        elif is_parquet(path):
            yield from _rows(*read_images(path))
        elif is_manifest(path):
            yield from _rows(*read_paths(path))
        elif path.is_dir():
            yield from _listed(path, FolderFiles(str(path.absolute())))
        elif path.suffix.lower() == ".zip" and path.is_file():
            yield from _listed(path, ZipFiles(str(path.absolute())))
        elif path.is_file():
            yield Item(str(path), FolderFiles(str(path.absolute().parent)), path.name)
        elif path.exists() or path.is_symlink():
            yield Row(str(path), None, "it is not a file")
        else:
            siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
            raise UserError(f"{path} does not exist{did_you_mean(path.name, siblings)}")


def _rows(files: Files, names: Sequence[str]) -> Iterator[Item]:
    yield from (Item(name, files, name) for name in names)


def _listed(path: Path, files: FolderFiles | ZipFiles) -> Iterator[Item | Row]:
    listing = files.list()
    yield from (Item(f"{path / entry.name}", files, entry.name) for entry in listing.images)
    yield from (Row(f"{path / name}", None, reason) for name, reason in listing.unreadable)


def predict_items(
    classifier: Classifier, found: Sequence[Item | Row], top: int, threshold: float | None
) -> Iterator[Row]:
    """A row per image, in order; one that cannot be read does not stop the others."""
    for start in range(0, len(found), BATCH):
        group = [opened(classifier, item) if isinstance(item, Item) else item for item in found[start : start + BATCH]]
        pixels = [item[1] for item in group if isinstance(item, tuple)]
        predictions = iter(classifier.predict_pixels(torch.stack(pixels), top, threshold) if pixels else [])
        for item in group:
            yield Row(item[0], next(predictions), None) if isinstance(item, tuple) else item


def opened(classifier: Classifier, item: Item) -> tuple[str, Tensor] | Row:
    """The name and pixels of an image, or why there are none."""
    try:
        return item.name, classifier.pixels(item.files.read(item.key))
    except OSError as error:
        return Row(item.name, None, f"cannot be read: {error.strerror or error}")
    except UserError as error:
        return Row(item.name, None, str(error).removeprefix("the image: "))


def _table(rows: Iterator[Row], _: TextIO, console: Console) -> int:
    failed = 0
    for row in rows:
        if row.prediction is None:
            failed += 1
            console.print(f"{escape(row.file)}  [red]{escape(row.error or '')}[/]")
            continue
        best, *others = row.prediction.top
        label = f"[bold]{escape(row.prediction.label)}[/]"
        if row.prediction.labels:
            label += f" {best[1]:.1%}"
        else:  # the probability is that of a class, and not of being none
            others = [best, *others]
        rest = "".join(f"  [dim]{escape(name)} {p:.1%}[/]" for name, p in others)
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
            known = bool(row.prediction.labels)  # else no class is likely enough
            values |= {"label": row.prediction.label if known else None, "probability": row.prediction.probability}
            values |= {"top": top, "labels": list(row.prediction.labels)}
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
