"""Tables that list images."""

from __future__ import annotations

import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.folders import contents, fill, names_of
from vitrail.data.dataset import open_dataset
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


def test_split_group_weight_and_other_titles(tmp_path: Path) -> None:
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
    assert data.notes == ["Ignored 1 column of the table: 'camera'."]


def test_several_labels_in_csv_and_parquet(tmp_path: Path) -> None:
    sets = [("red",), ("red", "round"), (), ("square",)] * 3
    text = "path,labels\n" + "".join(f"{p},{'|'.join(own)}\n" for p, own in zip(IMAGES, sets, strict=True))
    from_csv = open_dataset(table(tmp_path, text), SplitRule(test_fraction=0.3))
    pq.write_table(pa.table({"path": IMAGES, "labels": [list(own) for own in sets]}), tmp_path / "list.parquet")
    from_parquet = open_dataset(tmp_path / "list.parquet", SplitRule(test_fraction=0.3))
    assert from_csv.fingerprint == from_parquet.fingerprint
    for data in (from_csv, from_parquet):
        assert data.classes == ("red", "round", "square")
        for samples in data.splits.values():
            marked = samples.labels_of(range(len(samples)))  # type: ignore[arg-type]
            for row in range(len(samples)):
                own = sets[int(Path(samples.name(row)).stem)]
                assert {samples.classes[k] for k in range(3) if marked[row, k]} == set(own)


def test_a_group_stays_on_one_side(tmp_path: Path) -> None:
    images = [f"{i}.png" for i in range(60)]
    text = "path,label,group\n" + "".join(f"{name},{'ab'[i % 2]},{i // 6}\n" for i, name in enumerate(images))
    for seed in range(4):
        data = open_dataset(table(tmp_path, text, images=images), SplitRule(test_fraction=0.3, split_seed=seed))
        groups = {split: {int(Path(name).stem) // 6 for name in names_of(data, split)} for split in data.splits}
        assert groups["train"] and groups["val"] and not groups["train"] & groups["val"]
        assert 6 <= len(data.splits["val"]) <= 30


def test_groups_in_two_given_splits_are_told(tmp_path: Path) -> None:
    text = "path,label,split,group\n"
    for i, path in enumerate(IMAGES):
        text += f"{path},{'ab'[i % 2]},{'train' if i < 8 else 'test'},{'shared' if i in (3, 9) else i}\n"
    data = open_dataset(table(tmp_path, text))
    assert "1 group of training images also lie in other splits: 'shared'." in data.notes


def test_missing_and_repeated_rows_are_listed(tmp_path: Path) -> None:
    lines = "".join(f"{path},{'ab'[i % 2]}\n" for i, path in enumerate(IMAGES))
    text = f"path,label\n{lines}gone.png,a\n{IMAGES[0]},a\n{IMAGES[1]},\npictures,b\n"
    data = open_dataset(table(tmp_path, text))
    assert data.excluded == [
        ("gone.png", "the file cannot be found: No such file or directory"),
        ("pictures", "it is not a file"),
    ]
    assert data.notes[:2] == [
        f"Ignored 1 rows that repeat another: '{IMAGES[0]}'.",
        f"Ignored 1 rows without a label: '{IMAGES[1]}'.",
    ]
    assert sum(map(len, data.splits.values())) == 12


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "is empty"),
        ("picture,label\n", "has no column 'path'; its columns are 'picture', 'label'"),
        ("path,kind\n" + rows("a"), "has no column 'label' or 'labels'"),
        ("path,label,labels\n" + rows("a", "b"), "both a label and a labels column"),
        ("path,file,label\n" + rows("x", "a"), "two columns for the path"),
        ("path,label,split\n" + rows("a", "trian"), "the split 'trian' in row 2; a split is train, val or"),
        ("path,label,weight\n" + rows("a", "-1"), "the weight '-1' in row 2; a weight is a number from 0 to 1,000,000"),
        ("path,label\n" + rows("a") + f"{IMAGES[0]},b\n", "twice, as 'a' and as 'b'; several labels of one image go"),
        ("path,label\n" + rows("a") + "pictures/0.png\n", "has 1 cells in row 14, and 2 columns"),
        ('path,label\n"broken,a\n', "not a proper CSV table"),
        ("path,label\nnowhere.png,a\n", "lists no image that exists; the first, 'nowhere.png'"),
        ("path,label\n" + rows("a"), "only one class, 'a', and a classifier needs two classes or more"),
        ("path,label\n,a\n", "has no path in row 2"),
        ("path,label\n", "has no rows"),
        ("path,label\n" + rows(""), "has no row with a label"),
        ("path,label,label\n" + rows("a", "b"), "has two columns 'label'; keep one of them"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(UserError) as error:
        open_dataset(table(tmp_path, text))
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_a_table_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "list.csv").write_bytes(b"path,label\n\xff\xfe,a\n")
    with pytest.raises(UserError, match="is not UTF-8 text"):
        open_dataset(tmp_path / "list.csv")
    (tmp_path / "list.parquet").write_bytes(b"PAR1 nonsense")
    with pytest.raises(UserError, match="cannot be read as Parquet"):
        open_dataset(tmp_path / "list.parquet")


def test_many_columns_take_no_longer_than_their_cells(tmp_path: Path) -> None:
    titles = ",".join(f"c{i}" for i in range(60_000))
    text = f"path,label,{titles}\n" + "".join(f"{path},{'ab'[i % 2]}{',1' * 60_000}\n" for i, path in enumerate(IMAGES))
    place = table(tmp_path, text)
    started = time.process_time()
    notes: list[str] = []
    assert len(read_manifest(place, notes).entries) == 12
    assert time.process_time() - started < 5  # once it was 48 s
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
def test_a_path_or_label_of_absurd_length_is_refused_in_few_words(tmp_path: Path, text: str, row: int) -> None:
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
