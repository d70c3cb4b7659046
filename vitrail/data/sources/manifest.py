"""A table that lists images: a CSV or Parquet file with a path and a label in each row.

| column | content |
|---|---|
| path (or file, filename, file_name, image) | the image, relative to the table |
| label | one class; or `labels`: any number in one cell, as cat|dog (Parquet: a list) |
| split | train, val or test (optional) |
| group | images that stay in one split, such as those of one patient (optional) |
| weight | the weight of the image in training, 1 if empty (optional) |
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
from vitrail.data.sources.data_source import SPLIT_NAMES, UNSPLIT, DataSource, counted, quoted, shorten
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
LABEL_SEPARATOR = "|"
MAX_WEIGHT = 1_000_000
MAX_LENGTH = 4_096  # characters of a path or of one label
Table = Mapping[str, Sequence[Any]]  # column -> values of all rows; empty for columns that are not used


def is_manifest(path: Path) -> bool:
    return path.is_file() and path.suffix.lower() in (".csv", ".tsv", ".parquet")


def read_paths(path: Path) -> tuple[FolderFiles, list[str]]:
    """Return the images that the table at `path` lists, in its order; only the path column is used."""
    table = _read_parquet(path) if path.suffix.lower() == ".parquet" else _read_csv(path)
    return FolderFiles(str(path.absolute().parent)), [_text(value) for value in _columns(table, path, [])["path"]]


def read_manifest(path: Path, notes: list[str], follow: bool = True) -> DataSource:
    """Return the images that the table at `path` lists, sorted by path.

    With `follow=False` images behind links are skipped.
    """
    table = _read_parquet(path) if path.suffix.lower() == ".parquet" else _read_csv(path)
    columns = _columns(table, path, notes)
    multilabel = "labels" in columns
    if multilabel and "label" in columns:
        raise UserError(f"'{path}' has both a 'label' and a 'labels' column; keep one of them")
    if not multilabel and "label" not in columns:
        raise UserError(f"'{path}' has no column 'label' or 'labels'; its columns are {quoted(table, 8)}")
    where = f"'{path}'"
    paths = [_text(value) for value in columns["path"]]
    labels = [_labels(value, multilabel) for value in columns["labels" if multilabel else "label"]]
    splits = [_split(value, row, where) for row, value in enumerate(columns["split"])] if "split" in columns else None
    weights = [_weight(v, row, where) for row, v in enumerate(columns["weight"])] if "weight" in columns else None
    groups = [_text(value) for value in columns["group"]] if "group" in columns else None
    for row, (name, names) in enumerate(zip(paths, labels, strict=True)):
        longest = max(map(len, (name, *names)))
        if longest > MAX_LENGTH:
            raise UserError(
                f"{where} has a path or label of {longest:,} characters in row {_line(row)}; at most {MAX_LENGTH:,} "
                "are allowed"
            )
    rows = _rows(paths, labels, splits, multilabel, where, notes)
    files = FolderFiles(str(path.absolute().parent), follow)
    entries, missing = _entries(files, paths, rows)
    rows = [row for row in rows if paths[row] in entries]
    rows.sort(key=lambda row: paths[row])
    if not paths:
        raise UserError(f"{where} has no rows")
    if not rows and not missing:
        raise UserError(f"{where} has no row with a label")
    if not rows:
        name, reason = missing[0]
        raise UserError(f"{where} lists no image that exists; the first, '{name}': {reason}")
    return DataSource(
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
    """Return the usable rows: one for each path, with a label unless the data is multilabel."""
    first: dict[str, int] = {}
    without_path = [row for row, path in enumerate(paths) if not path]
    if without_path:
        raise UserError(f"{where} has no path in row {_line(without_path[0])}")
    repeated, unlabelled = [], []
    for row, path in enumerate(paths):
        if not labels[row] and not multilabel:
            unlabelled.append(path)
            continue
        before = first.setdefault(path, row)
        if before == row:
            continue
        if labels[before] != labels[row]:
            both = f"{quoted(labels[before]) or 'no label'} and {quoted(labels[row]) or 'no label'}"
            raise UserError(
                f"{where} lists '{path}' twice with different labels: {both}. Keep one row; to give an image "
                f"several labels, put them in one cell of a column 'labels', as cat{LABEL_SEPARATOR}dog"
            )
        if splits and splits[before] != splits[row]:
            raise UserError(f"{where} lists '{path}' in the splits {splits[before]} and {splits[row]}; keep one row")
        repeated.append(path)
    for names, what in ((repeated, "repeated row"), (unlabelled, "unlabelled row")):
        if names:
            notes.append(f"Ignored {counted(len(names), what)}: {quoted(names)}.")
    return list(first.values())


def _entries(files: FolderFiles, paths: list[str], rows: list[int]) -> tuple[dict[str, Entry], list[tuple[str, str]]]:
    """Return the entries of the listed images by path, and the images that cannot be used with the reason."""
    entries: dict[str, Entry] = {}
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
            missing.append((path, "it is behind a link, and --no-follow is set"))
            continue
        if stat.S_ISREG(status.st_mode):
            entries[path] = Entry(path, status.st_size, status.st_mtime_ns)
        else:
            missing.append((path, "it is not a file"))
    return entries, missing


def _over_link(root: str, path: str) -> bool:
    """Whether a path in a table leads over a link below the folder of the table."""
    full_path = Path(root).resolve() / path
    return os.path.realpath(full_path) != os.path.normpath(full_path)


def _columns(table: Table, path: Path, notes: list[str]) -> dict[str, Sequence[Any]]:
    """Return the columns that are used, by their main name. Others are noted, so that a typing error is visible."""
    columns: dict[str, Sequence[Any]] = {}
    ignored = []
    for title, values in table.items():
        key = _key(title)
        if key is None:
            ignored.append(title)
        elif key in columns:
            raise UserError(f"'{path}' has two columns for '{key}'; keep one of them")
        else:
            columns[key] = values
    if "path" not in columns:
        raise UserError(f"'{path}' has no column 'path'; its columns are {quoted(table, 8)}")
    if ignored:
        notes.append(f"Ignored {counted(len(ignored), 'column')} of the table: {quoted(ignored)}.")
    return columns


def _read_csv(path: Path) -> dict[str, list[str]]:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"'{path}' is not UTF-8 text; save it as 'CSV UTF-8'") from None
    except OSError as error:
        raise UserError(f"'{path}' cannot be read: {error_reason(error)}") from None
    rows = read_csv_rows(text)
    try:
        titles = next(rows, None)
        if titles is None:
            raise UserError(f"'{path}' is empty")
        repeated = [title for title, number in Counter(titles).items() if number > 1]
        if repeated:
            raise UserError(f"'{path}' has two columns '{shorten(repeated[0])}'; keep one of them")
        table: dict[str, list[str]] = {title: [] for title in titles}
        read = [(column, table[title]) for column, title in enumerate(titles) if _key(title)]
        for number, row in enumerate(rows):
            if len(row) != len(titles):
                raise UserError(f"'{path}' has {len(row)} cells in row {_line(number)} but {len(titles)} columns")
            for column, values in read:
                values.append(unescape_cell(row[column]))
    except csv.Error as error:
        raise UserError(f"'{path}' is not a valid CSV table: {error}") from None
    return table


def _key(title: str) -> str | None:
    """Return the main name of a column with this title, or None if it is not used."""
    return _KEYS.get(title.strip().lower())


def _read_parquet(path: Path) -> dict[str, list[Any]]:
    table = ParquetFile(path)
    read = table.columns([title for title in table.titles if _key(title)])
    return {title: read.get(title, []) for title in table.titles}


def _line(row: int) -> int:
    """Return the row number that a spreadsheet shows: from one, with the titles."""
    return row + 2


def _text(value: Any) -> str:
    return "" if value is None else str(value).strip()


def _labels(value: Any, multilabel: bool) -> tuple[str, ...]:
    if not multilabel:
        name = _text(value)
        return (name,) if name else ()
    parts = value if isinstance(value, list | tuple) else _text(value).split(LABEL_SEPARATOR)
    return tuple(sorted({name for name in map(_text, parts) if name}))


def _split(value: Any, row: int, where: str) -> str:
    name = _text(value).lower()
    if name not in SPLIT_NAMES:
        raise UserError(
            f"{where} has the split '{shorten(_text(value))}' in row {_line(row)}; a split must be train, val or test"
            f"{did_you_mean(name, ['train', 'val', 'test'])}"
        )
    return SPLIT_NAMES[name]


def _weight(value: Any, row: int, where: str) -> float:
    text = _text(value)
    try:
        weight = float(text) if text else 1.0
    except ValueError:
        weight = math.nan  # fails the comparison below
    if not 0 <= weight <= MAX_WEIGHT:
        raise UserError(
            f"{where} has the weight '{shorten(text)}' in row {_line(row)}; a weight must be from 0 to {MAX_WEIGHT:,}"
        )
    return weight
