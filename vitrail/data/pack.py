"""Pack images into Parquet shards that vitrail reads fast and other libraries can read (the Hugging Face image layout).

Each shard is written whole or not at all, with a side file that has the offsets of its images. So an interrupted
packing resumes with the next shard.
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
from vitrail.atomic import atomic_write
from vitrail.data.decode import BadImage, decode
from vitrail.data.samples import LabelSets, Texts
from vitrail.data.scan import Progress, ScanResult, scan, threads
from vitrail.data.sources.data_source import DataSource, class_list
from vitrail.data.sources.packed import FORMAT, INDEX, MANIFEST, UNFINISHED, VERSION, Index, read_packed
from vitrail.data.sources.parquetfile import ParquetFile
from vitrail.data.sources.shards import original_name
from vitrail.data.traits import Trait
from vitrail.errors import UserError

ROW_GROUP = 256  # images


@dataclass(frozen=True)
class PackOptions:
    """How images are packed."""

    max_pixels: int
    resize: int | None = None  # the shorter side of larger images becomes this long; None: bytes are unchanged
    quality: int = 95  # of resized JPEGs
    shard_bytes: int = 256_000_000


@dataclass(frozen=True)
class _Shard:
    file: str
    split: str
    rows: list[int]


class Packer:
    """Packs images into one folder."""

    def __init__(self, source: DataSource, scanned: ScanResult, out: Path, options: PackOptions):
        usable = [row for row in range(len(source.entries)) if row not in scanned.problems]
        self.skipped = source.unreadable + [(source.entries[row].name, why) for row, why in scanned.problems.items()]
        self.source, self.out, self.options = source.keep(usable), out, options
        self.scan = scanned.rows(usable)
        self.classes = class_list(source, None, source.files.identity[0])
        self.shards = _plan(self.source, options.shard_bytes)

    @property
    def order(self) -> list[int]:
        """The rows of the source in the order of the shards."""
        return [row for shard in self.shards for row in shard.rows]

    def key(self) -> str:
        """Return a digest of the images, labels and options: an interrupted packing can resume if it is the same."""
        plan = [asdict(self.options), self.classes, [asdict(shard) for shard in self.shards]]
        digest = hashlib.blake2b(json.dumps(plan).encode(), digest_size=16)
        for row, labels in enumerate(self.source.labels):
            values = [column[row] for column in (self.source.groups, self.source.weights) if column is not None]
            text = f"{self.source.entries[row].name}\0{labels}\0{values}"
            digest.update(text.encode("utf-8", "surrogateescape") + self.scan.digests[row].tobytes())
        return digest.hexdigest()

    def begin(self) -> int:
        """Make the folder, or resume in it; return the number of shards that are already written."""
        marker = self.out / UNFINISHED
        if marker.is_file():
            if _key_in(marker) != self.key():
                raise UserError(
                    f"'{self.out}' has an unfinished packing of other data or options; remove it or use another folder"
                )
        elif self.out.is_file():
            raise UserError(f"'{self.out}' is a file; use a new folder")
        elif self.out.exists() and any(self.out.iterdir()):
            raise UserError(f"'{self.out}' is not empty; use a new folder, or remove it")
        else:
            self.out.mkdir(parents=True, exist_ok=True)
            with atomic_write(marker) as temporary:
                temporary.write_text(json.dumps({"format": FORMAT, "key": self.key()}), encoding="utf-8")
        for shard in self.shards:
            if self._side(shard).is_file() and not self._is_complete(shard):
                self._side(shard).unlink()
        return sum(self._side(shard).is_file() for shard in self.shards)

    def _is_complete(self, shard: _Shard) -> bool:
        """Whether a shard is unchanged since it was written, by the digest in its side file."""
        try:
            with np.load(self._side(shard), allow_pickle=False) as side:
                return str(side["blake2b"]) == _digest(self.out / shard.file) and len(side["sums"]) == len(shard.rows)
        except Exception:  # a damaged or missing file: write the shard again
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

    def finish(self, notes: list[str], progress: Progress | None) -> dict[str, Any]:
        """Write the index and the manifest, which complete the folder; return the manifest."""
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
            Texts.of(original_name(entry.name) for entry in source.entries),
            Texts.of(source.groups or [""] * len(order)),
            np.array(source.weights or np.ones(len(order)), np.float64),
            self.scan.rows(order),
        )
        manifest = self._manifest(notes)
        _write_json(self.out / MANIFEST, manifest)
        self._write_index(index)
        if self.options.resize is not None:  # the packed images are new: scan them, which also reads all of them back
            packed = read_packed(self.out, [])
            scanned = scan(packed.files, packed.entries, self.options.max_pixels, progress)
            if scanned.problems:
                row, reason = next(iter(scanned.problems.items()))
                raise UserError(f"'{packed.entries[row].name}' in '{self.out}' cannot be read back: {reason}")
            originals = index.scan.original_digests, index.scan.original_pixel_digests
            scanned = replace(scanned, original_digests=originals[0], original_pixel_digests=originals[1])
            self._write_index(replace(index, scan=scanned))
        for shard in self.shards:
            self._side(shard).unlink()
        (self.out / UNFINISHED).unlink()  # last: without this file the folder counts as complete
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
            "multilabel": self.source.multilabel,
            "options": asdict(self.options),
            "shards": shards,
            "skipped": self.skipped,
            "notes": notes,
        }

    def _write_index(self, index: Index) -> None:
        with atomic_write(self.out / INDEX) as temporary:
            index.write(temporary)

    def _side(self, shard: _Shard) -> Path:
        return self.out / f".{shard.file}.npz"

    def _write_shard(self, shard: _Shard, pool: ThreadPoolExecutor) -> Iterator[int]:
        """Write one shard and then its side file; yield the number of images written so far."""
        import pyarrow
        import pyarrow.parquet

        path, sums = self.out / shard.file, []
        with atomic_write(path) as temporary:
            schema = self._schema()
            options: dict[str, Any] = {"compression": "NONE", "use_dictionary": False, "write_statistics": False}
            with pyarrow.parquet.ParquetWriter(temporary, schema, **options) as writer:
                for start in range(0, len(shard.rows), ROW_GROUP):
                    rows = shard.rows[start : start + ROW_GROUP]
                    images = list(pool.map(self._image, rows))
                    sums += [zlib.crc32(image) for image in images]
                    writer.write_table(pyarrow.Table.from_pydict(self._columns(rows, images), schema), ROW_GROUP)
                    yield start + len(rows)
        written = ParquetFile(path).find_offsets("image.bytes")
        assert written is not None, "an image was not found in the shard that was just written"
        side: dict[str, Any] = {"offsets": written[0], "lengths": written[1], "sums": np.array(sums, np.uint32)}
        with atomic_write(self._side(shard)) as temporary, temporary.open("wb") as file:
            np.savez(file, **side, blake2b=np.array(_digest(path)))

    def _image(self, row: int) -> bytes:
        """Return the encoded image to store, resized if needed."""
        name = self.source.entries[row].name
        try:
            data = self.source.files.read(name)
            if hashlib.blake2b(data, digest_size=16).digest() != self.scan.digests[row].tobytes():
                raise OSError("it has changed since the scan")
            side = self.options.resize
            if side is None or self.scan.shapes[row].min() <= side:
                return data
            channels = 4 if self.scan.traits[row] & Trait.ALPHA else 3
            image = decode(data, channels=channels, max_pixels=self.options.max_pixels)
            return _resized(image, side, self.options.quality)
        except (OSError, BadImage) as error:
            raise UserError(
                f"'{name}' cannot be packed: {error}; repair or remove it and run the command again"
            ) from None

    def _columns(self, rows: list[int], images: list[bytes]) -> dict[str, list[Any]]:
        number = {name: index for index, name in enumerate(self.classes)}
        labels = [[number[name] for name in self.source.labels[row]] for row in rows]
        columns: dict[str, list[Any]] = {
            "image": [
                {
                    "bytes": image,
                    "path": original_name(self.source.entries[row].name).encode("utf-8", "replace").decode(),
                }
                for row, image in zip(rows, images, strict=True)
            ],
            "label": labels if self.source.multilabel else [numbers[0] for numbers in labels],
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
        if self.source.multilabel:
            features["label"], fields[1] = {"feature": label, "_type": "List"}, ("label", pa.list_(pa.int64()))
        for name, column, kind, dtype in (
            ("group", self.source.groups, pa.string(), "string"),
            ("weight", self.source.weights, pa.float64(), "float64"),
        ):
            if column is not None:
                fields.append((name, kind))
                features[name] = {"dtype": dtype, "_type": "Value"}
        return pa.schema(fields, {"huggingface": json.dumps({"info": {"features": features}})})


def _plan(source: DataSource, shard_bytes: int) -> list[_Shard]:
    """Return the shards with their rows: each split in order, with a new shard when one is full."""
    shards: list[_Shard] = []
    for split in dict.fromkeys(source.splits):
        parts: list[list[int]] = [[]]
        size = 0
        for row in (row for row, name in enumerate(source.splits) if name == split):
            size += source.entries[row].size
            if parts[-1] and size > shard_bytes:
                parts.append([])
                size = source.entries[row].size
            parts[-1].append(row)
        for number, rows in enumerate(parts):
            shards.append(_Shard(f"{split}-{number:05d}-of-{len(parts):05d}.parquet", split, rows))
    return shards


def _resized(image: np.ndarray, side: int, quality: int) -> bytes:
    """Return the image resized to a shorter side of `side` pixels with Pillow's antialiased bicubic filter.

    The result is a JPEG, or a PNG if the image has an alpha channel.
    """
    height, width = image.shape[:2]
    scale = side / min(height, width)
    size = max(1, round(width * scale)), max(1, round(height * scale))
    file = io.BytesIO()
    resized = Image.fromarray(image).resize(size, Image.Resampling.BICUBIC)
    if resized.mode == "RGBA":
        resized.save(file, "PNG")
    else:
        resized.save(file, "JPEG", quality=quality)
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
    with atomic_write(path) as temporary:
        temporary.write_text(strict_json.dumps(values, indent=1) + "\n", encoding="utf-8")
