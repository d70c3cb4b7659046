"""Read a folder that `vitrail pack` wrote: Parquet shards, and an index of what each image is and where its bytes are.

The index has the scan of every image, so such a folder opens without a scan and without a Parquet library.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from vitrail.data.files import Entry
from vitrail.data.samples import LabelSets, Texts
from vitrail.data.scan import SCAN_COLUMNS, ScanResult
from vitrail.data.sources.data_source import DataSource
from vitrail.data.sources.shards import Shard, ShardFiles, row_name
from vitrail.errors import UserError

MANIFEST, INDEX, UNFINISHED = "manifest.json", "index.npz", "packing.json"
FORMAT, VERSION = "vitrail shards", 2
_RENAMED = {"several": "multilabel", "left_out": "skipped"}  # keys of version 1


@dataclass(frozen=True, eq=False)
class Index:
    """Every image of a packed folder, in the order of the shards."""

    offsets: np.ndarray  # int64 (n,): in its shard
    lengths: np.ndarray  # int64 (n,)
    sums: np.ndarray  # uint32 (n,): CRC-32
    labels: LabelSets
    origins: Texts  # the names of the images before packing
    groups: Texts
    weights: np.ndarray  # float64 (n,)
    scan: ScanResult

    def write(self, path: Path) -> None:
        stored: dict[str, Any] = {key: getattr(self, key) for key in ("offsets", "lengths", "sums", "weights")}
        stored |= {"firsts": self.scan.original_digests, "first_pixels": self.scan.original_pixel_digests}
        for key, texts in (("origins", self.origins), ("groups", self.groups)):
            stored |= {key: np.frombuffer(texts.buffer, np.uint8), f"{key}.starts": texts.starts}
        stored |= {"labels": self.labels.values, "labels.starts": self.labels.starts}
        stored |= {f"scan.{key}": getattr(self.scan, name) for name, key in SCAN_COLUMNS.items()}
        with path.open("wb") as file:
            np.savez(file, **stored)

    @classmethod
    def read(cls, path: Path) -> Index:
        with np.load(path, allow_pickle=False) as file:
            stored = {key: file[key] for key in file.files}
        origins, groups = (Texts(stored[key].tobytes(), stored[f"{key}.starts"]) for key in ("origins", "groups"))
        labels = LabelSets(stored["labels"], stored["labels.starts"])
        # Folders packed by early versions have no digests of pixels.
        scanned = {name: stored[f"scan.{key}"] for name, key in SCAN_COLUMNS.items() if f"scan.{key}" in stored}
        firsts = stored["firsts"]
        pixels = stored.get("first_pixels", np.zeros((len(firsts), 8), np.uint8))
        scan = ScanResult(**scanned, problems={}, original_digests=firsts, original_pixel_digests=pixels)
        offsets, lengths, sums = (stored[key] for key in ("offsets", "lengths", "sums"))
        return cls(offsets, lengths, sums, labels, origins, groups, stored["weights"], scan)


class _ShardFile(BaseModel):
    file: str = Field(pattern=r"^[^/\\\x00]+$")  # in the folder of the manifest, nowhere else
    split: str
    images: int = Field(ge=0)
    bytes: int = Field(ge=0)


class _Manifest(BaseModel):
    """The keys of manifest.json that reading needs."""

    model_config = ConfigDict(strict=True)
    shards: list[_ShardFile]
    classes: list[str]
    notes: list[str]
    multilabel: bool


def is_packed(path: Path) -> bool:
    """Whether `vitrail pack` wrote the folder; raise UserError if it is incomplete."""
    if not path.is_dir():
        return False
    if _is_packed_file(path / UNFINISHED):
        raise UserError(f"'{path}' is only partly packed; run the same `vitrail pack` command again to finish it")
    if (path / INDEX).is_file() and not _is_packed_file(path / MANIFEST):
        raise UserError(f"{MANIFEST} of the packed folder '{path}' is damaged or missing; copy the folder again")
    return _is_packed_file(path / MANIFEST)


def _is_packed_file(path: Path) -> bool:
    """Whether `vitrail pack` wrote this JSON file."""
    try:
        return bool(json.loads(path.read_text(encoding="utf-8")).get("format") == FORMAT)
    except (OSError, ValueError, AttributeError, RecursionError):
        return False


def read_packed(path: Path, notes: list[str]) -> DataSource:
    """Return the images of a packed folder."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        if manifest["version"] == 1:
            manifest = {_RENAMED.get(key, key): value for key, value in manifest.items()}
        elif manifest["version"] != VERSION:
            raise UserError(f"'{path}' was packed by another version of vitrail; pack the data again")
        _Manifest.model_validate(manifest)
        index = Index.read(path / INDEX)
        shards = _shards(path, manifest["shards"], index)
        classes = tuple(manifest["classes"])
        splits = [shard["split"] for shard in manifest["shards"] for _ in range(shard["images"])]
        notes += manifest["notes"]
        return DataSource(
            ShardFiles(str(path.absolute()), shards),
            _entries(manifest["shards"], index),
            splits,
            _labels(index.labels, classes),
            [index.groups[row] for row in range(len(splits))] if len(index.groups.buffer) else None,
            index.weights.tolist() if (index.weights != 1).any() else None,
            classes,
            bool(manifest["multilabel"]),
            scan=index.scan,
        )
    except UserError:
        raise
    except Exception:  # numpy and json raise nearly every kind of error on damaged files
        raise UserError(
            f"{MANIFEST} or {INDEX} in '{path}' is damaged; copy the folder or pack the data again"
        ) from None


def _shards(path: Path, manifest_shards: list[dict[str, Any]], index: Index) -> dict[str, Shard]:
    """Return the shards by file name; raise UserError if one is missing or has the wrong size.

    Single bytes are checked when an image is read.
    """
    shards, start = {}, 0
    for shard in manifest_shards:
        file, rows = path / shard["file"], slice(start, start + shard["images"])
        size = file.stat().st_size if file.is_file() else None
        if size != shard["bytes"]:
            state = "is missing" if size is None else f"has {size:,} bytes instead of {shard['bytes']:,}"
            raise UserError(f"the shard '{file}' {state}; copy the folder or pack the data again")
        shards[shard["file"]] = Shard(str(file.absolute()), index.offsets[rows], index.lengths[rows], index.sums[rows])
        start = rows.stop
    return shards


def _entries(manifest_shards: list[dict[str, Any]], index: Index) -> list[Entry]:
    rows = ((shard["file"], row) for shard in manifest_shards for row in range(shard["images"]))
    return [
        Entry(row_name(file, row, index.origins[number]), int(index.lengths[number]), int(index.sums[number]))
        for number, (file, row) in enumerate(rows)
    ]


def _labels(labels: LabelSets, classes: tuple[str, ...]) -> list[tuple[str, ...]]:
    label_of: dict[tuple[int, ...], tuple[str, ...]] = {}  # one tuple for all images of a class
    sets = (tuple(labels[row].tolist()) for row in range(len(labels.starts) - 1))
    return [label_of.setdefault(numbers, tuple(classes[number] for number in numbers)) for numbers in sets]
