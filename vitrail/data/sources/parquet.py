"""Parquet shards in the Hugging Face image layout: a column of encoded images and a column of labels.

Images are not read through Parquet but by their offset in the file (see `ParquetFile.shard`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vitrail.data.files import Entry
from vitrail.data.sources.data_source import SPLIT_NAMES, UNSPLIT, DataSource, counted, quoted
from vitrail.data.sources.parquetfile import ParquetFile
from vitrail.data.sources.shards import Shard, ShardFiles, row_name
from vitrail.errors import UserError

LABEL_COLUMNS = ("label", "labels", "fine_label", "class", "category")


@dataclass(frozen=True)
class _Columns:
    """The columns of a shard by their use, and the class names if labels are numbers."""

    image: str  # as Parquet calls it: "image.bytes"
    label: str
    multilabel: bool
    names: tuple[str, ...] | None
    group: str | None
    weight: str | None


def is_parquet(path: Path) -> bool:
    """Whether `path` is a .parquet file with encoded images, or a folder of such files."""
    shards = _shard_paths(path)[:1] if path.is_dir() or path.suffix.lower() == ".parquet" else []
    return any(ParquetFile(shard).image_column is not None for shard in shards if shard.is_file())


def read_parquet(path: Path, notes: list[str]) -> DataSource:
    """Return the labelled images of the shards at `path`."""
    root = _folder(path)
    splits = {shard: _split_of(shard.relative_to(root)) for shard in _shard_paths(path)}
    if len(set(splits.values())) > 1 and UNSPLIT in splits.values():
        unsplit = [shard.name for shard, split in splits.items() if split == UNSPLIT]
        notes.append(f"Ignored {counted(len(unsplit), 'shard')} without a split in the name: {quoted(unsplit)}.")
        splits = {shard: split for shard, split in splits.items() if split != UNSPLIT}
    _check_complete(splits)
    columns = _columns(ParquetFile(next(iter(splits))), notes)
    shards: dict[str, Shard] = {}
    images = DataSource(ShardFiles(str(root.absolute()), shards), [], [], [], classes=columns.names)
    groups: list[str] = []
    weights: list[float] = []
    unlabelled = 0
    for file, split in splits.items():
        table, name, stamp = ParquetFile(file), file.relative_to(root).as_posix(), file.stat().st_mtime_ns
        shard = shards[name] = table.shard(columns.image)
        rows = _side_columns(table, columns)
        for row in range(len(shard.offsets)):
            labels = _label_names(rows["label"][row], columns, file)
            if not labels and not columns.multilabel:
                unlabelled += 1
                continue
            image_name = row_name(name, row, rows["origin"][row] or "")
            images.entries.append(Entry(image_name, int(shard.lengths[row]), stamp))
            images.splits.append(split)
            images.labels.append(labels)
            groups.append(str(rows["group"][row] or ""))
            weights.append(_weight(rows["weight"][row], file))
    if unlabelled:
        notes.append(f"Ignored {counted(unlabelled, 'image')} without a label.")
    if not images.entries:
        raise UserError(f"'{path}' has no labelled images")
    classes = images.classes
    if classes is None and all(re.fullmatch(r"\d+", name) for labels in images.labels for name in labels):
        numbers = {int(name) for labels in images.labels for name in labels}
        classes = tuple(str(number) for number in sorted(numbers))  # 2 before 10
    return replace(
        images,
        classes=classes,
        multilabel=columns.multilabel,
        groups=groups if columns.group else None,
        weights=weights if columns.weight else None,
    )


def read_images(path: Path) -> tuple[ShardFiles, list[str]]:
    """Return every image of the shards at `path`, labelled or not, in order."""
    root = _folder(path)
    shards: dict[str, Shard] = {}
    for file in _shard_paths(path):
        table = ParquetFile(file)
        shards[file.relative_to(root).as_posix()] = table.shard(_image_column(table))
    names = [row_name(name, row, "") for name, shard in shards.items() for row in range(len(shard.offsets))]
    return ShardFiles(str(root.absolute()), shards), names


def _folder(path: Path) -> Path:
    return path if path.is_dir() else path.parent


def _shard_paths(path: Path) -> list[Path]:
    """Return the file itself; or the shards in a folder, in its `data` folder and in folders named after splits."""
    if not path.is_dir():
        return [path]
    folders = [path, path / "data", *(path / name for name in sorted(SPLIT_NAMES))]
    return [file for folder in folders for file in sorted(folder.glob("*.parquet")) if not file.name.startswith(".")]


def _image_column(table: ParquetFile) -> str:
    if table.image_column is None:
        raise UserError(f"'{table.path}' has no column of encoded images; its columns are {quoted(table.titles, 8)}")
    return table.image_column


def _check_complete(paths: Iterable[Path]) -> None:
    """Raise UserError if a shard is missing: train-00000-of-00003.parquet is one of three."""
    numbers: dict[tuple[str, int], set[int]] = {}
    for path in paths:
        if match := re.fullmatch(r"(.*?)(\d+)-of-(\d+)\.parquet", path.name):
            numbers.setdefault((f"{path.parent}/{match[1]}", int(match[3])), set()).add(int(match[2]))
    for (stem, total), present in numbers.items():
        if len(present) < total:
            missing = min(set(range(total)) - present)
            raise UserError(
                f"shard number {missing} of the {total} shards '{stem}...' is missing; copy it, or rename the others"
            )


def _split_of(path: Path) -> str:
    """Return the split of a shard: train-00000-of-00003.parquet and train/0000.parquet are "train"."""
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
        notes.append(f"Used the label column '{label}'; other label columns: {quoted(set(labels) - {label})}.")
    class_names = _inner(features.get(label, {})).get("names")
    names = tuple(map(str, class_names)) if class_names else None
    group, weight = (name if name in titles else None for name in ("group", "weight"))
    return _Columns(image, label, table.holds_lists(label), names, group, weight)


def _inner(feature: Any) -> dict[str, Any]:
    """Return the feature itself, or the feature of the values in a list."""
    if isinstance(feature, list):
        feature = feature[0] if feature else {}
    if isinstance(feature, dict) and isinstance(feature.get("feature"), dict):
        feature = feature["feature"]
    return feature if isinstance(feature, dict) else {}


def _weight(value: Any, path: Path) -> float:
    if value is None:
        return 1.0
    if not isinstance(value, int | float) or not (math.isfinite(value) and value >= 0):
        raise UserError(f"'{path}' has the weight '{value}'; a weight must be a number, at least 0")
    return float(value)


def _side_columns(table: ParquetFile, columns: _Columns) -> dict[str, list[Any]]:
    wanted = {"label": columns.label, "group": columns.group, "weight": columns.weight}
    struct, _, _ = columns.image.rpartition(".bytes")
    read = table.columns([name for name in wanted.values() if name] + ([f"{struct}.path"] if struct else []))
    missing = [name for name in wanted.values() if name and name not in read]
    if missing:
        raise UserError(f"'{table.path}' has no column '{missing[0]}', but the first shard has it")
    empty = [None] * table.rows
    origins = [(row or {}).get("path") for row in read[struct]] if struct in read else empty
    return {"origin": origins, **{use: read[name] if name else empty for use, name in wanted.items()}}


def _label_names(value: Any, columns: _Columns, path: Path) -> tuple[str, ...]:
    """Return the labels as names; none for a missing or negative label, as unlabelled test images have."""
    names = []
    for label in value if isinstance(value, list) else [value]:
        if label is None or label == "" or (isinstance(label, int) and label < 0):
            continue
        if columns.names is not None and isinstance(label, int):
            if label >= len(columns.names):
                raise UserError(f"'{path}' has the label {label}, but names for only {len(columns.names)} classes")
            names.append(str(columns.names[label]))
        else:
            names.append(str(label))
    return tuple(sorted(set(names)))
