"""Where the images of a Parquet shard lie in its file, so that one can be read without the others.

Reading through Parquet loads whole row groups: 5 to 300 images a second in random order, against tens of thousands from
their places. A shard is gone through once and the places are remembered; shards whose images are compressed are
unpacked into the cache folder.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.atomic import whole_file
from vitrail.data.scan import cache_folder
from vitrail.data.sources.shards import Shard
from vitrail.errors import UserError

_VERSION = 1


def locate(path: Path, table: Any, column: str) -> Shard:
    """Where the images lie: remembered from an earlier time, or found by going through the shard once."""
    status = path.stat()
    key = hashlib.blake2b(os.fsencode(path.absolute()), digest_size=16).hexdigest()
    header = f"{_VERSION} {status.st_size} {status.st_mtime_ns} {column}"
    index, unpacked = (cache_folder() / "shards" / f"{key}.{ending}" for ending in ("npz", "bin"))
    try:
        with np.load(index, allow_pickle=False) as stored:
            holder = unpacked if bool(stored["unpacked"]) else path
            if str(stored["header"]) == header and holder.stat().st_size == int(stored["size"]):
                return Shard(str(holder.absolute()), stored["offsets"], stored["lengths"])
    except Exception:  # absent, cut short or written by something else: go through the shard again
        pass
    groups = range(table.metadata.num_row_groups)
    places = [find_images(path, table, group, column) for group in groups]
    if all(place is not None for place in places):
        holder = path
    else:
        unpacked.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(unpacked) as temporary:
            places = list(_unpack(table, groups, column, temporary))
        holder = unpacked
    offsets, lengths = (np.concatenate([place[i] for place in places if place is not None]) for i in (0, 1))
    try:
        index.parent.mkdir(parents=True, exist_ok=True)
        columns: dict[str, Any] = {"offsets": offsets, "lengths": lengths, "header": header}
        with whole_file(index) as temporary, temporary.open("wb") as file:
            np.savez(file, **columns, unpacked=holder is unpacked, size=holder.stat().st_size)
    except OSError:  # without room for the cache it is found again the next time
        pass
    return Shard(str(holder.absolute()), offsets, lengths)


_Places = tuple[np.ndarray, np.ndarray]  # offsets and lengths


def _images(table: Any, group: int, column: str) -> Iterator[bytes | None]:
    """The images of a row group, one after the other."""
    import pyarrow

    try:
        array = table.read_row_group(group, columns=[column]).column(0).combine_chunks()
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"a shard is damaged in row group {group}: {str(error).splitlines()[0]}") from None
    if column.endswith(".bytes"):
        array = array.field("bytes")
    for value in array:
        yield value.as_py()


def find_images(path: Path, table: Any, group: int, column: str) -> _Places | None:
    """The places of a row group's images in the file; none when they do not stand there as they are.

    A value is stored as its length and its bytes, in the order of the rows, so the next one mostly follows the one
    before; a new page begins a little later, and a repeated value may stand earlier.
    """
    meta = table.metadata.row_group(group)
    chunk = next(meta.column(i) for i in range(meta.num_columns) if meta.column(i).path_in_schema == column)
    if chunk.compression != "UNCOMPRESSED":
        return None
    start = chunk.dictionary_page_offset if chunk.has_dictionary_page else chunk.data_page_offset
    stop = start + chunk.total_compressed_size
    offsets, lengths = [], []
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as raw:
        place = start
        for value in _images(table, group, column):
            if value is None:
                offsets.append(-1)
                lengths.append(0)
                continue
            stored = len(value).to_bytes(4, "little") + value
            if raw[place : place + len(stored)] != stored:
                place = raw.find(stored, place, stop)
                place = raw.find(stored, start, stop) if place < 0 else place
            if place < 0:
                return None
            offsets.append(place + 4)
            lengths.append(len(value))
            place += len(stored)
    return np.array(offsets, np.int64), np.array(lengths, np.int64)


def _unpack(table: Any, groups: Iterable[int], column: str, target: Path) -> Iterator[_Places]:
    """Write the images of a compressed shard one after the other; yields where they lie."""
    with target.open("wb") as file:
        for group in groups:
            offsets, lengths = [], []
            for value in _images(table, group, column):
                offsets.append(-1 if value is None else file.tell())
                lengths.append(0 if value is None else file.write(value))
            yield np.array(offsets, np.int64), np.array(lengths, np.int64)
