"""Parquet shards in the Hugging Face image layout: a column of encoded images beside a column of labels.

Images are not read through Parquet, which would load whole row groups, but from where they lie in the file (`locate`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vitrail.data.files import Entry
from vitrail.data.sources.catalogue import SPLIT_NAMES, UNSPLIT, Catalogue, count, some
from vitrail.data.sources.locate import locate
from vitrail.data.sources.shards import Shard, ShardFiles, row_name, stamp
from vitrail.errors import UserError

LABEL_COLUMNS = ("label", "labels", "fine_label", "class", "category")


@dataclass(frozen=True)
class _Columns:
    """Which columns of a shard hold what, and the names of the classes where labels are numbers."""

    image: str  # as Parquet names it: "image.bytes"
    label: str
    several: bool
    names: tuple[str, ...] | None
    group: str | None
    weight: str | None


def is_parquet(place: Path) -> bool:
    """Whether shards lie at `place`: a folder of .parquet files, or one that holds encoded images."""
    if place.is_dir():
        return any(_image_column(_open(path)) is not None for path in _shard_paths(place)[:1])
    return place.is_file() and place.suffix.lower() == ".parquet" and _image_column(_open(place)) is not None


def read_parquet(place: Path, notes: list[str]) -> Catalogue:
    paths = _shard_paths(place) if place.is_dir() else [place]
    root = place if place.is_dir() else place.parent
    splits = {path: _split_of(path.relative_to(root)) for path in paths}
    if len(set(splits.values())) > 1 and UNSPLIT in splits.values():
        loose = [path.name for path, split in splits.items() if split == UNSPLIT]
        notes.append(f"Ignored {count(len(loose), 'shard')} whose name tells no split: {some(loose)}.")
        splits = {path: split for path, split in splits.items() if split != UNSPLIT}
    _check_complete(splits)
    columns = _columns(next(iter(splits)), notes)
    shards: dict[str, Shard] = {}
    found = Catalogue(ShardFiles(str(root.absolute()), shards), [], [], [], classes=columns.names)
    groups: list[str] = []
    weights: list[float] = []
    unlabelled = 0
    for path, split in splits.items():
        name = path.relative_to(root).as_posix()
        table = _open(path)
        shard = shards[name] = locate(path, table, columns.image)
        rows = _side_columns(path, table, columns)
        written = stamp(path)
        for row in range(len(shard.offsets)):
            labels = _names_of(rows["label"][row], columns, path)
            if not labels and not columns.several:
                unlabelled += 1
                continue
            found.entries.append(
                Entry(row_name(name, row, rows["origin"][row] or ""), int(shard.lengths[row]), written)
            )
            found.splits.append(split)
            found.labels.append(labels)
            groups.append(str(rows["group"][row] or ""))
            weights.append(_weight(rows["weight"][row], path))
    if unlabelled:
        notes.append(f"Ignored {count(unlabelled, 'image')} without a label.")
    if not found.entries:
        raise UserError(f"'{place}' has no labelled images")
    return _finished(found, columns, groups, weights)


def read_images(place: Path) -> tuple[ShardFiles, list[str]]:
    """Every image of the shards at `place`, labelled or not, in their order."""
    paths = _shard_paths(place) if place.is_dir() else [place]
    root = place if place.is_dir() else place.parent
    shards: dict[str, Shard] = {}
    names: list[str] = []
    for path in paths:
        table, name = _open(path), path.relative_to(root).as_posix()
        column = _image_column(table)
        if column is None:
            raise UserError(f"'{path}' has no column of encoded images")
        shards[name] = locate(path, table, column)
        names += [row_name(name, row, "") for row in range(len(shards[name].offsets))]
    return ShardFiles(str(root.absolute()), shards), names


def _finished(found: Catalogue, columns: _Columns, groups: list[str], weights: list[float]) -> Catalogue:
    classes = found.classes
    if classes is None and all(re.fullmatch(r"\d+", name) for labels in found.labels for name in labels):
        numbers = {int(name) for labels in found.labels for name in labels}
        classes = tuple(str(number) for number in sorted(numbers))  # 2 before 10
    return replace(
        found,
        classes=classes,
        several=columns.several,
        groups=groups if columns.group else None,
        weights=weights if columns.weight else None,
    )


def _shard_paths(place: Path) -> list[Path]:
    """The shards in a folder, in its `data` folder, or in folders named after splits."""
    folders = [place, place / "data", *(place / name for name in sorted(SPLIT_NAMES))]
    return [path for folder in folders for path in sorted(folder.glob("*.parquet")) if not path.name.startswith(".")]


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


def _open(path: Path) -> Any:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(path, memory_map=True)
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"'{path}' cannot be read as Parquet: {str(error).splitlines()[0]}") from None


def _image_column(table: Any) -> str | None:
    """The first column of encoded images, by the name of the bytes in it."""
    import pyarrow.types as types

    for field in table.schema_arrow:
        if types.is_struct(field.type):
            inner = {child.name: child.type for child in field.type}
            if "bytes" in inner and _is_binary(inner["bytes"]):
                return f"{field.name}.bytes"
        elif _is_binary(field.type) and field.name.lower() in ("image", "img", "image_bytes", "jpg", "png"):
            return str(field.name)
    return None


def _is_binary(kind: Any) -> bool:
    import pyarrow.types as types

    return bool(types.is_binary(kind) or types.is_large_binary(kind))


def _columns(path: Path, notes: list[str]) -> _Columns:
    import pyarrow.types as types

    table = _open(path)
    schema = table.schema_arrow
    image = _image_column(table)
    if image is None:
        raise UserError(f"'{path}' has no column of encoded images; its columns are {some(schema.names, 8)}")
    features = _features(schema.metadata)
    labels = [name for name in schema.names if "names" in _inner(features.get(name, {}))]
    labels = labels or [name for name in LABEL_COLUMNS if name in schema.names]
    if not labels:
        raise UserError(f"'{path}' has no column of labels; its columns are {some(schema.names, 8)}")
    label = next((name for name in LABEL_COLUMNS if name in labels), labels[0])
    if len(labels) > 1:
        notes.append(f"The labels are those of the column '{label}'; there are also {some(set(labels) - {label})}.")
    kind = schema.field(label).type
    several = types.is_list(kind) or types.is_large_list(kind)
    stated = _inner(features.get(label, {})).get("names")
    names = tuple(map(str, stated)) if stated else None
    group, weight = ("group" if "group" in schema.names else None), ("weight" if "weight" in schema.names else None)
    return _Columns(image, label, several, names, group, weight)


def _features(metadata: dict[bytes, bytes] | None) -> dict[str, Any]:
    """What the `datasets` library wrote down about the columns."""
    try:
        features = json.loads((metadata or {})[b"huggingface"])["info"]["features"]
    except (KeyError, ValueError, TypeError, RecursionError):
        return {}
    return features if isinstance(features, dict) else {}


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


def _side_columns(path: Path, table: Any, columns: _Columns) -> dict[str, list[Any]]:
    import pyarrow

    wanted = {"label": columns.label, "group": columns.group, "weight": columns.weight}
    holder, _, _ = columns.image.rpartition(".bytes")
    named = [name for name in wanted.values() if name] + ([f"{holder}.path"] if holder else [])
    try:
        read = table.read(columns=named).to_pydict()
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"'{path}' cannot be read as Parquet: {str(error).splitlines()[0]}") from None
    missing = [name for name in wanted.values() if name and name not in read]
    if missing:
        raise UserError(f"'{path}' has no column '{missing[0]}', which the other shards have")
    empty = [None] * table.metadata.num_rows
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
