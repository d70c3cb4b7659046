"""Class folders and archives of them: what is found, how it is split, and what the user is told."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import struct
import subprocess
import sys
import zipfile
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from vitrail.errors import UserError
from vitrail.images import files as files_module
from vitrail.images import scan as scan_module
from vitrail.images.decode import decode
from vitrail.images.sources import Dataset, bundled_images, open_dataset


def image_bytes(value: int, size: tuple[int, int] = (4, 6), kind: str = "PNG") -> bytes:
    """A picture no other value gives."""
    file = io.BytesIO()
    pixels = np.full((*size, 3), value % 256, np.uint8)
    pixels[0, 0] = value // 256 % 256
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def fill(root: Path, names: list[str] | dict[str, bytes]) -> Path:
    """Write images; without bytes of their own each gets different ones."""
    contents = names if isinstance(names, dict) else {name: image_bytes(i) for i, name in enumerate(names)}
    for name, data in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


def numbered(counts: dict[str, int]) -> list[str]:
    return [f"{name}/{i}.png" for name, count in counts.items() for i in range(count)]


def zipped(root: Path, target: Path, prefix: str = "") -> Path:
    with zipfile.ZipFile(target, "w") as archive:
        for path in sorted(root.rglob("*"), reverse=True):
            archive.write(path, prefix + path.relative_to(root).as_posix())
    return target


def contents(data: Dataset) -> dict[str, list[tuple[str, str]]]:
    return {split: [(s.name(i), s.classes[s.labels[i]]) for i in range(len(s))] for split, s in data.splits.items()}


def names_of(data: Dataset, split: str) -> set[str]:
    return {name for name, _ in contents(data)[split]}


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
    everything = open_dataset(tmp_path, split=False).splits["all"]
    assert [everything.classes[label] for label in everything.labels] == ["a", "a", "a", "b", "b"]


def test_folders_called_training_and_testing_are_splits(tmp_path: Path) -> None:
    fill(tmp_path, numbered({"Training/a": 4, "Training/b": 4, "Testing/a": 1, "Testing/b": 1}))
    data = open_dataset(tmp_path)
    assert data.classes == ("a", "b") and len(data.splits["test"]) == 2


def test_splits_under_unknown_names_are_suspected(tmp_path: Path) -> None:
    fill(tmp_path, numbered({"part1/a": 2, "part1/b": 2, "part2/a": 2, "part2/b": 2}))
    assert any("if those are the classes" in note for note in open_dataset(tmp_path).notes)
    other = fill(tmp_path / "other", numbered({"cat/day1": 2, "cat/day2": 2, "dog/day1": 2, "dog": 1}))
    assert not any("if those are the classes" in note for note in open_dataset(other).notes)


@pytest.mark.skipif(sys.platform != "linux", reason="file names that are not text")
def test_a_class_name_that_is_not_text_is_told_before_the_scan(tmp_path: Path) -> None:
    fill(tmp_path, numbered({"a": 2, os.fsdecode(b"caf\xe9"): 2}))
    with pytest.raises(UserError, match="is not plain text: rename the folder"):
        open_dataset(tmp_path)


@pytest.mark.parametrize("validation", ["val", "valid", "validation", "dev", "VAL", "Valid"])
def test_given_splits_are_kept(tmp_path: Path, validation: str) -> None:
    fill(tmp_path, ["Train/a/1.png", "Train/b/2.png", f"{validation}/a/3.png", f"{validation}/b/4.png", "test/a/5.png"])
    data = open_dataset(tmp_path)
    assert data.given_split
    assert {split: len(samples) for split, samples in data.splits.items()} == {"train": 2, "val": 2, "test": 1}
    assert names_of(data, "val") == {f"{validation}/a/3.png", f"{validation}/b/4.png"}
    assert data.notes == ["The test split has no images of 'b'."]
    assert contents(open_dataset(tmp_path, split=False)) == contents(data)


def test_with_a_test_split_alone_some_training_images_are_watched_instead(tmp_path: Path) -> None:
    fill(tmp_path, numbered({"train/a": 20, "train/b": 20, "test/a": 2, "test/b": 2}))
    data = open_dataset(tmp_path)
    assert {split: len(samples) for split, samples in data.splits.items()} == {"train": 36, "val": 4, "test": 4}
    assert names_of(data, "test") == {"test/a/0.png", "test/a/1.png", "test/b/0.png", "test/b/1.png"}
    assert all(name.startswith("train/") for name in names_of(data, "val"))
    more = open_dataset(tmp_path, monitor=0.5)
    assert len(more.splits["val"]) == 20 and len(more.splits["test"]) == 4


def test_train_alone_is_held_out(tmp_path: Path) -> None:
    fill(tmp_path, numbered({"train/a": 10, "train/b": 10}))
    data = open_dataset(tmp_path)
    assert data.given_split
    assert {split: len(samples) for split, samples in data.splits.items()} == {"train": 16, "val": 4}
    assert set(open_dataset(tmp_path, split=False).splits) == {"train"}


def test_a_class_of_trains_is_a_class(tmp_path: Path) -> None:
    fill(tmp_path, numbered({"train": 3, "bus": 3}))
    assert open_dataset(tmp_path).classes == ("bus", "train")


def test_classes_of_a_weights_file_fix_the_labels(tmp_path: Path) -> None:
    fill(tmp_path, numbered({"cat": 2, "dog": 2}))
    data = open_dataset(tmp_path, classes=["dog", "emu", "cat"], split=False)
    assert data.classes == ("dog", "emu", "cat")
    assert Counter(data.splits["all"].labels.tolist()) == {0: 2, 2: 2}
    assert data.notes == ["The all split has no images of 'emu'."]
    one = fill(tmp_path / "one", numbered({"cat": 2}))
    assert open_dataset(one, classes=["dog", "cat"], split=False).splits["all"].labels.tolist() == [1, 1]


# what is wrong is said in a sentence


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "holds no images; put the images of each class in a folder"),
        (["a/readme.txt"], "holds no images"),
        (["1.png", "2.png"], "has images but no class folders; put the images"),
        (["train/1.png", "test/2.png"], "has images but no class folders"),
        (["a/1.png", "a/2.png"], "has only one class, 'a', and a classifier needs two"),
        (["photos/a/1.png", "photos/b/2.png"], "only one class, 'photos'.*did you mean '.*/photos'"),
        (["val/a/1.png", "test/a/2.png"], "has images for 'test', 'val' but none that can be used in a 'train' folder"),
        (["train/a/1.png", "train/b/1.png", "val/a/1.png", "Valid/a/1.png"], "mean the same split; keep one"),
        (
            ["train/cat/1.png", "train/dog/1.png", "val/cat/1.png", "val/dgo/1.png"],
            "class folder 'dgo' in the val split of .* is not one of the training classes; did you mean 'dog'",
        ),
    ],
)
def test_layouts_that_cannot_be_used(tmp_path: Path, names: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        open_dataset(fill(tmp_path, names))
    assert "\n" not in str(caught.value)


def test_a_folder_outside_the_known_classes(tmp_path: Path) -> None:
    fill(tmp_path, numbered({"cat": 2, "dgo": 2}))
    with pytest.raises(UserError, match=r"'dgo' .* is not one of the known classes; did you mean 'dog'"):
        open_dataset(tmp_path, classes=["cat", "dog"])


def test_paths_that_are_no_data_set(tmp_path: Path) -> None:
    (tmp_path / "flowers").mkdir()
    with pytest.raises(UserError, match="does not exist; did you mean 'flowers'"):
        open_dataset(tmp_path / "flower")
    with pytest.raises(UserError, match=r"nowhere/at/all' does not exist$"):
        open_dataset(tmp_path / "nowhere/at/all")
    fill(tmp_path, {"one.JPG": image_bytes(1), "notes.txt": b"x", "broken.zip": b"PK nothing", "empty.zip": b""})
    with pytest.raises(UserError, match="is a single image; give the folder"):
        open_dataset(tmp_path / "one.JPG")
    with pytest.raises(UserError, match=r"neither a folder nor a \.zip"):
        open_dataset(tmp_path / "notes.txt")
    for name in ("broken.zip", "empty.zip"):
        with pytest.raises(UserError, match="cannot be read as a zip archive"):
            open_dataset(tmp_path / name)


@pytest.mark.parametrize("holdout", [0.0, 1.0, -0.1, 2])
def test_a_share_that_cannot_be_held_out(tmp_path: Path, holdout: float) -> None:
    with pytest.raises(UserError, match="between 0 and 1"):
        open_dataset(tmp_path, holdout=holdout)


def test_nothing_decodable(tmp_path: Path) -> None:
    fill(tmp_path, {"a/1.png": b"no", "b/2.png": b"no"})
    with pytest.raises(UserError, match=r"has no image that can be used, of 2; 'a/1.png': not a readable image"):
        open_dataset(tmp_path)


def test_no_decodable_training_image(tmp_path: Path) -> None:
    fill(tmp_path, numbered({"val/a": 2, "val/b": 2}))
    fill(tmp_path, {"train/a/1.png": b"no", "train/b/1.png": b"no"})
    with pytest.raises(UserError, match="has images for 'val' but none that can be used in a 'train' folder"):
        open_dataset(tmp_path)


# what lies around in real folders


def test_what_is_ignored_is_noted(tmp_path: Path) -> None:
    fill(tmp_path, numbered({"a": 3, "b": 3}))
    fill(tmp_path, ["loose.png", ".hidden.png", ".ipynb_checkpoints/1.png", "a/.DS_Store", "@eaDir/a.jpg"])
    fill(tmp_path, {"a/notes.txt": b"", "labels.csv": b""})
    (tmp_path / "empty").mkdir()
    (tmp_path / "a/sub").mkdir()
    data = open_dataset(tmp_path)
    assert data.classes == ("a", "b")
    assert data.notes == [
        "Ignored 1 image beside the class folders: 'loose.png'.",
        "Ignored 1 class folder without images: 'empty'.",
        "Ignored 4 hidden items.",
        "Ignored 2 files without the name of an image.",
    ]
    assert sum(map(len, data.splits.values())) == 6


def test_images_outside_the_split_folders_are_noted(tmp_path: Path) -> None:
    fill(tmp_path, numbered({"train/a": 2, "train/b": 2, "val/a": 1, "val/b": 1, "unlabelled": 1}))
    (tmp_path / "train/c").mkdir()
    assert open_dataset(tmp_path).notes == [
        "Ignored 1 image outside the folders 'train', 'val': 'unlabelled/0.png'.",
        "Ignored 1 class folder without images: 'train/c'.",
    ]


def test_files_that_are_no_pictures_are_excluded_with_a_reason(tmp_path: Path) -> None:
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
    data = open_dataset(tmp_path, split=False)
    assert [name for name, _ in data.excluded] == ["a/bomb.png", "a/cut.jpg", "a/empty.png", "a/text.jpg", "c/only.gif"]
    reasons = dict(data.excluded)
    assert "pixels" in reasons["a/bomb.png"]
    assert "cut short" in reasons["a/cut.jpg"]
    assert "empty" in reasons["a/empty.png"]
    assert "not a readable image" in reasons["a/text.jpg"]
    found = names_of(data, "all")
    assert {"a/wrong extension.png", "b/ünï cöde 図.jpeg", "b/folder.jpg/inside.TIFF"} <= found
    assert data.classes == ("a", "b")
    assert any(note.startswith("Left out 5 images that cannot be used; 'a/bomb.png'") for note in data.notes)
    assert "No image can be used in the class folders 'c'." in data.notes


def test_too_many_pixels_are_excluded_and_a_new_limit_is_obeyed(tmp_path: Path) -> None:
    fill(tmp_path, numbered({"a": 3, "b": 3}))
    fill(tmp_path, {"a/big.png": image_bytes(9, (50, 50))})
    assert open_dataset(tmp_path, max_pixels=2_499).excluded == [
        ("a/big.png", "50x50 pixels is more than the limit of 2,499")
    ]
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
    data = open_dataset(data_folder, split=False)
    assert names_of(data, "all") == {"a/0.png", "a/1.png", "b/0.png", "b/1.png", "b/linked.png", "c/1.png", "c/2.png"}
    assert data.excluded == [("b/gone.png", "the file cannot be found: No such file or directory")]
    assert "Ignored 3 links to folders already read." in data.notes


def test_a_pipe_with_the_name_of_an_image_does_not_hang(tmp_path: Path) -> None:
    fill(tmp_path, numbered({"a": 2, "b": 2}))
    os.mkfifo(tmp_path / "a/pipe.png")
    assert len(open_dataset(tmp_path, split=False).splits["all"]) == 4


def test_names_that_are_not_unicode(tmp_path: Path) -> None:
    fill(tmp_path, numbered({"a": 2, "b": 2}))
    odd = os.fsdecode(b"a/\xff\xfe.png")
    try:
        (tmp_path / odd).write_bytes(image_bytes(77))
    except OSError:
        pytest.skip("this file system takes Unicode names only")
    for _ in range(2):  # decoded, then from the cache
        samples = open_dataset(tmp_path, split=False).splits["all"]
        index = [samples.name(i) for i in range(len(samples))].index(odd)
        assert samples.read(index) == image_bytes(77)


def test_a_file_that_cannot_be_read_is_excluded_and_tried_again(
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


# the split


def test_hold_out_is_stratified_and_never_takes_the_last_image(tmp_path: Path) -> None:
    counts = {"one": 1, "two": 2, "three": 3, "ten": 10, "many": 52}
    data = open_dataset(fill(tmp_path, numbered(counts)), holdout=0.2)
    held = Counter(name.split("/")[0] for name in names_of(data, "val"))
    assert held == {"two": 1, "three": 1, "ten": 2, "many": 10}
    assert data.notes == ["Nothing is held out of classes with a single image: 'one'."]
    assert not names_of(data, "val") & names_of(data, "train")
    mostly = open_dataset(tmp_path, holdout=0.99)
    assert Counter(name.split("/")[0] for name in names_of(mostly, "train")) == dict.fromkeys(counts, 1)


def test_the_seed_alone_decides_the_split(tmp_path: Path) -> None:
    images = {name: image_bytes(i) for i, name in enumerate(numbered({"a": 30, "b": 30}))}
    first = open_dataset(fill(tmp_path / "here", images), split_seed=3)
    elsewhere = open_dataset(fill(tmp_path / "elsewhere", dict(reversed(images.items()))), split_seed=3)
    assert contents(first) == contents(elsewhere)
    other = open_dataset(tmp_path / "here", split_seed=4)
    assert names_of(other, "val") != names_of(first, "val")
    assert other.fingerprint == first.fingerprint


@settings(max_examples=15, deadline=None)
@given(count=st.integers(5, 40), seed=st.integers(0, 5), removed=st.integers(0, 4))
def test_a_removed_image_moves_at_most_one_other(
    tmp_path_factory: pytest.TempPathFactory, count: int, seed: int, removed: int
) -> None:
    root = fill(tmp_path_factory.mktemp("data"), numbered({"a": count, "b": 2}))
    before = open_dataset(root, split_seed=seed)
    (root / f"a/{removed}.png").unlink()
    after = open_dataset(root, split_seed=seed)
    gone = {f"a/{removed}.png"}
    assert len((names_of(before, "val") ^ names_of(after, "val")) - gone) <= 1
    assert {n for n in names_of(before, "val") if n[0] == "b"} == {n for n in names_of(after, "val") if n[0] == "b"}


def test_the_content_decides_so_renaming_moves_nothing_and_copies_stand_together(tmp_path: Path) -> None:
    images = {name: image_bytes(i) for i, name in enumerate(numbered({"a": 20, "b": 20}))}
    first = open_dataset(fill(tmp_path / "first", images))
    renamed = {name.replace("/", "/new "): data for name, data in images.items()}
    second = open_dataset(fill(tmp_path / "second", renamed))
    assert {name.replace("new ", "") for name in names_of(second, "val")} == names_of(first, "val")
    copies = {f"{name}.png": data for name, data in images.items()} | images
    both = open_dataset(fill(tmp_path / "both", copies))
    apart = [name for name in names_of(both, "val") if name in images and f"{name}.png" not in names_of(both, "val")]
    assert len(apart) <= len(both.classes)  # at most the pair at the cut of each class


def test_copies_across_the_split_are_noted(tmp_path: Path) -> None:
    fill(tmp_path, numbered({"train/a": 2, "train/b": 2, "val/a": 1}))
    shutil.copy(tmp_path / "train/a/1.png", tmp_path / "val/a/copy.png")
    data = open_dataset(tmp_path)
    assert data.notes[-1] == "Exact copies of training images lie in other splits (1): 'val/a/copy.png'."


# the fingerprint


def test_the_fingerprint_sees_content_names_and_classes_only(tmp_path: Path) -> None:
    root = fill(tmp_path / "one", numbered({"a": 4, "b": 4}))
    fingerprint = open_dataset(root).fingerprint
    copied = shutil.copytree(root, tmp_path / "two")
    os.utime(copied / "a/0.png", (1, 1))
    assert open_dataset(copied).fingerprint == fingerprint
    assert open_dataset(root, classes=["b", "a"], holdout=0.5).fingerprint == fingerprint
    (copied / "a/0.png").write_bytes(image_bytes(200))
    swapped = open_dataset(copied).fingerprint
    (copied / "a/0.png").rename(copied / "b/extra.png")
    moved = open_dataset(copied).fingerprint
    assert len({fingerprint, swapped, moved}) == 3


def test_the_median_size(tmp_path: Path) -> None:
    sizes = [(4, 6), (10, 8), (100, 7)]
    fill(tmp_path, {f"{name}/{h}.png": image_bytes(1, (h, w)) for name in "ab" for h, w in sizes})
    assert open_dataset(tmp_path).median_size == (10, 7)


# archives


@pytest.mark.parametrize("prefix", ["", "photos/", "my/photos/"])
def test_an_archive_is_the_folder_it_was_made_of(tmp_path: Path, prefix: str) -> None:
    root = fill(tmp_path / "photos", [*numbered({"a": 5, "b ü": 5}), "a/deep/er/x.JPG"])
    (root / "a/cut.png").write_bytes(image_bytes(3)[:30])
    folder, archive = open_dataset(root), open_dataset(zipped(root, tmp_path / "photos.zip", prefix))
    assert archive.fingerprint == folder.fingerprint
    assert archive.classes == folder.classes
    assert contents(archive) == contents(folder)
    assert archive.excluded == folder.excluded
    assert archive.median_size == folder.median_size
    for split, samples in archive.splits.items():
        assert [samples.read(i) for i in range(len(samples))] == [
            folder.splits[split].read(i) for i in range(len(samples))
        ]
    assert len([note for note in archive.notes if "inside" in note]) == prefix.count("/")


def test_hostile_archives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files_module, "MAX_FILE_BYTES", 10_000)
    target = tmp_path / "x.zip"
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in numbered({"a": 2, "b": 2}):
            archive.writestr(name, image_bytes(1))
        for name in ("../../evil/1.png", "/etc/2.png", "a/../../3.png", "__MACOSX/a/._1.png", "a/._1.png"):
            archive.writestr(name, image_bytes(2))
        archive.writestr("a/large.png", bytes(20_000))
        archive.writestr("a/lzma.png", image_bytes(3), zipfile.ZIP_LZMA)
        archive.writestr("a/secret.png", image_bytes(4))
        archive.writestr("b/bent.png", image_bytes(5), zipfile.ZIP_STORED)
    raw = bytearray(target.read_bytes())
    bent = raw.find(image_bytes(5))
    raw[bent + 40] ^= 0xFF
    secret = raw.rfind(b"a/secret.png") - 46  # its entry in the central directory
    raw[secret + 8] |= 1
    target.write_bytes(raw)
    data = open_dataset(target, split=False)
    assert names_of(data, "all") == {"a/0.png", "a/1.png", "b/0.png", "b/1.png"}
    reasons = dict(data.excluded)
    assert "larger than 10,000 bytes" in reasons["a/large.png"]
    assert "compression is not supported" in reasons["a/lzma.png"]
    assert "encrypted" in reasons["a/secret.png"]
    assert "damaged" in reasons["b/bent.png"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.zip"]
    assert "Ignored 5 hidden items." in data.notes


def test_large_files_in_folders_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files_module, "MAX_FILE_BYTES", 1_000)
    fill(tmp_path, numbered({"a": 2, "b": 2}))
    (tmp_path / "a/large.png").write_bytes(bytes(1_001))
    assert open_dataset(tmp_path).excluded == [("a/large.png", "cannot be read: the file is larger than 1,000 bytes")]


# in workers


def test_samples_are_small_to_send_and_read_after_it(tmp_path: Path) -> None:
    root = fill(tmp_path / "data", numbered({"a": 50, "b": 50}))
    for place in (root, zipped(root, tmp_path / "data.zip")):
        samples = open_dataset(place).splits["train"]
        sent = pickle.dumps(samples)
        assert len(sent) < 5_000
        again = pickle.loads(sent)
        assert [again.name(i) for i in range(len(again))] == [samples.name(i) for i in range(len(samples))]
        assert again.read(3) == samples.read(3)
        assert again.name(-1) == samples.name(len(samples) - 1)
        with pytest.raises(IndexError):
            again.name(len(samples))


def test_a_subset_keeps_order_labels_and_classes(tmp_path: Path) -> None:
    samples = open_dataset(fill(tmp_path, numbered({"a": 10, "b": 10})), split=False).splits["all"]
    part = samples.subset([15, 2, 2])
    assert [part.name(i) for i in range(3)] == [samples.name(15), samples.name(2), samples.name(2)]
    assert part.labels.tolist() == [1, 0, 0]
    assert part.classes == samples.classes
    assert part.read(0) == samples.read(15)
    assert len(samples.subset([])) == 0


def test_forked_readers_of_one_archive_do_not_disturb_each_other(tmp_path: Path) -> None:
    root = fill(tmp_path / "data", {f"{c}/{i}.png": image_bytes(i, (40, 40)) for c in "ab" for i in range(40)})
    samples = open_dataset(zipped(root, tmp_path / "data.zip"), split=False).splits["all"]
    expected = [samples.read(i) for i in range(len(samples))]
    children = []
    for _ in range(3):
        child = os.fork()
        if child == 0:
            good = all(samples.read(i) == expected[i] for _ in range(20) for i in range(len(samples)))
            os._exit(0 if good else 1)
        children.append(child)
    assert all(samples.read(i) == expected[i] for _ in range(20) for i in range(len(samples)))
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0, 0]


# the cache


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the files that were decoded."""
    seen: list[int] = []

    def spy(data: bytes, **options: int) -> np.ndarray:
        seen.append(len(data))
        return decode(data, **options)

    monkeypatch.setattr(scan_module, "decode", spy)
    return seen


@pytest.mark.parametrize("as_archive", [False, True])
def test_only_new_and_changed_files_are_decoded_again(tmp_path: Path, decoded: list[int], as_archive: bool) -> None:
    root = fill(tmp_path / "data", numbered({"a": 5, "b": 5}))
    (root / "a/bad.png").write_bytes(b"bad")
    place = zipped(root, tmp_path / "data.zip") if as_archive else root
    first = open_dataset(place)
    assert len(decoded) == 11
    second = open_dataset(place)
    assert len(decoded) == 11
    assert second.fingerprint == first.fingerprint
    assert second.excluded == first.excluded
    assert second.median_size == first.median_size
    if not as_archive:
        (root / "a/0.png").write_bytes(image_bytes(99, (9, 9)))
        fill(root, {"b/new.png": image_bytes(98)})
        (root / "b/0.png").unlink()
        assert open_dataset(place).fingerprint != first.fingerprint
        assert len(decoded) == 13


def test_a_replaced_archive_is_scanned_again(tmp_path: Path) -> None:
    root = fill(tmp_path / "data", numbered({"a": 3, "b": 3}))
    target = zipped(root, tmp_path / "data.zip")
    before = open_dataset(target).fingerprint
    (root / "a/0.png").write_bytes(image_bytes(55))
    assert open_dataset(zipped(root, target)).fingerprint != before


@pytest.mark.parametrize("damage", [b"", b"not an archive", b"PK\x03\x04 cut"])
def test_a_damaged_cache_is_no_error(tmp_path: Path, decoded: list[int], damage: bytes) -> None:
    fill(tmp_path / "data", numbered({"a": 3, "b": 3}))
    expected = open_dataset(tmp_path / "data").fingerprint
    for file in (scan_module.cache_folder() / "scans").iterdir():
        file.write_bytes(damage)
    assert open_dataset(tmp_path / "data").fingerprint == expected
    assert len(decoded) == 12


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, {"file": b""})
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "file"))
    assert open_dataset(fill(tmp_path / "data", numbered({"a": 3, "b": 3}))).classes == ("a", "b")


def test_an_interrupted_scan_goes_on(tmp_path: Path, decoded: list[int]) -> None:
    fill(tmp_path, numbered({"a": 50, "b": 50}))

    def interrupt(done: int, total: int) -> None:
        if done >= 64:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_dataset(tmp_path, progress=interrupt)
    decoded.clear()
    open_dataset(tmp_path)
    assert len(decoded) <= 100 - 64
    leftovers = [path.name for path in (scan_module.cache_folder() / "scans").iterdir() if path.suffix != ".npz"]
    assert leftovers == []


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    fill(tmp_path, numbered({"a": 40, "b": 40}))
    calls: list[tuple[int, int]] = []
    open_dataset(tmp_path, progress=lambda done, total: calls.append((done, total)))
    assert calls[0] == (0, 80)
    assert calls[-1] == (80, 80)
    assert calls == sorted(calls)
    calls.clear()
    open_dataset(tmp_path, progress=lambda done, total: calls.append((done, total)))
    assert calls == [(80, 80)]


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("VITRAIL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert scan_module.cache_folder() == tmp_path / "vitrail"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert scan_module.cache_folder() == tmp_path / ".cache" / "vitrail"


# what comes with the package


def test_the_bundled_images() -> None:
    data = open_dataset(bundled_images(), split=False)
    assert data.given_split
    assert data.excluded == []
    assert data.notes == []
    assert data.median_size == (32, 32)
    assert len(data.classes) == 10
    assert np.bincount(data.splits["train"].labels).tolist() == [200] * 10
    assert np.bincount(data.splits["test"].labels).tolist() == [100] * 10
    pixels = {split: [decode(s.read(i)) for i in range(len(s))] for split, s in data.splits.items()}
    assert {image.shape for images in pixels.values() for image in images} == {(32, 32, 3)}
    distinct = {image.tobytes() for images in pixels.values() for image in images}
    assert len(distinct) == 3_000
    assert bundled_images().stat().st_size < 7_000_000


def test_looking_at_data_does_not_import_torch() -> None:
    code = "import sys, vitrail.images.sources, vitrail.images.decode; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
