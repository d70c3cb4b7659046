"""Read the columns of a Parquet file, and find the byte offsets of its images.

Reading images through Parquet loads whole row groups: 5 to 300 images per second in random order, compared with tens
of thousands by offset. So each file is searched once and the offsets are cached. Compressed images are unpacked into
the cache folder.
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
_IMAGE_COLUMNS = ("image", "img", "image_bytes", "jpg", "png")  # names of bytes columns that are images
_Offsets = tuple[np.ndarray, np.ndarray]  # offsets and lengths, int64 (n,) each


class ParquetFile:
    """One Parquet file. Opening it reads only the schema."""

    def __init__(self, path: Path) -> None:
        import pyarrow.parquet  # imported here: packed folders do not need it

        self.path = path
        self._table = self._checked(lambda: pyarrow.parquet.ParquetFile(path, memory_map=True))
        self.schema = self._table.schema_arrow
        self.titles: list[str] = self.schema.names

    @property
    def rows(self) -> int:
        return int(self._table.metadata.num_rows)

    @property
    def image_column(self) -> str | None:
        """The first column of encoded images, by the name of its bytes: "image.bytes"."""
        import pyarrow.types as types

        for field in self.schema:
            if types.is_struct(field.type):
                inner = {child.name: child.type for child in field.type}
                if "bytes" in inner and _is_binary(inner["bytes"]):
                    return f"{field.name}.bytes"
            elif _is_binary(field.type) and field.name.lower() in _IMAGE_COLUMNS:
                return str(field.name)
        return None

    @property
    def features(self) -> dict[str, Any]:
        """The features that the `datasets` library stored in the schema."""
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
        """Return columns as lists of Python values; columns that do not exist are skipped."""
        return dict(self._checked(lambda: self._table.read(columns=names).to_pydict()))

    def _checked(self, read: Callable[[], Any]) -> Any:
        import pyarrow

        try:
            return read()
        except (OSError, pyarrow.ArrowException) as error:
            raise UserError(f"'{self.path}' cannot be read as Parquet: {str(error).splitlines()[0]}") from None

    def shard(self, column: str) -> Shard:
        """Return the offsets of the images in a column, from the cache or by searching the file."""
        status = self.path.stat()
        key = hashlib.blake2b(os.fsencode(self.path.absolute()), digest_size=16).hexdigest()
        header = f"{_VERSION} {status.st_size} {status.st_mtime_ns} {column}"
        index, unpacked = (cache_folder() / "shards" / f"{key}.{ending}" for ending in ("npz", "bin"))
        try:
            with np.load(index, allow_pickle=False) as stored:
                source = unpacked if bool(stored["unpacked"]) else self.path
                if str(stored["header"]) == header and source.stat().st_size == int(stored["size"]):
                    return Shard(str(source.absolute()), stored["offsets"], stored["lengths"])
        except Exception:  # missing, cut short or written by another program: search the file again
            pass
        images, source = self.find_offsets(column), self.path
        if images is None:
            unpacked.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(unpacked) as temporary:
                images, source = self._unpack(column, temporary), unpacked
        offsets, lengths = images
        try:
            index.parent.mkdir(parents=True, exist_ok=True)
            stored = {"offsets": offsets, "lengths": lengths, "header": header, "unpacked": source is unpacked}
            with atomic_write(index) as temporary, temporary.open("wb") as file:
                np.savez(file, **stored, size=source.stat().st_size)
        except OSError:  # no room for the cache: the next run searches again
            pass
        return Shard(str(source.absolute()), offsets, lengths)

    def find_offsets(self, column: str) -> _Offsets | None:
        """Return the offsets and lengths of the images in the file; None if they are compressed or not found.

        A value is stored as its length and its bytes, in the order of the rows. So the next value mostly follows the
        one before. A new page begins a little later, and a repeated value may be stored earlier.
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
                position = start
                for value in self._images([group], column):
                    stored = b"" if value is None else len(value).to_bytes(4, "little") + value
                    if raw[position : position + len(stored)] != stored:
                        position = raw.find(stored, position, stop)
                        position = raw.find(stored, start, stop) if position < 0 else position
                    if position < 0:
                        return None
                    offsets.append(-1 if value is None else position + 4)
                    lengths.append(0 if value is None else len(value))
                    position += len(stored)
        return np.array(offsets, np.int64), np.array(lengths, np.int64)

    def _unpack(self, column: str, target: Path) -> _Offsets:
        """Write compressed images one after the other; return their offsets in the new file."""
        offsets, lengths = [], []
        with target.open("wb") as file:
            for value in self._images(range(self._table.metadata.num_row_groups), column):
                offsets.append(-1 if value is None else file.tell())
                lengths.append(0 if value is None else file.write(value))
        return np.array(offsets, np.int64), np.array(lengths, np.int64)

    def _images(self, groups: Iterable[int], column: str) -> Iterator[bytes | None]:
        """Yield the images of row groups, in order."""
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
