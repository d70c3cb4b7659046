"""Parquet shards in the Hugging Face image layout: a column of encoded images beside a column of labels.

Images are not read through Parquet, but from where they lie in the file (see `ParquetFile.shard`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vitrail.data.files import Entry
from vitrail.data.sources.image_list import SPLIT_NAMES, UNSPLIT, ImageList, counted, quoted
from vitrail.data.sources.parquetfile import ParquetFile
from vitrail.data.sources.shards import Shard, ShardFiles, row_name
from vitrail.errors import UserError

LABEL_COLUMNS = ("label", "labels", "fine_label", "class", "category")


@dataclass(frozen=True)
class _Columns:
    """Which columns of a shard hold what, and the names of the classes where labels are numbers."""

    image: str  # as Parquet names it: "image.bytes"
    label: str
    multilabel: bool
    names: tuple[str, ...] | None
    group: str | None
    weight: str | None


def is_parquet(place: Path) -> bool:
    """Whether shards lie at `place`: a folder of .parquet files, or one that holds encoded images."""
    paths = _shard_paths(place)[:1] if place.is_dir() or place.suffix.lower() == ".parquet" else []
    return any(ParquetFile(path).image_column is not None for path in paths if path.is_file())


def read_parquet(place: Path, notes: list[str]) -> ImageList:
    root = _folder(place)
    splits = {path: _split_of(path.relative_to(root)) for path in _shard_paths(place)}
    if len(set(splits.values())) > 1 and UNSPLIT in splits.values():
        loose = [path.name for path, split in splits.items() if split == UNSPLIT]
        notes.append(f"Ignored {counted(len(loose), 'shard')} whose name tells no split: {quoted(loose)}.")
        splits = {path: split for path, split in splits.items() if split != UNSPLIT}
    _check_complete(splits)
    columns = _columns(ParquetFile(next(iter(splits))), notes)
    shards: dict[str, Shard] = {}
    found = ImageList(ShardFiles(str(root.absolute()), shards), [], [], [], classes=columns.names)
    groups: list[str] = []
    weights: list[float] = []
    unlabelled = 0
    for path, split in splits.items():
        table, name, written = ParquetFile(path), path.relative_to(root).as_posix(), path.stat().st_mtime_ns
        shard = shards[name] = table.shard(columns.image)
        rows = _side_columns(table, columns)
        for row in range(len(shard.offsets)):
            labels = _names_of(rows["label"][row], columns, path)
            if not labels and not columns.multilabel:
                unlabelled += 1
                continue
            origin = row_name(name, row, rows["origin"][row] or "")
            found.entries.append(Entry(origin, int(shard.lengths[row]), written))
            found.splits.append(split)
            found.labels.append(labels)
            groups.append(str(rows["group"][row] or ""))
            weights.append(_weight(rows["weight"][row], path))
    if unlabelled:
        notes.append(f"Ignored {counted(unlabelled, 'image')} without a label.")
    if not found.entries:
        raise UserError(f"'{place}' has no labelled images")
    return _finished(found, columns, groups, weights)


def read_images(place: Path) -> tuple[ShardFiles, list[str]]:
    """Every image of the shards at `place`, labelled or not, in their order."""
    root = _folder(place)
    shards: dict[str, Shard] = {}
    for path in _shard_paths(place):
        table = ParquetFile(path)
        shards[path.relative_to(root).as_posix()] = table.shard(_image_column(table))
    names = [row_name(name, row, "") for name, shard in shards.items() for row in range(len(shard.offsets))]
    return ShardFiles(str(root.absolute()), shards), names


def _finished(found: ImageList, columns: _Columns, groups: list[str], weights: list[float]) -> ImageList:
    classes = found.classes
    if classes is None and all(re.fullmatch(r"\d+", name) for labels in found.labels for name in labels):
        numbers = {int(name) for labels in found.labels for name in labels}
        classes = tuple(str(number) for number in sorted(numbers))  # 2 before 10
    return replace(
        found,
        classes=classes,
        multilabel=columns.multilabel,
        groups=groups if columns.group else None,
        weights=weights if columns.weight else None,
    )


def _folder(place: Path) -> Path:
    return place if place.is_dir() else place.parent


def _shard_paths(place: Path) -> list[Path]:
    """The file itself; or the shards in a folder, in its `data` folder, or in folders named after splits."""
    if not place.is_dir():
        return [place]
    folders = [place, place / "data", *(place / name for name in sorted(SPLIT_NAMES))]
    return [path for folder in folders for path in sorted(folder.glob("*.parquet")) if not path.name.startswith(".")]


def _image_column(table: ParquetFile) -> str:
    if table.image_column is None:
        raise UserError(f"'{table.path}' has no column of encoded images; its columns are {quoted(table.titles, 8)}")
    return table.image_column


def _check_complete(paths: Iterable[Path]) -> None:
    """train-00000-of-00003.parquet says that there are three: one that is missing would be missed by nobody."""
    told: dict[tuple[str, int], set[int]] = {}
    for path in paths:
        if match := re.fullmatch(r"(.*?)(\d+)-of-(\d+)\.parquet", path.name):
            told.setdefault((f"{path.parent}/{match[1]}", int(match[3])), set()).add(int(match[2]))
    for (stem, number), found in told.items():
        if len(found) < number:
            lost = min(set(range(number)) - found)
            raise UserError(
                f"of the {number} shards '{stem}...' number {lost} is missing: copy it, or rename the others"
            )


def _split_of(path: Path) -> str:
    """train-00000-of-00003.parquet and train/0000.parquet are of the training split."""
    words = [re.split(r"[-_.]", path.name.lower())[0], *(part.lower() for part in path.parts[:-1])]
    return next((SPLIT_NAMES[word] for word in words if word in SPLIT_NAMES), UNSPLIT)


def _columns(table: ParquetFile, notes: list[str]) -> _Columns:
    image, features, titles = _image_column(table), table.features, table.titles
    labels = [name for name in titles if "names" in _inner(features.get(name, {}))]
    labels = labels or [name for name in LABEL_COLUMNS if name in titles]
    if not labels:
        raise UserError(f"'{table.path}' has no column of labels; its columns are {quoted(titles, 8)}")
    label = next((name for name in LABEL_COLUMNS if name in labels), labels[0])
    if len(labels) > 1:
        notes.append(f"The labels are those of the column '{label}'; there are also {quoted(set(labels) - {label})}.")
    stated = _inner(features.get(label, {})).get("names")
    names = tuple(map(str, stated)) if stated else None
    group, weight = (name if name in titles else None for name in ("group", "weight"))
    return _Columns(image, label, table.holds_lists(label), names, group, weight)


def _inner(feature: Any) -> dict[str, Any]:
    """The feature itself, or that of the values of a list."""
    if isinstance(feature, list):
        feature = feature[0] if feature else {}
    if isinstance(feature, dict) and isinstance(feature.get("feature"), dict):
        feature = feature["feature"]
    return feature if isinstance(feature, dict) else {}


def _weight(value: Any, path: Path) -> float:
    if value is None:
        return 1.0
    if not isinstance(value, int | float) or not (math.isfinite(value) and value >= 0):
        raise UserError(f"'{path}' has the weight '{value}'; a weight is a number from 0 up")
    return float(value)


def _side_columns(table: ParquetFile, columns: _Columns) -> dict[str, list[Any]]:
    wanted = {"label": columns.label, "group": columns.group, "weight": columns.weight}
    holder, _, _ = columns.image.rpartition(".bytes")
    read = table.columns([name for name in wanted.values() if name] + ([f"{holder}.path"] if holder else []))
    missing = [name for name in wanted.values() if name and name not in read]
    if missing:
        raise UserError(f"'{table.path}' has no column '{missing[0]}', which the other shards have")
    empty = [None] * table.rows
    origins = [(row or {}).get("path") for row in read[holder]] if holder in read else empty
    return {"origin": origins, **{use: read[name] if name else empty for use, name in wanted.items()}}


def _names_of(value: Any, columns: _Columns, path: Path) -> tuple[str, ...]:
    """Labels as names; none for a missing or negative one, as unlabelled test images have."""
    values = value if isinstance(value, list) else [value]
    names = []
    for one in values:
        if one is None or one == "" or (isinstance(one, int) and one < 0):
            continue
        if columns.names is not None and isinstance(one, int):
            if one >= len(columns.names):
                raise UserError(f"'{path}' has the label {one}, and names for {len(columns.names)} classes only")
            one = columns.names[one]
        names.append(str(one))
    return tuple(sorted(set(names)))
