"""`vitrail predict`: labels for files, folders, archives, tables and shards."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch
from rich.console import Console
from rich.markup import escape
from torch import Tensor

from vitrail import strict_json
from vitrail.config import Size
from vitrail.errors import UserError, did_you_mean_path
from vitrail.images.files import Files, FolderFiles, ZipFiles
from vitrail.images.sources.manifest import is_manifest, read_paths
from vitrail.images.sources.packed import is_packed, read_packed
from vitrail.images.sources.parquet import is_parquet, read_images
from vitrail.infer.predict import NOT_FINITE, Classifier, Prediction, load
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
    classifier = load(weights, image_size=image_size, device=device)
    found = list(find_images(images))
    if not found:
        raise UserError(f"no images in {', '.join(map(str, images))}")
    rows = predict_items(classifier, found, top, threshold)
    match form:
        case "json":
            return _jsonl(rows, sys.stdout)
        case "csv":
            return _csv(rows, sys.stdout, min(top, len(classifier.classes)))
        case _:
            return _table(rows, console or make_console())


def find_images(paths: Sequence[str | Path]) -> Iterator[Item | Row]:
    """Files as given; folders and archives as the images in them, in order; tables and shards as their rows.

    What cannot be opened, or is not there and not all that was asked for, is a row that says why.
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
        elif len(paths) > 1:
            yield Row(str(path), None, f"does not exist{did_you_mean_path(path)}")
        else:
            raise UserError(f"{path} does not exist{did_you_mean_path(path)}")


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
            if isinstance(item, tuple):
                answer = next(predictions)
                yield Row(item[0], answer, None if answer else NOT_FINITE)
            else:
                yield item


def opened(classifier: Classifier, item: Item) -> tuple[str, Tensor] | Row:
    """The name and pixels of an image, or why there are none."""
    try:
        return item.name, classifier.pixels(item.files.read(item.key))
    except OSError as error:
        return Row(item.name, None, f"cannot be read: {error.strerror or error}")
    except UserError as error:
        return Row(item.name, None, str(error).removeprefix("the image: "))


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
        out.write(strict_json.dumps(values, ensure_ascii=False) + "\n")
    return failed


def _csv(rows: Iterator[Row], out: TextIO, top: int) -> int:
    """Of several labels, their probabilities stand in one cell as they do. More than one class to show are columns."""
    failed = 0
    table = csv.writer(out)
    more = [f"{name}_{place}" for place in range(1, top + 1) for name in ("top", "probability")] if top > 1 else []
    table.writerow(["file", "label", "probability", *more, "error"])
    for row in rows:
        failed += row.prediction is None
        if row.prediction is None:
            table.writerow([row.file, "", "", *[""] * len(more), row.error])
        else:
            found = row.prediction
            chances = ", ".join(f"{p:.6f}" for p in found.probabilities)
            ranked = [cell for name, p in found.top for cell in (name, f"{p:.6f}")] if more else []
            table.writerow([row.file, found.label, chances, *ranked, ""])
    return failed
