"""Class folders and archives of them: images, splits, notes and errors."""

from __future__ import annotations

import os
import struct
import sys
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tests.data.folders import contents, fill, has_note, image_bytes, names_of, numbered
from vitrail.data import files as files_module
from vitrail.data.dataset import open_dataset
from vitrail.data.files import FILE_NOT_FOUND
from vitrail.data.splits import SplitRule
from vitrail.errors import UserError

# layouts


def test_classes_are_sorted_by_code_point_and_labels_follow(tmp_path: Path) -> None:
    fill(tmp_path, numbered({"b": 3, "Z": 3, "a10": 3, "a9": 3, "é": 3}))
    data = open_dataset(tmp_path)
    assert data.classes == ("Z", "a10", "a9", "b", "é")
    assert not data.given_split
    assert set(data.splits) == {"train", "val"}
    for split in data.splits.values():
        for i in range(len(split)):
            assert split.name(i).split("/")[0] == data.classes[split.labels[i]]
            assert split.read(i) == (tmp_path / split.name(i)).read_bytes()
        assert split.labels.dtype == np.int64
    assert data.excluded == []
    assert data.notes == []


def test_folders_inside_a_class_belong_to_it(tmp_path: Path) -> None:
    fill(tmp_path, ["a/x/1.png", "a/x/y/2.png", "a/3.png", "b/1.png", "b/a/2.png"])
    everything = open_dataset(tmp_path, None).splits["all"]
    assert [everything.classes[label] for label in everything.labels] == ["a", "a", "a", "b", "b"]


def test_folders_called_training_and_testing_are_splits(tmp_path: Path) -> None:
    fill(tmp_path, numbered({"Training/a": 4, "Training/b": 4, "Testing/a": 1, "Testing/b": 1}))
    data = open_dataset(tmp_path)
    assert data.classes == ("a", "b") and len(data.splits["test"]) == 2


def test_class_folders_with_the_same_subfolders_are_noted(tmp_path: Path) -> None:
    fill(tmp_path, numbered({"part1/a": 2, "part1/b": 2, "part2/a": 2, "part2/b": 2}))
    assert has_note(open_dataset(tmp_path).notes, "same subfolders", "'a', 'b'")
    mixed = fill(tmp_path / "mixed", numbered({"cat/day1": 2, "cat/day2": 2, "dog/day1": 2, "dog": 1}))
    assert not has_note(open_dataset(mixed).notes, "same subfolders")


@pytest.mark.skipif(sys.platform != "linux", reason="file names that are not text")
def test_a_class_name_that_is_not_text_is_an_error(tmp_path: Path) -> None:
    fill(tmp_path, numbered({"a": 2, os.fsdecode(b"caf\xe9"): 2}))
    with pytest.raises(UserError, match=r"class folder 'caf.*unprintable"):
        open_dataset(tmp_path)


@pytest.mark.parametrize("validation", ["val", "valid", "validation", "dev", "VAL", "Valid"])
def test_given_splits_are_kept(tmp_path: Path, validation: str) -> None:
    fill(tmp_path, ["Train/a/1.png", "Train/b/2.png", f"{validation}/a/3.png", f"{validation}/b/4.png", "test/a/5.png"])
    data = open_dataset(tmp_path)
    assert data.given_split
    assert {split: len(samples) for split, samples in data.splits.items()} == {"train": 2, "val": 2, "test": 1}
    assert names_of(data, "val") == {f"{validation}/a/3.png", f"{validation}/b/4.png"}
    assert len(data.notes) == 1 and has_note(data.notes, "test split", "'b'")
    assert contents(open_dataset(tmp_path, None)) == contents(data)


def test_with_a_test_split_alone_some_training_images_become_the_validation_split(tmp_path: Path) -> None:
    fill(tmp_path, numbered({"train/a": 20, "train/b": 20, "test/a": 2, "test/b": 2}))
    data = open_dataset(tmp_path)
    assert {split: len(samples) for split, samples in data.splits.items()} == {"train": 36, "val": 4, "test": 4}
    assert names_of(data, "test") == {"test/a/0.png", "test/a/1.png", "test/b/0.png", "test/b/1.png"}
    assert all(name.startswith("train/") for name in names_of(data, "val"))
    half = open_dataset(tmp_path, SplitRule(val_fraction=0.5))
    assert len(half.splits["val"]) == 20 and len(half.splits["test"]) == 4


def test_a_validation_split_can_be_used_as_the_test_split(tmp_path: Path) -> None:
    fill(tmp_path, numbered({"train/a": 20, "train/b": 20, "val/a": 2, "val/b": 2}))
    data = open_dataset(tmp_path, SplitRule(val_as_test=True))
    assert {split: len(samples) for split, samples in data.splits.items()} == {"train": 36, "val": 4, "test": 4}
    assert all(name.startswith("val/") for name in names_of(data, "test"))
    assert set(open_dataset(tmp_path, SplitRule(val_as_test=True, val_fraction=0)).splits) == {"train", "test"}
    fill(tmp_path, numbered({"test/a": 1, "test/b": 1}))  # there is a test split, so the validation split stays
    assert contents(open_dataset(tmp_path, SplitRule(val_as_test=True))) == contents(open_dataset(tmp_path))


def test_a_train_split_alone_gets_a_validation_split(tmp_path: Path) -> None:
    fill(tmp_path, numbered({"train/a": 10, "train/b": 10}))
    data = open_dataset(tmp_path)
    assert data.given_split
    assert {split: len(samples) for split, samples in data.splits.items()} == {"train": 16, "val": 4}
    assert set(open_dataset(tmp_path, None).splits) == {"train"}


def test_a_class_of_trains_is_a_class(tmp_path: Path) -> None:
    fill(tmp_path, numbered({"train": 3, "bus": 3}))
    assert open_dataset(tmp_path).classes == ("bus", "train")


def test_classes_of_a_weights_file_fix_the_labels(tmp_path: Path) -> None:
    fill(tmp_path, numbered({"cat": 2, "dog": 2}))
    data = open_dataset(tmp_path, None, classes=["dog", "emu", "cat"])
    assert data.classes == ("dog", "emu", "cat")
    assert Counter(data.splits["all"].labels.tolist()) == {0: 2, 2: 2}
    assert len(data.notes) == 1 and has_note(data.notes, "all split", "'emu'")
    one = fill(tmp_path / "one", numbered({"cat": 2}))
    assert open_dataset(one, None, classes=["dog", "cat"]).splits["all"].labels.tolist() == [1, 1]


# errors


@pytest.mark.parametrize(
    ("names", "facts"),
    [
        ([], "has no images; put the images of each class in a folder"),
        (["a/.hidden.png"], "has no images"),
        (["1.png", "2.png"], "images but no class folders; put the images"),
        (["train/1.png", "test/2.png"], "images but no class folders"),
        (["a/1.png", "a/2.png"], "only one class, 'a'.*two class folders"),
        (["photos/a/1.png", "photos/b/2.png"], "only one class, 'photos'.*did you mean '.*/photos'"),
        (["val/a/1.png", "test/a/2.png"], "'test', 'val'.*'train' folder"),
        (["train/a/1.png", "train/b/1.png", "val/a/1.png", "Valid/a/1.png"], "'Valid', 'val'.*same split"),
        (
            ["train/cat/1.png", "train/dog/1.png", "val/cat/1.png", "val/dgo/1.png"],
            "class folder 'dgo' in the val split of .*training classes; did you mean 'dog'",
        ),
    ],
)
def test_layouts_that_cannot_be_used(tmp_path: Path, names: list[str], facts: str) -> None:
    with pytest.raises(UserError, match=facts) as caught:
        open_dataset(fill(tmp_path, names))
    assert "\n" not in str(caught.value)


def test_a_folder_outside_the_known_classes(tmp_path: Path) -> None:
    fill(tmp_path, numbered({"cat": 2, "dgo": 2}))
    with pytest.raises(UserError, match=r"'dgo' .*known classes; did you mean 'dog'"):
        open_dataset(tmp_path, classes=["cat", "dog"])


def test_paths_that_are_not_a_data_set(tmp_path: Path) -> None:
    (tmp_path / "flowers").mkdir()
    with pytest.raises(UserError, match=r"/flower' does not exist; did you mean '.*/flowers'"):
        open_dataset(tmp_path / "flower")
    with pytest.raises(UserError, match=r"nowhere/at/all' does not exist$"):
        open_dataset(tmp_path / "nowhere/at/all")
    fill(tmp_path, {"one.JPG": image_bytes(1), "notes.txt": b"x", "broken.zip": b"PK nothing", "empty.zip": b""})
    with pytest.raises(UserError, match=r"one\.JPG' is a single image"):
        open_dataset(tmp_path / "one.JPG")
    with pytest.raises(UserError, match=r"notes\.txt' is not a data set.*\.zip"):
        open_dataset(tmp_path / "notes.txt")
    for name in ("broken.zip", "empty.zip"):
        with pytest.raises(UserError, match=f"{name}' cannot be read as a zip archive"):
            open_dataset(tmp_path / name)


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, 2])
def test_a_test_fraction_outside_0_to_1_is_an_error(tmp_path: Path, fraction: float) -> None:
    with pytest.raises(UserError, match=f"holdout_fraction .*between 0 and 1, not {fraction}"):
        open_dataset(tmp_path, SplitRule(holdout_fraction=fraction))


def test_no_decodable_image(tmp_path: Path) -> None:
    fill(tmp_path, {"a/1.png": b"no", "b/2.png": b"no"})
    with pytest.raises(UserError, match=r"no usable image among 2; 'a/1.png': not a readable image"):
        open_dataset(tmp_path)


def test_no_decodable_training_image(tmp_path: Path) -> None:
    fill(tmp_path, numbered({"val/a": 2, "val/b": 2}))
    fill(tmp_path, {"train/a/1.png": b"no", "train/b/1.png": b"no"})
    with pytest.raises(UserError, match="images in 'val' but no usable image in a 'train' folder"):
        open_dataset(tmp_path)


# other files in the folder


def test_ignored_files_are_noted(tmp_path: Path) -> None:
    fill(tmp_path, numbered({"a": 3, "b": 3}))
    fill(tmp_path, ["loose.png", ".hidden.png", ".ipynb_checkpoints/1.png", "a/.DS_Store", "@eaDir/a.jpg"])
    fill(tmp_path, {"a/notes.txt": b"", "labels.csv": b""})
    (tmp_path / "empty").mkdir()
    (tmp_path / "a/sub").mkdir()
    data = open_dataset(tmp_path)
    assert data.classes == ("a", "b")
    assert has_note(data.notes, "Ignored 1 image", "'loose.png'")
    assert has_note(data.notes, "Ignored 1 class folder", "'empty'")
    assert has_note(data.notes, "Ignored 4 hidden items")
    assert has_note(data.notes, "Ignored 2 non-image files", ".csv 1, .txt 1")
    assert len(data.notes) == 4
    assert sum(map(len, data.splits.values())) == 6


def test_images_outside_the_split_folders_are_noted(tmp_path: Path) -> None:
    fill(tmp_path, numbered({"train/a": 2, "train/b": 2, "val/a": 1, "val/b": 1, "unlabelled": 1}))
    (tmp_path / "train/c").mkdir()
    notes = open_dataset(tmp_path).notes
    assert has_note(notes, "Ignored 1 image", "'train', 'val'", "'unlabelled/0.png'")
    assert has_note(notes, "Ignored 1 class folder", "'train/c'") and len(notes) == 2


def test_broken_images_are_excluded_with_a_reason(tmp_path: Path) -> None:
    whole = image_bytes(1, (60, 80), "JPEG")
    header = b"IHDR" + struct.pack(">IIBBBBB", 50_000, 50_000, 8, 2, 0, 0, 0)
    bomb = image_bytes(2)
    bomb = bomb[:12] + header + struct.pack(">I", zlib.crc32(header)) + bomb[33:]
    fill(tmp_path, numbered({"a": 3, "b": 3}))
    fill(
        tmp_path,
        {
            "a/cut.jpg": whole[: len(whole) // 2],
            "a/empty.png": b"",
            "a/text.jpg": b"this is a text file",
            "a/bomb.png": bomb,
            "a/wrong extension.png": whole,
            "b/ünï cöde 図.jpeg": whole,
            "b/folder.jpg/inside.TIFF": image_bytes(7, kind="TIFF"),
            "c/only.gif": b"GIF89a",
        },
    )
    data = open_dataset(tmp_path, None)
    assert [name for name, _ in data.excluded] == ["a/bomb.png", "a/cut.jpg", "a/empty.png", "a/text.jpg", "c/only.gif"]
    reasons = dict(data.excluded)
    assert "pixels" in reasons["a/bomb.png"]
    assert "truncated" in reasons["a/cut.jpg"]
    assert "empty" in reasons["a/empty.png"]
    assert "not a readable image" in reasons["a/text.jpg"]
    assert {"a/wrong extension.png", "b/ünï cöde 図.jpeg", "b/folder.jpg/inside.TIFF"} <= names_of(data, "all")
    assert data.classes == ("a", "b")
    assert has_note(data.notes, "Skipped 5 unusable files", "'a/bomb.png'")
    assert has_note(data.notes, "No usable image in the class folders 'c'")


def test_images_above_the_pixel_limit_are_excluded_and_a_new_limit_applies(tmp_path: Path) -> None:
    fill(tmp_path, numbered({"a": 3, "b": 3}))
    fill(tmp_path, {"a/big.png": image_bytes(9, (50, 50))})
    ((name, reason),) = open_dataset(tmp_path, max_pixels=2_499).excluded
    assert name == "a/big.png" and "50x50" in reason and "2,499" in reason
    assert open_dataset(tmp_path, max_pixels=2_500).excluded == []


def test_links_are_followed_once(tmp_path: Path) -> None:
    real = fill(tmp_path / "real", ["1.png", "2.png"])
    data_folder = fill(tmp_path / "data", numbered({"a": 2, "b": 2}))
    (data_folder / "a/up").symlink_to(data_folder)
    (data_folder / "a/self").symlink_to(data_folder / "a")
    (data_folder / "aaa").symlink_to(data_folder / "b")
    (data_folder / "c").symlink_to(real)
    (data_folder / "b/gone.png").symlink_to(tmp_path / "missing.png")
    (data_folder / "b/linked.png").symlink_to(real / "1.png")
    data = open_dataset(data_folder, None)
    assert names_of(data, "all") == {"a/0.png", "a/1.png", "b/0.png", "b/1.png", "b/linked.png", "c/1.png", "c/2.png"}
    ((name, reason),) = data.excluded
    assert name == "b/gone.png" and reason.startswith(FILE_NOT_FOUND) and f"'{tmp_path}/missing.png'" in reason
    assert has_note(data.notes, "Ignored 3 links")


def test_a_pipe_named_like_an_image_does_not_hang(tmp_path: Path) -> None:
    fill(tmp_path, numbered({"a": 2, "b": 2}))
    os.mkfifo(tmp_path / "a/pipe.png")
    assert len(open_dataset(tmp_path, None).splits["all"]) == 4


def test_file_names_that_are_not_unicode(tmp_path: Path) -> None:
    fill(tmp_path, numbered({"a": 2, "b": 2}))
    odd = os.fsdecode(b"a/\xff\xfe.png")
    try:
        (tmp_path / odd).write_bytes(image_bytes(77))
    except OSError:
        pytest.skip("this file system takes Unicode names only")
    for _ in range(2):  # decoded, then from the cache
        samples = open_dataset(tmp_path, None).splits["all"]
        index = [samples.name(i) for i in range(len(samples))].index(odd)
        assert samples.read(index) == image_bytes(77)


def test_an_unreadable_file_is_excluded_and_tried_again_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, numbered({"a": 2, "b": 2}))
    read = files_module.FolderFiles.read

    def refuse(self: files_module.FolderFiles, name: str) -> bytes:
        if name == "a/0.png":
            raise PermissionError(13, "Permission denied")
        return read(self, name)

    with monkeypatch.context() as patch:
        patch.setattr(files_module.FolderFiles, "read", refuse)
        assert open_dataset(tmp_path).excluded == [("a/0.png", "cannot be read: Permission denied")]
    assert open_dataset(tmp_path).excluded == []
