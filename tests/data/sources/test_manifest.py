"""Tables that list images."""

from __future__ import annotations

import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.folders import contents, fill, has_note, names_of
from vitrail.data.dataset import open_dataset
from vitrail.data.files import FILE_NOT_FOUND
from vitrail.data.sources.manifest import read_manifest
from vitrail.data.splits import SplitRule
from vitrail.errors import UserError

IMAGES = [f"pictures/{i}.png" for i in range(12)]


def table(root: Path, text: str, name: str = "list.csv", images: list[str] = IMAGES) -> Path:
    fill(root, images)
    (root / name).write_text(text, encoding="utf-8")
    return root / name


def rows(*columns: str) -> str:
    return "".join(f"{path}," + ",".join(columns).replace("#", str(i)) + "\n" for i, path in enumerate(IMAGES))


def test_paths_are_relative_to_the_table_and_labels_give_the_classes(tmp_path: Path) -> None:
    lines = "".join(f"{path},{'dog' if i % 2 else 'cat'}\n" for i, path in enumerate(IMAGES))
    data = open_dataset(table(tmp_path, "path,label\n" + lines))
    assert data.classes == ("cat", "dog")
    assert not data.given_split and not data.excluded and not data.notes
    for split in contents(data).values():
        for name, label in split:
            number = int(Path(name).stem)
            assert label == ("dog" if number % 2 else "cat")
    assert {len(samples) for samples in data.splits.values()} == {10, 2}


def test_split_group_weight_and_unknown_columns(tmp_path: Path) -> None:
    text = "Filename;Class;Subset;Group;Weight;camera\n"
    for i, path in enumerate(IMAGES):
        split = ("training", "validation", "test")[i % 3]
        text += f"{path};{'abc'[i % 2]};{split};g{i % 3};{i / 2};x\n"
    data = open_dataset(table(tmp_path, "﻿" + text))
    assert {name: len(samples) for name, samples in data.splits.items()} == {"train": 4, "val": 4, "test": 4}
    assert data.given_split
    train = data.splits["train"]
    assert {train.name(i): round(float(train.weights[i]), 4) for i in range(4)} == {
        f"pictures/{i}.png": round(i / 4.5, 4)
        for i in (0, 3, 6, 9)  # scaled to a mean of one
    }
    assert len(data.notes) == 1 and has_note(data.notes, "Ignored 1 column", "'camera'")


def test_multilabel_tables_in_csv_and_parquet(tmp_path: Path) -> None:
    sets = [("red",), ("red", "round"), (), ("square",)] * 3
    text = "path,labels\n" + "".join(f"{p},{'|'.join(names)}\n" for p, names in zip(IMAGES, sets, strict=True))
    from_csv = open_dataset(table(tmp_path, text), SplitRule(holdout_fraction=0.3))
    pq.write_table(pa.table({"path": IMAGES, "labels": [list(names) for names in sets]}), tmp_path / "list.parquet")
    from_parquet = open_dataset(tmp_path / "list.parquet", SplitRule(holdout_fraction=0.3))
    assert from_csv.fingerprint == from_parquet.fingerprint
    for data in (from_csv, from_parquet):
        assert data.classes == ("red", "round", "square")
        for samples in data.splits.values():
            multi_hot = samples.labels_of(range(len(samples)))  # type: ignore[arg-type]
            for row in range(len(samples)):
                names = sets[int(Path(samples.name(row)).stem)]
                assert {samples.classes[k] for k in range(3) if multi_hot[row, k]} == set(names)


def test_a_group_stays_in_one_split(tmp_path: Path) -> None:
    images = [f"{i}.png" for i in range(60)]
    text = "path,label,group\n" + "".join(f"{name},{'ab'[i % 2]},{i // 6}\n" for i, name in enumerate(images))
    for seed in range(4):
        data = open_dataset(table(tmp_path, text, images=images), SplitRule(holdout_fraction=0.3, split_seed=seed))
        groups = {split: {int(Path(name).stem) // 6 for name in names_of(data, split)} for split in data.splits}
        assert groups["train"] and groups["val"] and not groups["train"] & groups["val"]
        assert 6 <= len(data.splits["val"]) <= 30


def test_groups_in_two_given_splits_are_noted(tmp_path: Path) -> None:
    text = "path,label,split,group\n"
    for i, path in enumerate(IMAGES):
        text += f"{path},{'ab'[i % 2]},{'train' if i < 8 else 'test'},{'shared' if i in (3, 9) else i}\n"
    data = open_dataset(table(tmp_path, text))
    assert has_note(data.notes, "1 group", "other splits", "'shared'")


def test_missing_and_repeated_rows_are_listed(tmp_path: Path) -> None:
    lines = "".join(f"{path},{'ab'[i % 2]}\n" for i, path in enumerate(IMAGES))
    text = f"path,label\n{lines}gone.png,a\n{IMAGES[0]},a\n{IMAGES[1]},\npictures,b\n"
    data = open_dataset(table(tmp_path, text))
    assert [name for name, _ in data.excluded] == ["gone.png", "pictures"]
    assert data.excluded[0][1].startswith(FILE_NOT_FOUND) and data.excluded[1][1] == "it is not a file"
    assert has_note(data.notes[:2], "Ignored 1 repeated row", f"'{IMAGES[0]}'")
    assert has_note(data.notes[:2], "Ignored 1 unlabelled row", f"'{IMAGES[1]}'")
    assert sum(map(len, data.splits.values())) == 12


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("", "is empty"),
        ("picture,label\n", "no column 'path'; its columns are 'picture', 'label'"),
        ("path,kind\n" + rows("a"), "no column 'label' or 'labels'"),
        ("path,label,labels\n" + rows("a", "b"), "both a 'label' and a 'labels' column"),
        ("path,file,label\n" + rows("x", "a"), "two columns for 'path'"),
        ("path,label,split\n" + rows("a", "trian"), "'trian' in row 2; a split must be train, val or test; did"),
        ("path,label,weight\n" + rows("a", "-1"), "the weight '-1' in row 2; a weight must be from 0 to 1,000,000"),
        ("path,label\n" + rows("a") + f"{IMAGES[0]},b\n", "'pictures/0.png' twice with different labels: 'a' and 'b'"),
        ("path,label\n" + rows("a") + "pictures/0.png\n", "1 cells in row 14 but 2 columns"),
        ('path,label\n"broken,a\n', "not a valid CSV table"),
        ("path,label\nnowhere.png,a\n", "no image that exists; the first, 'nowhere.png'"),
        ("path,label\n" + rows("a"), "only one class, 'a'; a classifier needs at least two classes"),
        ("path,label\n,a\n", "no path in row 2"),
        ("path,label\n", "no rows"),
        ("path,label\n" + rows(""), "no row with a label"),
        ("path,label,label\n" + rows("a", "b"), "two columns 'label'"),
    ],
)  # fmt: skip
def test_a_wrong_table_is_an_error(tmp_path: Path, text: str, fact: str) -> None:
    with pytest.raises(UserError) as error:
        open_dataset(table(tmp_path, text))
    assert "list.csv'" in str(error.value) and fact in str(error.value)
    assert "\n" not in str(error.value)


def test_a_table_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "list.csv").write_bytes(b"path,label\n\xff\xfe,a\n")
    with pytest.raises(UserError, match=r"list\.csv' is not UTF-8 text"):
        open_dataset(tmp_path / "list.csv")
    (tmp_path / "list.parquet").write_bytes(b"PAR1 nonsense")
    with pytest.raises(UserError, match=r"list\.parquet' cannot be read as Parquet"):
        open_dataset(tmp_path / "list.parquet")


def test_reading_many_columns_is_fast(tmp_path: Path) -> None:
    titles = ",".join(f"c{i}" for i in range(60_000))
    text = f"path,label,{titles}\n" + "".join(f"{path},{'ab'[i % 2]}{',1' * 60_000}\n" for i, path in enumerate(IMAGES))
    path = table(tmp_path, text)
    started = time.process_time()
    notes: list[str] = []
    assert len(read_manifest(path, notes).entries) == 12
    assert time.process_time() - started < 5  # a slow version took 48 s
    assert "60,000 columns" in notes[0] and len(notes[0]) < 300
    with pytest.raises(UserError, match="two columns 'c7'"):
        open_dataset(table(tmp_path, f"path,label,c7,{titles}\n"))


@pytest.mark.parametrize(
    ("text", "row"),
    [
        ("path,label\n" + rows("a") + "x" * 100_000 + ",b\n", 14),
        ("path,label\n" + rows("a") + "x.png," + "b" * 100_000 + "\n", 14),
        ("path,labels\n" + rows("a") + "x.png,c|" + "b" * 100_000 + "\n", 14),
    ],
)
def test_a_path_or_label_that_is_too_long_is_an_error_with_a_short_message(tmp_path: Path, text: str, row: int) -> None:
    with pytest.raises(UserError) as error:
        open_dataset(table(tmp_path, text))
    assert f"row {row}" in str(error.value) and "100,000" in str(error.value) and len(str(error.value)) < 400


def test_long_cells_are_shortened_in_messages(tmp_path: Path) -> None:
    for text in (f"path,label,{'t' * 9_000},{'t' * 9_000}\n", f"path,label,split\np.png,a,{'t' * 9_000}\n"):
        with pytest.raises(UserError) as error:
            open_dataset(table(tmp_path, text))
        assert len(str(error.value)) < 800
    with pytest.raises(UserError, match="field limit"):
        open_dataset(table(tmp_path, f"path,label\np.png,{'t' * 200_000}\n"))
    many = "|".join(f"label{i}" for i in range(10_000))  # a long cell of short labels is fine
    data = open_dataset(table(tmp_path, "path,labels\n" + rows("x|y") + f"{IMAGES[0]}b.png,{many}\n"), None)
    assert len(data.splits["all"]) == 12
