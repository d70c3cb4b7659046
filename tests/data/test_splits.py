"""How images are split, and the fingerprint of a data set."""

from __future__ import annotations

import io
import os
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.data.folders import contents, fill, has_note, image_bytes, names_of, numbered
from vitrail.data import dataset
from vitrail.data.dataset import Dataset, open_dataset
from vitrail.data.splits import SplitRule

# the split


def test_the_validation_split_is_stratified_and_never_takes_the_last_image(tmp_path: Path) -> None:
    counts = {"one": 1, "two": 2, "three": 3, "ten": 10, "many": 52}
    data = open_dataset(fill(tmp_path, numbered(counts)), SplitRule(holdout_fraction=0.2))
    in_val = Counter(name.split("/")[0] for name in names_of(data, "val"))
    assert in_val == {"two": 1, "three": 1, "ten": 2, "many": 10}
    assert len(data.notes) == 1 and has_note(data.notes, "single image", "'one'")
    assert not names_of(data, "val") & names_of(data, "train")
    mostly = open_dataset(tmp_path, SplitRule(holdout_fraction=0.99))
    assert Counter(name.split("/")[0] for name in names_of(mostly, "train")) == dict.fromkeys(counts, 1)


def test_the_seed_alone_decides_the_split(tmp_path: Path) -> None:
    images = {name: image_bytes(i) for i, name in enumerate(numbered({"a": 30, "b": 30}))}
    first = open_dataset(fill(tmp_path / "first", images), SplitRule(split_seed=3))
    copy = open_dataset(fill(tmp_path / "copy", dict(reversed(images.items()))), SplitRule(split_seed=3))
    assert contents(first) == contents(copy)
    other_seed = open_dataset(tmp_path / "first", SplitRule(split_seed=4))
    assert names_of(other_seed, "val") != names_of(first, "val")
    assert other_seed.fingerprint == first.fingerprint


@settings(max_examples=15, deadline=None)
@given(count=st.integers(5, 40), seed=st.integers(0, 5), removed=st.integers(0, 4))
def test_a_removed_image_moves_at_most_one_other(
    tmp_path_factory: pytest.TempPathFactory, count: int, seed: int, removed: int
) -> None:
    root = fill(tmp_path_factory.mktemp("data"), numbered({"a": count, "b": 2}))
    before = open_dataset(root, SplitRule(split_seed=seed))
    (root / f"a/{removed}.png").unlink()
    after = open_dataset(root, SplitRule(split_seed=seed))
    gone = {f"a/{removed}.png"}
    assert len((names_of(before, "val") ^ names_of(after, "val")) - gone) <= 1
    assert {n for n in names_of(before, "val") if n[0] == "b"} == {n for n in names_of(after, "val") if n[0] == "b"}


def test_renaming_moves_no_image_and_copies_stay_in_one_split(tmp_path: Path) -> None:
    images = {name: image_bytes(i) for i, name in enumerate(numbered({"a": 20, "b": 20}))}
    first = open_dataset(fill(tmp_path / "first", images))
    renamed = {name.replace("/", "/new "): data for name, data in images.items()}
    second = open_dataset(fill(tmp_path / "second", renamed))
    assert {name.replace("new ", "") for name in names_of(second, "val")} == names_of(first, "val")
    copies = {f"{name}.png": data for name, data in images.items()} | images
    both = open_dataset(fill(tmp_path / "both", copies))
    apart = [name for name in names_of(both, "val") if name in images and f"{name}.png" not in names_of(both, "val")]
    assert not apart


def test_copies_in_several_splits_are_noted(tmp_path: Path) -> None:
    fill(tmp_path, numbered({"train/a": 2, "train/b": 2, "val/a": 1}))
    shutil.copy(tmp_path / "train/a/1.png", tmp_path / "val/a/copy.png")
    data = open_dataset(tmp_path)
    assert has_note(data.notes[-1:], "1 exact duplicate", "'val/a/copy.png'")


def test_similar_images_stay_in_one_split(tmp_path: Path) -> None:
    images: dict[str, bytes] = {}
    for i in range(40):
        waves = np.random.default_rng(i).integers(0, 256, (5, 5, 3), np.uint8)
        photo = Image.fromarray(waves).resize((96, 80), Image.Resampling.BICUBIC)
        for kind, size in (("png", (96, 80)), ("jpg", (70, 60))):
            file = io.BytesIO()
            photo.resize(size).save(file, "PNG" if kind == "png" else "JPEG")
            images[f"{'ab'[i % 2]}/{i}.{kind}"] = file.getvalue()
    fill(tmp_path, images)

    def in_both(data: Dataset) -> int:
        in_val = {name.split(".")[0] for name in names_of(data, "val")}
        return len(in_val & {name.split(".")[0] for name in names_of(data, "train")})

    grouped, ungrouped = open_dataset(tmp_path), open_dataset(tmp_path, SplitRule(group_similar=False))
    assert in_both(grouped) == 0 and len(grouped.splits["val"]) == 16
    assert in_both(ungrouped) > 5
    assert grouped.fingerprint == ungrouped.fingerprint


def open_groups(root: Path, rows: list[tuple[str, str]], seed: int, fraction: float = 0.2) -> Dataset:
    """Open a table of images with these (class, group) rows."""
    fill(root, [f"{i}.png" for i in range(len(rows))])
    lines = [f"{i}.png,{label},{group}" for i, (label, group) in enumerate(rows)]
    (root / "list.csv").write_text("\n".join(["path,label,group", *lines]))
    return open_dataset(root / "list.csv", SplitRule(split_seed=seed, holdout_fraction=fraction))


def count_of(data: Dataset, split: str) -> Counter[str]:
    return Counter(label for _, label in contents(data)[split])


@pytest.mark.parametrize("seed", range(5))
def test_uneven_groups_come_as_near_to_the_fraction_as_they_allow(tmp_path: Path, seed: int) -> None:
    rows = [(name, f"{name}{'large' if i < 95 else 'small'}") for name in "ab" for i in range(100)]
    data = open_groups(tmp_path, rows, seed)
    assert count_of(data, "val") == {"a": 5, "b": 5}
    assert has_note(data.notes[-1:], "5%", "20%", "groups")


@pytest.mark.parametrize("seed", range(8))
def test_no_class_loses_its_last_training_image(tmp_path: Path, seed: int) -> None:
    rows = [("cat", f"p{i // 4}") for i in range(40)] + [("dog", "p0")] * 3
    data = open_groups(tmp_path, rows, seed)
    assert count_of(data, "train")["dog"] == 3 and count_of(data, "val") == {"cat": 8}
    assert has_note(data.notes, "one group", "'dog'")


def test_a_class_of_similar_images_is_split_anyway(tmp_path: Path) -> None:
    waves = np.random.default_rng(0).integers(0, 256, (5, 5, 3), np.uint8)
    product = np.asarray(Image.fromarray(waves).resize((96, 80), Image.Resampling.BICUBIC)).astype(int)
    for name in ("good", "defect"):
        (tmp_path / name).mkdir()
        for i in range(20):
            noise = np.random.default_rng([i, name == "good"]).integers(-6, 7, product.shape)
            Image.fromarray((product + noise).clip(0, 255).astype(np.uint8)).save(tmp_path / name / f"{i}.png")
    data = open_dataset(tmp_path)
    assert count_of(data, "val") == {"good": 4, "defect": 4}
    assert len(data.notes) == 1 and has_note(data.notes, "40 similar images")


def test_rejected_groups_do_not_reduce_other_classes(tmp_path: Path) -> None:
    """Every group of ants is too large, so the smallest is taken. The group with bees is not, so bees stay in train."""
    rows = [("ant", "31")] * 31 + [("ant", "with bees")] * 25 + [("bee", "with bees")] * 7 + [("ant", "40")] * 40
    data = open_groups(tmp_path, [*rows, ("bee", "alone")], 0, fraction=0.05)
    assert count_of(data, "val") == {"ant": 31, "bee": 1} and count_of(data, "train")["bee"] == 7


def test_a_full_sketch_tells_for_which_images_it_is_unknown(tmp_path: Path) -> None:
    train = open_dataset(fill(tmp_path, numbered({"a": 10, "b": 10}))).splits["train"]
    # as weights files of the first format store it
    sketch = [f"{digest:016x}" for digest in sorted(train.original_digests.tolist())]
    known, unknown = dataset.match_sketch(train, sketch, dataset.SKETCH_SIZE)
    assert known.all() and not unknown.any() and repr(train) == f"<{len(train)} images of 2 classes>"
    known, unknown = dataset.match_sketch(train, sketch[:5], 5)
    assert known.sum() == 5 and unknown.sum() == len(train) - 5 and not (known & unknown).any()


# the fingerprint


def test_the_fingerprint_depends_on_content_names_and_classes_only(tmp_path: Path) -> None:
    root = fill(tmp_path / "one", numbered({"a": 4, "b": 4}))
    fingerprint = open_dataset(root).fingerprint
    copied = shutil.copytree(root, tmp_path / "two")
    os.utime(copied / "a/0.png", (1, 1))
    assert open_dataset(copied).fingerprint == fingerprint
    assert open_dataset(root, SplitRule(holdout_fraction=0.5), classes=["b", "a"]).fingerprint == fingerprint
    (copied / "a/0.png").write_bytes(image_bytes(200))
    swapped = open_dataset(copied).fingerprint
    (copied / "a/0.png").rename(copied / "b/extra.png")
    moved = open_dataset(copied).fingerprint
    assert len({fingerprint, swapped, moved}) == 3


def test_the_median_size(tmp_path: Path) -> None:
    sizes = [(4, 6), (10, 8), (100, 7)]
    fill(tmp_path, {f"{name}/{h}.png": image_bytes(1, (h, w)) for name in "ab" for h, w in sizes})
    assert open_dataset(tmp_path).median_size == (10, 7)
