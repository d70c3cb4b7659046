"""Parquet shards in the Hugging Face layout, with pyarrow as the oracle for their bytes."""

from __future__ import annotations

import json
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.folders import fill, has_note, image_bytes, numbered
from vitrail.data.dataset import open_dataset
from vitrail.data.sources.read import read_source
from vitrail.errors import UserError

NAMES = ["zebra", "ant"]  # an explicit order, not alphabetical


def shard(
    path: Path, images: list[bytes | None], labels: list[Any], names: list[str] | None = NAMES, **options: Any
) -> Path:
    kind = pa.list_(pa.int64()) if isinstance(labels[0], list) else pa.infer_type(labels)
    feature: Any = {"_type": "ClassLabel", "names": names}
    if isinstance(labels[0], list):
        feature = {"_type": "Sequence", "feature": feature}
    features = {"image": {"_type": "Image"}, "label": feature} if names else {"image": {"_type": "Image"}}
    schema = pa.schema(
        [("image", pa.struct([("bytes", pa.binary()), ("path", pa.string())])), ("label", kind)],
        {"huggingface": json.dumps({"info": {"features": features}})},
    )
    rows = [{"bytes": data, "path": f"{i}.png"} for i, data in enumerate(images)]
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"image": rows, "label": labels}, schema), path, **options)
    return path


def pictures(count: int, start: int = 0) -> list[bytes | None]:
    return [image_bytes(start + i, (8 + i % 5, 9)) for i in range(count)]


@pytest.mark.parametrize(
    "options",
    [
        {"compression": "NONE"},
        {"compression": "NONE", "use_dictionary": False, "data_page_size": 300, "row_group_size": 7},
        {"compression": "NONE", "data_page_version": "2.0"},
        {"compression": "snappy"},
        {"compression": "zstd", "row_group_size": 5},
    ],
)
def test_every_image_is_read_by_its_offset(tmp_path: Path, options: dict[str, Any]) -> None:
    images = pictures(40)
    images[11], images[30] = images[3], None  # a copy, which a dictionary stores once, and a row without an image
    shard(tmp_path / "train-00000-of-00001.parquet", images, [i % 2 for i in range(40)], **options)
    for _ in range(2):  # the second time from the cached offsets
        source = read_source(tmp_path, [])
        files = pickle.loads(pickle.dumps(source.files))
        for row, entry in enumerate(source.entries):
            assert entry.name == f"train-00000-of-00001.parquet#{row} {row}.png"
            if images[row] is not None:
                assert files.read(entry.name) == images[row]
        with pytest.raises(OSError, match="no image"):
            files.read(source.entries[30].name)
    data = open_dataset(tmp_path)
    assert data.classes == ("zebra", "ant")
    assert [name for name, _ in data.excluded] == ["train-00000-of-00001.parquet#30 30.png"]


def test_a_rewritten_shard_is_read_again(tmp_path: Path) -> None:
    shard(tmp_path / "all.parquet", pictures(6), [0, 1] * 3)
    before = open_dataset(tmp_path)
    shard(tmp_path / "all.parquet", pictures(6, start=50), [0, 1] * 3)
    after = open_dataset(tmp_path)
    assert before.fingerprint != after.fingerprint
    names = after.splits["train"]
    row = int(names.name(0).split("#")[1].split()[0])
    assert names.read(0) == pictures(6, start=50)[row]


def test_splits_come_from_names_and_folders(tmp_path: Path) -> None:
    shard(tmp_path / "a/data/train-00000-of-00001.parquet", pictures(6), [0, 1] * 3)
    shard(tmp_path / "a/data/validation-00000-of-00001.parquet", pictures(4, 10), [0, 1] * 2)
    shard(tmp_path / "a/data/test-00000-of-00001.parquet", pictures(2, 20), [-1, -1])
    notes: list[str] = []
    source = read_source(tmp_path / "a", notes)
    assert source.splits == ["train"] * 6 + ["val"] * 4
    assert len(notes) == 1 and has_note(notes, "Ignored 2 images without a label")
    shard(tmp_path / "b/train/0000.parquet", pictures(6), [0, 1] * 3)
    shard(tmp_path / "b/test/0000.parquet", pictures(4, 10), [0, 1] * 2)
    assert set(read_source(tmp_path / "b", []).splits) == {"train", "test"}


def test_labels_may_be_words_numbers_or_lists(tmp_path: Path) -> None:
    shard(tmp_path / "words.parquet", pictures(4), ["b", "a", "b", "a"], None)
    assert open_dataset(tmp_path / "words.parquet").classes == ("a", "b")
    shard(tmp_path / "numbers.parquet", pictures(4), [10, 2, 10, 2], None)
    assert open_dataset(tmp_path / "numbers.parquet").classes == ("2", "10")
    shard(tmp_path / "lists.parquet", pictures(6), [[0], [1], [0, 1], [], [0], [1]])
    data = open_dataset(tmp_path / "lists.parquet")
    assert data.classes == ("zebra", "ant")
    assert all(samples.sets is not None for samples in data.splits.values())


def test_a_missing_shard_is_an_error_and_a_table_among_class_folders_is_ignored(tmp_path: Path) -> None:
    for number in (0, 2):
        shard(tmp_path / f"a/train-0000{number}-of-00003.parquet", pictures(4, 10 * number), [0, 1] * 2)
    with pytest.raises(UserError, match=r"shard number 1 of the 3 shards '.*/a/train-\.\.\.' is missing"):
        open_dataset(tmp_path / "a")
    fill(tmp_path / "b", numbered({"cat": 3, "dog": 3}))
    pq.write_table(pa.table({"path": ["cat/0.png"], "label": ["cat"]}), tmp_path / "b/labels.parquet")
    assert open_dataset(tmp_path / "b").classes == ("cat", "dog")


def test_wrong_shards_are_errors(tmp_path: Path) -> None:
    shard(tmp_path / "bad/train.parquet", pictures(4), [0, 1, 2, 1])
    with pytest.raises(UserError, match=r"train\.parquet' has the label 2, .*2 classes"):
        open_dataset(tmp_path / "bad")
    (tmp_path / "cut").mkdir()
    whole = shard(tmp_path / "whole.parquet", pictures(4), [0, 1, 0, 1]).read_bytes()
    (tmp_path / "cut/train.parquet").write_bytes(whole[:-40])
    with pytest.raises(UserError, match=r"cut/train\.parquet' cannot be read as Parquet"):
        open_dataset(tmp_path / "cut")
    pq.write_table(pa.table({"image": pictures(2), "kind": [1, 2]}), tmp_path / "nolabel.parquet")
    with pytest.raises(UserError, match=r"nolabel\.parquet' has no column of labels; its columns are 'image', 'kind'"):
        open_dataset(tmp_path / "nolabel.parquet")


def test_many_threads_may_open_a_shard_at_once(tmp_path: Path) -> None:
    images = pictures(16)
    shard(tmp_path / "train.parquet", images, [0, 1] * 8)
    source = read_source(tmp_path, [])
    with ThreadPoolExecutor(8) as pool:
        for _ in range(60):
            fresh = pickle.loads(pickle.dumps(source.files))
            assert list(pool.map(fresh.read, (entry.name for entry in source.entries))) == images
