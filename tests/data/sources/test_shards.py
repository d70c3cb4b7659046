"""Images in shards by their offset; with any number of shards, few files are open."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from vitrail.data.sources import shards
from vitrail.data.sources.shards import Shard, ShardFiles, row_name

ROWS = 4
FEW_DESCRIPTORS = """
import pickle, resource, sys
files, names = pickle.load(sys.stdin.buffer)
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
assert all(files.read(name).decode() == name for name in names * 2)
"""


def many(folder: Path, count: int) -> tuple[ShardFiles, list[str]]:
    """Make shards of four rows each; the content of a row is its name."""
    found, names = {}, []
    for number in range(count):
        shard = f"train-{number:05}.parquet"
        rows = [row_name(shard, row, "") for row in range(ROWS)]
        lengths = np.array([len(row) for row in rows], np.int64)
        (folder / shard).write_text("".join(rows))
        found[shard] = Shard(str(folder / shard), np.cumsum(lengths) - lengths, lengths)
        names += rows
    return ShardFiles(str(folder), found), names


@pytest.mark.skipif(not hasattr(os, "pread"), reason="files are opened for each read there")
def test_more_shards_than_a_process_may_open(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FEW_DESCRIPTORS],
        input=pickle.dumps(many(tmp_path, 300)),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()


def test_threads_drop_files_that_others_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "_MAX_OPEN", 2)
    files, names = many(tmp_path, 20)
    wanted = np.random.default_rng(0).permutation(names * 50).tolist()
    with ThreadPoolExecutor(8) as pool:
        assert [data.decode() for data in pool.map(files.read, wanted)] == wanted
    assert len(files._open) <= 2


@pytest.mark.skipif(not hasattr(os, "pread"), reason="files are opened for each read there")
def test_the_shard_used_last_stays_open_and_dropped_ones_are_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "_MAX_OPEN", 2)
    files, names = many(tmp_path, 3)
    first, second, third = names[::ROWS]
    files.read(first)
    files.read(second)
    dropped = files._open[str(tmp_path / "train-00001.parquet")].descriptor
    files.read(first)
    files.read(third)
    assert [Path(path).name for path in files._open] == ["train-00000.parquet", "train-00002.parquet"]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(dropped)


def test_a_missing_shard_is_a_file_not_found_error(tmp_path: Path) -> None:
    files, names = many(tmp_path, 2)
    (tmp_path / "train-00001.parquet").unlink()
    assert files.read(names[0]) == names[0].encode()
    with pytest.raises(FileNotFoundError):
        files.read(names[-1])
