"""`vitrail predict`: labels for files, folders, archives, tables and shards."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch
from rich.console import Console
from torch import Tensor

from vitrail import strict_json
from vitrail.config import Size
from vitrail.errors import UserError, did_you_mean_path, given_path
from vitrail.images.files import ABSENT, GONE, MISSING, Files, FolderFiles, ZipFiles, why_unread
from vitrail.images.formats import NOT_READ, READ_HERE, ending_of, told
from vitrail.images.sources.layout import note_ignored, note_links
from vitrail.images.sources.manifest import is_manifest, read_paths
from vitrail.images.sources.packed import is_packed, read_packed
from vitrail.images.sources.parquet import is_parquet, read_images
from vitrail.infer.predict import NOT_FINITE, Classifier, Prediction, load
from vitrail.runs.show import make_console
from vitrail.spreadsheet import SafeTable
from vitrail.terminal import escape, visible, visible_json

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


def find_images(
    paths: Sequence[str | Path], notes: list[str] | None = None, follow: bool = True
) -> Iterator[Item | Row]:
    """Files as given; folders and archives as the images in them, in order; tables and shards as their rows.

    What looks like a picture and cannot be opened, or is not there and not all that was asked for, is a row that says
    why. What was ignored is noted. Unless `follow`, links in folders are left out.
    """
    notes = [] if notes is None else notes
    for path in map(given_path, paths):
        if is_packed(path):
            packed = read_packed(path, [])
            yield from (Item(entry.name, packed.files, entry.name) for entry in packed.entries)
        elif is_parquet(path):
            yield from _rows(*read_images(path))
        elif is_manifest(path):
            yield from _rows(*read_paths(path))
        elif path.is_dir():
            yield from _listed(path, FolderFiles(str(path.absolute()), follow), notes)
        elif path.suffix.lower() == ".zip" and path.is_file():
            yield from _listed(path, ZipFiles(str(path.absolute())), notes)
        elif path.is_file():
            yield Item(str(path), FolderFiles(str(path.absolute().parent)), path.name)
        elif path.is_symlink() and not path.exists():
            yield Row(str(path), None, f"{MISSING}: a broken link")
        elif path.exists():
            yield Row(str(path), None, "it is not a file")
        elif len(paths) > 1:
            yield Row(str(path), None, f"{GONE}{did_you_mean_path(path)}")
        else:
            raise UserError(f"{path} {GONE}{did_you_mean_path(path)}")


def _rows(files: Files, names: Sequence[str]) -> Iterator[Item]:
    yield from (Item(name, files, name) for name in names)


def _listed(path: Path, files: FolderFiles | ZipFiles, notes: list[str]) -> Iterator[Item | Row]:
    listing = files.list()
    note_ignored(listing, notes)
    note_links(listing, notes)
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
        return Row(item.name, None, why_unread(error))
    except ValueError as error:  # a table names a path with a null character
        return Row(item.name, None, f"cannot be read: {error}")
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
