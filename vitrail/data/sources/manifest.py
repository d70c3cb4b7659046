"""A table that lists images: a CSV or Parquet file with a path and a label in each row.

| column | holds |
|---|---|
| path (or file, filename, file_name, image) | the image, relative to the table |
| label | one class; or `labels`: several in one cell as cat|dog (Parquet: a list), or none |
| split | train, val or test (optional) |
| group | what belongs together: a patient, a burst of shots; stays on one side of a split (optional) |
| weight | how much the image counts in training, 1 if empty (optional) |
"""

from __future__ import annotations

import csv
import math
import os
import stat
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitrail.data.files import FILE_NOT_FOUND, Entry, FolderFiles
from vitrail.data.sources.image_list import SPLIT_NAMES, UNSPLIT, ImageList, counted, quoted, shorten
from vitrail.data.sources.parquetfile import ParquetFile
from vitrail.errors import UserError, did_you_mean, error_reason
from vitrail.spreadsheet import read_csv_rows, unescape_cell

NAMES = {
    "path": ("path", "file", "filename", "file_name", "filepath", "image", "image_path"),
    "label": ("label", "class", "category"),
    "labels": ("labels", "classes", "tags"),
    "split": ("split", "set", "subset"),
    "group": ("group",),
    "weight": ("weight",),
}
_KEYS = {name: key for key, names in NAMES.items() for name in names}
BETWEEN = "|"  # separates the labels in one cell
HEAVIEST = 1_000_000  # weight
LONGEST = 4_096  # characters of a path or of one label
Table = Mapping[str, Sequence[Any]]  # column -> values, all of one length; none in columns of other names


def is_manifest(place: Path) -> bool:
    return place.is_file() and place.suffix.lower() in (".csv", ".tsv", ".parquet")


def read_paths(place: Path) -> tuple[FolderFiles, list[str]]:
    """Every image that the table at `place` lists, in its order, whatever else it says of them."""
    table = _read_parquet(place) if place.suffix.lower() == ".parquet" else _read_csv(place)
    return FolderFiles(str(place.absolute().parent)), [_text(path) for path in _columns(table, place, [])["path"]]


def read_manifest(place: Path, notes: list[str], follow: bool = True) -> ImageList:
    """The rows of the table at `place` as they stand, in the order of their paths. Unless `follow`, images that links
    lead to are left out."""
    table = _read_parquet(place) if place.suffix.lower() == ".parquet" else _read_csv(place)
    columns = _columns(table, place, notes)
    multilabel = "labels" in columns
    if multilabel and "label" in columns:
        raise UserError(f"'{place}' has both a label and a labels column; keep one of them")
    if not multilabel and "label" not in columns:
        raise UserError(f"'{place}' has no column 'label' or 'labels'; its columns are {quoted(table, 8)}")
    where = f"'{place}'"
    paths = [_text(value) for value in columns["path"]]
    labels = [_labels(value, multilabel) for value in columns["labels" if multilabel else "label"]]
    splits = [_split(value, row, where) for row, value in enumerate(columns["split"])] if "split" in columns else None
    weights = [_weight(v, row, where) for row, v in enumerate(columns["weight"])] if "weight" in columns else None
    groups = [_text(value) for value in columns["group"]] if "group" in columns else None
    for row, (path, own) in enumerate(zip(paths, labels, strict=True)):
        if longest := max((len(text) for text in (path, *own) if len(text) > LONGEST), default=0):
            raise UserError(f"{where} has a path or label of {longest:,} characters in row {_line(row)}: shorten it")
    rows = _rows(paths, labels, splits, multilabel, where, notes)
    files = FolderFiles(str(place.absolute().parent), follow)
    entries, missing = _entries(files, paths, rows)
    rows = [row for row in rows if paths[row] in entries]
    rows.sort(key=lambda row: paths[row])
    if not paths:
        raise UserError(f"{where} has no rows")
    if not rows and not missing:
        raise UserError(f"{where} has no row with a label")
    if not rows:
        first = f"; the first, '{missing[0][0]}': {missing[0][1]}" if missing else ""
        raise UserError(f"{where} lists no image that exists{first}")
    return ImageList(
        files,
        [entries[paths[row]] for row in rows],
        [splits[row] if splits else UNSPLIT for row in rows],
        [labels[row] for row in rows],
        [groups[row] for row in rows] if groups else None,
        [weights[row] for row in rows] if weights else None,
        multilabel=multilabel,
        unreadable=missing,
    )


def _rows(
    paths: list[str],
    labels: list[tuple[str, ...]],
    splits: list[str] | None,
    multilabel: bool,
    where: str,
    notes: list[str],
) -> list[int]:
    """The rows that can be used: one for each path, with a label where one is needed."""
    first: dict[str, int] = {}
    unnamed = [row for row, path in enumerate(paths) if not path]
    if unnamed:
        raise UserError(f"{where} has no path in row {_line(unnamed[0])}")
    repeated, unlabelled = [], []
    for row, path in enumerate(paths):
        if not labels[row] and not multilabel:
            unlabelled.append(path)
            continue
        before = first.setdefault(path, row)
        if before == row:
            continue
        if labels[before] != labels[row]:
            both = f"as {quoted(labels[before]) or 'nothing'} and as {quoted(labels[row]) or 'nothing'}"
            raise UserError(
                f"{where} lists '{path}' twice, {both}; several labels of one image go into one cell of a "
                f"column 'labels', as cat{BETWEEN}dog"
            )
        if splits and splits[before] != splits[row]:
            raise UserError(f"{where} lists '{path}' in the splits {splits[before]} and {splits[row]}; keep one row")
        repeated.append(path)
    for names, what in ((repeated, "rows that repeat another"), (unlabelled, "rows without a label")):
        if names:
            notes.append(f"Ignored {len(names):,} {what}: {quoted(names)}.")
    return list(first.values())


def _entries(files: FolderFiles, paths: list[str], rows: list[int]) -> tuple[dict[str, Entry], list[tuple[str, str]]]:
    """What the file system says of each listed image, and what it does not find."""
    found: dict[str, Entry] = {}
    missing: list[tuple[str, str]] = []
    for row in rows:
        path = paths[row]
        try:
            status = (Path(files.root) / path).stat()
        except (OSError, ValueError) as error:
            reason = error_reason(error)
            missing.append((path, f"{FILE_NOT_FOUND}: {reason}"))
            continue
        if not files.follow and _over_link(files.root, path):
            missing.append((path, "a link leads to it, and --no-follow asked for none"))
            continue
        if stat.S_ISREG(status.st_mode):
            found[path] = Entry(path, status.st_size, status.st_mtime_ns)
        else:
            missing.append((path, "it is not a file"))
    return found, missing


def _over_link(root: str, path: str) -> bool:
    """Whether there is a link among what a table adds to its own folder."""
    place = Path(root).resolve() / path
    return os.path.realpath(place) != os.path.normpath(place)


def _columns(table: Table, place: Path, notes: list[str]) -> dict[str, Sequence[Any]]:
    """The columns vitrail reads, under its own names; others are noted, so that a typing error shows."""
    found: dict[str, Sequence[Any]] = {}
    others = []
    for title, values in table.items():
        key = _key(title)
        if key is None:
            others.append(title)
        elif key in found:
            raise UserError(f"'{place}' has two columns for the {key}; keep one of them")
        else:
            found[key] = values
    if "path" not in found:
        raise UserError(f"'{place}' has no column 'path'; its columns are {quoted(table, 8)}")
    if others:
        notes.append(f"Ignored {counted(len(others), 'column')} of the table: {quoted(others)}.")
    return found


def _read_csv(place: Path) -> dict[str, list[str]]:
    try:
        text = place.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"'{place}' is not UTF-8 text: save it as 'CSV UTF-8'") from None
    except OSError as error:
        raise UserError(f"'{place}' cannot be read: {error_reason(error)}") from None
    rows = read_csv_rows(text)
    try:
        titles = next(rows, None)
        if titles is None:
            raise UserError(f"'{place}' is empty")
        twice = [title for title, number in Counter(titles).items() if number > 1]
        if twice:
            raise UserError(f"'{place}' has two columns '{shorten(twice[0])}'; keep one of them")
        table: dict[str, list[str]] = {title: [] for title in titles}
        read = [(column, table[title]) for column, title in enumerate(titles) if _key(title)]
        for number, row in enumerate(rows):
            if len(row) != len(titles):
                raise UserError(f"'{place}' has {len(row)} cells in row {_line(number)}, and {len(titles)} columns")
            for column, values in read:
                values.append(unescape_cell(row[column]))
    except csv.Error as error:
        raise UserError(f"'{place}' is not a proper CSV table: {error}") from None
    return table


def _key(title: str) -> str | None:
    """What a column of this title holds, if it is read."""
    return _KEYS.get(title.strip().lower())


def _read_parquet(place: Path) -> dict[str, list[Any]]:
    table = ParquetFile(place)
    read = table.columns([title for title in table.titles if _key(title)])
    return {title: read.get(title, []) for title in table.titles}


def _line(row: int) -> int:
    """The number a spreadsheet shows: counted from one, after the titles."""
    return row + 2


def _text(value: Any) -> str:
    return "" if value is None else str(value).strip()


def _labels(value: Any, multilabel: bool) -> tuple[str, ...]:
    if not multilabel:
        name = _text(value)
        return (name,) if name else ()
    parts = value if isinstance(value, list | tuple) else _text(value).split(BETWEEN)
    return tuple(sorted({name for name in map(_text, parts) if name}))


def _split(value: Any, row: int, where: str) -> str:
    name = _text(value).lower()
    if name not in SPLIT_NAMES:
        raise UserError(
            f"{where} has the split '{shorten(_text(value))}' in row {_line(row)}; a split is train, val or test"
            f"{did_you_mean(name, ['train', 'val', 'test'])}"
        )
    return SPLIT_NAMES[name]


def _weight(value: Any, row: int, where: str) -> float:
    text = _text(value)
    try:
        weight = float(text) if text else 1.0
    except ValueError:
        weight = math.nan  # which no comparison holds for
    if not 0 <= weight <= HEAVIEST:
        raise UserError(
            f"{where} has the weight '{shorten(text)}' in row {_line(row)}; a weight is a number from 0 to {HEAVIEST:,}"
        )
    return weight
