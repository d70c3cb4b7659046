"""Images -> Parquet shards that vitrail reads fast and other libraries read too (the Hugging Face image layout).

A shard is written whole or not at all, with a side file that says where its images lie, so packing that was stopped
goes on with the next shard.
"""

from __future__ import annotations

import hashlib
import io
import json
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vitrail import strict_json
from vitrail.atomic import whole_file
from vitrail.data.decode import BadImage, decode
from vitrail.data.samples import LabelSets, Texts
from vitrail.data.scan import Progress, Scan, scan, threads
from vitrail.data.sources.catalogue import Catalogue, class_list
from vitrail.data.sources.packed import FORMAT, INDEX, MANIFEST, UNFINISHED, VERSION, Index, read_packed
from vitrail.data.sources.parquetfile import ParquetFile
from vitrail.data.sources.shards import origin_of
from vitrail.data.traits import Trait
from vitrail.errors import UserError

ROWS = 256  # images in a row group


@dataclass(frozen=True)
class PackOptions:
    max_pixels: int
    resize: int | None = None  # the shorter side is made this long where it is longer; none: bytes stay as they are
    quality: int = 95  # of the JPEGs written for resized images
    shard_bytes: int = 256_000_000


@dataclass(frozen=True)
class _Shard:
    file: str
    split: str
    rows: list[int]


class Packing:
    """One folder being packed."""

    def __init__(self, source: Catalogue, found: Scan, out: Path, options: PackOptions):
        usable = [row for row in range(len(source.entries)) if row not in found.problems]
        self.left_out = source.unreadable + [(source.entries[row].name, why) for row, why in found.problems.items()]
        self.source, self.out, self.options = source.keep(usable), out, options
        self.scan = found.rows(usable)
        self.classes = class_list(source, None, source.files.identity[0])
        self.shards = _plan(self.source, options.shard_bytes)

    @property
    def order(self) -> list[int]:
        """Rows of the source in the order of the shards."""
        return [row for shard in self.shards for row in shard.rows]

    def key(self) -> str:
        """The same for the same images, labels and options: what a stopped packing may go on with."""
        told = [asdict(self.options), self.classes, [asdict(shard) for shard in self.shards]]
        whole = hashlib.blake2b(json.dumps(told).encode(), digest_size=16)
        for row, labels in enumerate(self.source.labels):
            said = [column[row] for column in (self.source.groups, self.source.weights) if column is not None]
            text = f"{self.source.entries[row].name}\0{labels}\0{said}"
            whole.update(text.encode("utf-8", "surrogateescape") + self.scan.digests[row].tobytes())
        return whole.hexdigest()

    def begin(self) -> int:
        """Make the folder, or find what an earlier call left in it; returns how many shards are there already."""
        marker = self.out / UNFINISHED
        if marker.is_file():
            if _key_in(marker) != self.key():
                raise UserError(
                    f"'{self.out}' holds the beginning of another packing: remove it or name another folder"
                )
        elif self.out.is_file():
            raise UserError(f"'{self.out}' is a file: name a folder to write")
        elif self.out.exists() and any(self.out.iterdir()):
            raise UserError(f"'{self.out}' is not empty: name a new folder, or remove it")
        else:
            self.out.mkdir(parents=True, exist_ok=True)
            with whole_file(marker) as temporary:
                temporary.write_text(json.dumps({"format": FORMAT, "key": self.key()}), encoding="utf-8")
        for shard in self.shards:
            if self._side(shard).is_file() and not self._is_whole(shard):
                self._side(shard).unlink()
        return sum(self._side(shard).is_file() for shard in self.shards)

    def _is_whole(self, shard: _Shard) -> bool:
        """Whether a shard is still as it was written: its side file says how that was."""
        try:
            with np.load(self._side(shard), allow_pickle=False) as side:
                return str(side["blake2b"]) == _digest(self.out / shard.file) and len(side["sums"]) == len(shard.rows)
        except Exception:  # damaged, or one of the two is missing: the shard is written again
            return False

    def write(self, progress: Callable[[int, int], None]) -> None:
        """Write the shards that are missing."""
        total, done = len(self.source.entries), 0
        with threads() as pool:
            for shard in self.shards:
                if not self._side(shard).is_file():
                    for row in self._write_shard(shard, pool):
                        progress(done + row, total)
                done += len(shard.rows)
                progress(done, total)

    def finish(self, notes: list[str], scanned: Progress | None) -> dict[str, Any]:
        """Index and manifest; with them the folder is whole. Returns the manifest."""
        order = self.order
        source = self.source.keep(order)
        sides = [np.load(self._side(shard), allow_pickle=False) for shard in self.shards]
        number = {name: index for index, name in enumerate(self.classes)}
        offsets, lengths, sums = (
            np.concatenate([side[key] for side in sides]) for key in ("offsets", "lengths", "sums")
        )
        for side in sides:
            side.close()  # Windows cannot remove an open file
        index = Index(
            offsets,
            lengths,
            sums,
            LabelSets.of([[number[name] for name in labels] for labels in source.labels]),
            Texts.of(origin_of(entry.name) for entry in source.entries),
            Texts.of(source.groups or [""] * len(order)),
            np.array(source.weights or np.ones(len(order)), np.float64),
            self.scan.rows(order),
        )
        manifest = self._manifest(notes)
        _write_json(self.out / MANIFEST, manifest)
        self._write_index(index)
        if self.options.resize is not None:  # the images are new ones: look at each, and so read all back
            packed = read_packed(self.out, [])
            seen = scan(packed.files, packed.entries, self.options.max_pixels, scanned)
            if seen.problems:
                row, why = next(iter(seen.problems.items()))
                raise UserError(f"'{packed.entries[row].name}' in '{self.out}' cannot be read back: {why}")
            first = index.scan.first_digests, index.scan.first_pixels
            seen = replace(seen, first_digests=first[0], first_pixels=first[1])
            self._write_index(replace(index, scan=seen))
        for shard in self.shards:
            self._side(shard).unlink()
        (self.out / UNFINISHED).unlink()  # last: from here on the folder counts as whole
        return manifest

    def _manifest(self, notes: list[str]) -> dict[str, Any]:
        shards = [
            {
                "file": shard.file,
                "split": shard.split,
                "images": len(shard.rows),
                "bytes": (self.out / shard.file).stat().st_size,
                "blake2b": _digest(self.out / shard.file),
            }
            for shard in self.shards
        ]
        return {
            "format": FORMAT,
            "version": VERSION,
            "classes": self.classes,
            "several": self.source.several,
            "options": asdict(self.options),
            "shards": shards,
            "left_out": self.left_out,
            "notes": notes,
        }

    def _write_index(self, index: Index) -> None:
        with whole_file(self.out / INDEX) as temporary:
            index.write(temporary)

    def _side(self, shard: _Shard) -> Path:
        return self.out / f".{shard.file}.npz"

    def _write_shard(self, shard: _Shard, pool: ThreadPoolExecutor) -> Iterator[int]:
        """Write one shard and then its side file; yields how many images are in it so far."""
        import pyarrow
        import pyarrow.parquet

        path, sums = self.out / shard.file, []
        with whole_file(path) as temporary:
            schema = self._schema()
            options: dict[str, Any] = {"compression": "NONE", "use_dictionary": False, "write_statistics": False}
            with pyarrow.parquet.ParquetWriter(temporary, schema, **options) as writer:
                for start in range(0, len(shard.rows), ROWS):
                    rows = shard.rows[start : start + ROWS]
                    images = list(pool.map(self._image, rows))
                    sums += [zlib.crc32(image) for image in images]
                    writer.write_table(pyarrow.Table.from_pydict(self._columns(rows, images), schema), ROWS)
                    yield start + len(rows)
        places = ParquetFile(path).places("image.bytes")
        assert places is not None, "an image was not found in the shard it was just written to"
        side: dict[str, Any] = {"offsets": places[0], "lengths": places[1], "sums": np.array(sums, np.uint32)}
        with whole_file(self._side(shard)) as temporary, temporary.open("wb") as file:
            np.savez(file, **side, blake2b=np.array(_digest(path)))

    def _image(self, row: int) -> bytes:
        """The encoded image to store: as it is, or smaller."""
        name = self.source.entries[row].name
        try:
            data = self.source.files.read(name)
            if hashlib.blake2b(data, digest_size=16).digest() != self.scan.digests[row].tobytes():
                raise OSError("it changed in the meantime")
            side = self.options.resize
            if side is None or self.scan.shapes[row].min() <= side:
                return data
            channels = 4 if self.scan.traits[row] & Trait.ALPHA else 3
            image = decode(data, channels=channels, max_pixels=self.options.max_pixels)
            return _smaller(image, side, self.options.quality)
        except (OSError, BadImage) as error:
            raise UserError(
                f"'{name}' cannot be packed: {error}; mend it or remove it, and give the command again"
            ) from None

    def _columns(self, rows: list[int], images: list[bytes]) -> dict[str, list[Any]]:
        number = {name: index for index, name in enumerate(self.classes)}
        labels = [[number[name] for name in self.source.labels[row]] for row in rows]
        columns: dict[str, list[Any]] = {
            "image": [
                {"bytes": image, "path": origin_of(self.source.entries[row].name).encode("utf-8", "replace").decode()}
                for row, image in zip(rows, images, strict=True)
            ],
            "label": labels if self.source.several else [own[0] for own in labels],
        }
        if self.source.groups is not None:
            columns["group"] = [self.source.groups[row] for row in rows]
        if self.source.weights is not None:
            columns["weight"] = [self.source.weights[row] for row in rows]
        return columns

    def _schema(self) -> Any:
        import pyarrow as pa

        label: dict[str, Any] = {"names": list(self.classes), "_type": "ClassLabel"}
        features: dict[str, Any] = {"image": {"_type": "Image"}, "label": label}
        fields = [("image", pa.struct([("bytes", pa.binary()), ("path", pa.string())])), ("label", pa.int64())]
        if self.source.several:
            features["label"], fields[1] = {"feature": label, "_type": "List"}, ("label", pa.list_(pa.int64()))
        for name, held, kind, dtype in (
            ("group", self.source.groups, pa.string(), "string"),
            ("weight", self.source.weights, pa.float64(), "float64"),
        ):
            if held is not None:
                fields.append((name, kind))
                features[name] = {"dtype": dtype, "_type": "Value"}
        return pa.schema(fields, {"huggingface": json.dumps({"info": {"features": features}})})


def _plan(source: Catalogue, shard_bytes: int) -> list[_Shard]:
    """Which rows go into which file: each split in its order, cut where a shard is full."""
    shards: list[_Shard] = []
    for split in dict.fromkeys(source.splits):
        parts: list[list[int]] = [[]]
        size = 0
        for row in (row for row, other in enumerate(source.splits) if other == split):
            size += source.entries[row].size
            if parts[-1] and size > shard_bytes:
                parts.append([])
                size = source.entries[row].size
            parts[-1].append(row)
        for number, rows in enumerate(parts):
            shards.append(_Shard(f"{split}-{number:05d}-of-{len(parts):05d}.parquet", split, rows))
    return shards


def _smaller(image: np.ndarray, side: int, quality: int) -> bytes:
    """The upright picture with a shorter side of `side` pixels, by Pillow's antialiased bicubic kernel: as a JPEG, or,
    where pixels can be transparent, as a PNG."""
    height, width = image.shape[:2]
    scale = side / min(height, width)
    size = max(1, round(width * scale)), max(1, round(height * scale))
    file = io.BytesIO()
    smaller = Image.fromarray(image).resize(size, Image.Resampling.BICUBIC)
    if smaller.mode == "RGBA":
        smaller.save(file, "PNG")
    else:
        smaller.save(file, "JPEG", quality=quality)
    return file.getvalue()


def _key_in(marker: Path) -> str:
    try:
        return str(json.loads(marker.read_text(encoding="utf-8"))["key"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _write_json(path: Path, values: dict[str, Any]) -> None:
    with whole_file(path) as temporary:
        temporary.write_text(strict_json.dumps(values, indent=1) + "\n", encoding="utf-8")
