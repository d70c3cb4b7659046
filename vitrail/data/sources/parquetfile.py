"""The one place that reads Parquet: the columns of a file, and where in it the images lie.

Reading images through Parquet loads whole row groups: 5 to 300 images a second in random order, against tens of
thousands from their places. A file is gone through once and the places are remembered; where images are compressed,
they are unpacked into the cache folder.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.atomic import atomic_write
from vitrail.data.scan import cache_folder
from vitrail.data.sources.shards import Shard
from vitrail.errors import UserError

_VERSION = 1
_IMAGES = ("image", "img", "image_bytes", "jpg", "png")  # columns of bytes that are images, by their names
_Places = tuple[np.ndarray, np.ndarray]  # offsets and lengths, int64 (n,) each


class ParquetFile:
    """One file, of which nothing but the schema is read yet."""

    def __init__(self, path: Path) -> None:
        import pyarrow.parquet  # packed folders are read without it

        self.path = path
        self._table = self._checked(lambda: pyarrow.parquet.ParquetFile(path, memory_map=True))
        self.schema = self._table.schema_arrow
        self.titles: list[str] = self.schema.names

    @property
    def rows(self) -> int:
        return int(self._table.metadata.num_rows)

    @property
    def image_column(self) -> str | None:
        """The first column of encoded images, by the name of the bytes in it: "image.bytes"."""
        import pyarrow.types as types

        for field in self.schema:
            if types.is_struct(field.type):
                inner = {child.name: child.type for child in field.type}
                if "bytes" in inner and _is_binary(inner["bytes"]):
                    return f"{field.name}.bytes"
            elif _is_binary(field.type) and field.name.lower() in _IMAGES:
                return str(field.name)
        return None

    @property
    def features(self) -> dict[str, Any]:
        """What the `datasets` library wrote down about the columns."""
        try:
            features = json.loads((self.schema.metadata or {})[b"huggingface"])["info"]["features"]
        except (KeyError, ValueError, TypeError, RecursionError):
            return {}
        return features if isinstance(features, dict) else {}

    def holds_lists(self, column: str) -> bool:
        import pyarrow.types as types

        kind = self.schema.field(column).type
        return bool(types.is_list(kind) or types.is_large_list(kind))

    def columns(self, names: list[str]) -> dict[str, list[Any]]:
        """Their values as plain ones; columns that are not there are left out."""
        return dict(self._checked(lambda: self._table.read(columns=names).to_pydict()))

    def _checked(self, read: Callable[[], Any]) -> Any:
        import pyarrow

        try:
            return read()
        except (OSError, pyarrow.ArrowException) as error:
            raise UserError(f"'{self.path}' cannot be read as Parquet: {str(error).splitlines()[0]}") from None

    def shard(self, column: str) -> Shard:
        """Where the images of a column lie: remembered from an earlier time, or found by going through them once."""
        status = self.path.stat()
        key = hashlib.blake2b(os.fsencode(self.path.absolute()), digest_size=16).hexdigest()
        header = f"{_VERSION} {status.st_size} {status.st_mtime_ns} {column}"
        index, unpacked = (cache_folder() / "shards" / f"{key}.{ending}" for ending in ("npz", "bin"))
        try:
            with np.load(index, allow_pickle=False) as stored:
                holder = unpacked if bool(stored["unpacked"]) else self.path
                if str(stored["header"]) == header and holder.stat().st_size == int(stored["size"]):
                    return Shard(str(holder.absolute()), stored["offsets"], stored["lengths"])
        except Exception:  # absent, cut short or written by something else: go through the file again
            pass
        places, holder = self.places(column), self.path
        if places is None:
            unpacked.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(unpacked) as temporary:
                places, holder = self._unpack(column, temporary), unpacked
        offsets, lengths = places
        try:
            index.parent.mkdir(parents=True, exist_ok=True)
            stored = {"offsets": offsets, "lengths": lengths, "header": header, "unpacked": holder is unpacked}
            with atomic_write(index) as temporary, temporary.open("wb") as file:
                np.savez(file, **stored, size=holder.stat().st_size)
        except OSError:  # without room for the cache it is found again the next time
            pass
        return Shard(str(holder.absolute()), offsets, lengths)

    def places(self, column: str) -> _Places | None:
        """The places of the images in the file; none when they do not stand there as they are.

        A value is stored as its length and its bytes, in the order of the rows, so the next one mostly follows the one
        before; a new page begins a little later, and a repeated value may stand earlier.
        """
        offsets, lengths = [], []
        with self.path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as raw:
            for group in range(self._table.metadata.num_row_groups):
                meta = self._table.metadata.row_group(group)
                chunk = next(meta.column(i) for i in range(meta.num_columns) if meta.column(i).path_in_schema == column)
                if chunk.compression != "UNCOMPRESSED":
                    return None
                start = chunk.dictionary_page_offset if chunk.has_dictionary_page else chunk.data_page_offset
                stop = start + chunk.total_compressed_size
                place = start
                for value in self._images([group], column):
                    stored = b"" if value is None else len(value).to_bytes(4, "little") + value
                    if raw[place : place + len(stored)] != stored:
                        place = raw.find(stored, place, stop)
                        place = raw.find(stored, start, stop) if place < 0 else place
                    if place < 0:
                        return None
                    offsets.append(-1 if value is None else place + 4)
                    lengths.append(0 if value is None else len(value))
                    place += len(stored)
        return np.array(offsets, np.int64), np.array(lengths, np.int64)

    def _unpack(self, column: str, target: Path) -> _Places:
        """Write compressed images one after the other; returns where they lie then."""
        offsets, lengths = [], []
        with target.open("wb") as file:
            for value in self._images(range(self._table.metadata.num_row_groups), column):
                offsets.append(-1 if value is None else file.tell())
                lengths.append(0 if value is None else file.write(value))
        return np.array(offsets, np.int64), np.array(lengths, np.int64)

    def _images(self, groups: Iterable[int], column: str) -> Iterator[bytes | None]:
        """The images of row groups, one after the other."""
        import pyarrow

        for group in groups:
            try:
                array = self._table.read_row_group(group, columns=[column]).column(0).combine_chunks()
            except (OSError, pyarrow.ArrowException) as error:
                raise UserError(f"a shard is damaged in row group {group}: {str(error).splitlines()[0]}") from None
            if column.endswith(".bytes"):
                array = array.field("bytes")
            for value in array:
                yield value.as_py()


def _is_binary(kind: Any) -> bool:
    import pyarrow.types as types

    return bool(types.is_binary(kind) or types.is_large_binary(kind))
