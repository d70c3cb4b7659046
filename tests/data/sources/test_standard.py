"""Standard data sets in their published layouts, incomplete ones, and other folders that look similar."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tests.data.folders import contents, fill, has_note, names_of, numbered, zipped
from vitrail.data.dataset import open_dataset
from vitrail.data.files import ANNOTATED_NOT_FOUND
from vitrail.data.sources.data_source import DataSource
from vitrail.data.sources.oxford import flower_names
from vitrail.data.sources.read import read_source, read_standard
from vitrail.errors import UserError

scipy_io = pytest.importorskip("scipy.io")


def read(path: Path) -> tuple[DataSource, list[str]]:
    notes: list[str] = []
    images = read_standard(path, notes)
    assert images is not None
    return images, notes


def rows(images: DataSource) -> dict[str, tuple[str, str]]:
    """Name -> (split, class)."""
    columns = zip(images.entries, images.splits, images.labels, strict=True)
    return {entry.name: (split, label) for entry, split, (label,) in columns}


# Flowers


def flowers(root: Path, images: int = 6, named: int = 6) -> Path:
    """Labels 1, 51, 101, 1, ...; the first two train, the third is val, the others test."""
    fill(root, [f"jpg/image_{number:05d}.jpg" for number in range(1, images + 1)])
    labels = np.array([[1 + number % 3 * 50 for number in range(named)]], np.uint8)
    scipy_io.savemat(root / "imagelabels.mat", {"labels": labels})
    parts = {"trnid": [1, 2], "valid": [3], "tstid": list(range(4, named + 1))}
    scipy_io.savemat(root / "setid.mat", {key: np.array([ids], np.uint16) for key, ids in parts.items()})
    return root


def test_flowers(tmp_path: Path) -> None:
    root = flowers(tmp_path / "102flowers")
    (root / "jpg/extra.jpg").write_bytes(b"?")
    for path in (root, tmp_path, zipped(tmp_path, tmp_path.parent / f"{tmp_path.name}.zip")):
        images, notes = read(path)
        assert "Oxford Flowers-102" in notes[0]
        assert has_note(notes, "Ignored 1 image", "'jpg/extra.jpg'")
        assert images.classes == flower_names() and len(set(images.classes)) == 102
        assert images.splits == ["train", "train", "val", "test", "test", "test"]
        kinds = "pink primrose", "petunia", "trumpet creeper"
        assert [label for (label,) in images.labels] == [*kinds, *kinds]
        assert [entry.name for entry in images.entries] == [f"jpg/image_{n:05d}.jpg" for n in range(1, 7)]
        assert images.files.read("jpg/image_00001.jpg") == (root / "jpg/image_00001.jpg").read_bytes()
    data = open_dataset(root)
    assert {split: len(samples) for split, samples in data.splits.items()} == {"train": 2, "val": 1, "test": 3}
    assert data.splits["test"].labels.tolist() == [0, 50, 100]


def test_flowers_with_missing_images(tmp_path: Path) -> None:
    images, _ = read(flowers(tmp_path, images=4))
    assert len(images.entries) == 4
    missing = ["jpg/image_00005.jpg", "jpg/image_00006.jpg"]
    assert images.unreadable == [(name, ANNOTATED_NOT_FOUND) for name in missing]


def test_flowers_without_a_side_file(tmp_path: Path) -> None:
    root = flowers(tmp_path)
    setid = (root / "setid.mat").read_bytes()
    (root / "setid.mat").unlink()
    with pytest.raises(UserError, match=r"Flowers-102, but 'setid\.mat' is missing.*split"):
        read_source(root, [])
    (root / "setid.mat").write_bytes(setid)
    (root / "imagelabels.mat").unlink()
    with pytest.raises(UserError, match=r"Flowers-102, but 'imagelabels\.mat' is missing.*class"):
        read_source(root, [])


@pytest.mark.parametrize(
    ("file", "values", "fact"),
    [
        ("setid.mat", {"trnid": [1]}, "no numeric array 'valid'"),
        ("setid.mat", {"trnid": [1], "valid": [1], "tstid": [2]}, "image 1 twice"),
        ("setid.mat", {"trnid": [1], "valid": [9], "tstid": [2]}, "image 9,.* 6 labels"),
        ("imagelabels.mat", {"labels": "text"}, "no numeric array 'labels'"),
        ("imagelabels.mat", {"labels": [1, 2, 3, 4, 5, 103]}, "labels outside 1 to 102"),
        ("imagelabels.mat", {"labels": [1.0, np.nan]}, "no numeric array 'labels'"),
    ],
)
def test_flowers_with_wrong_side_files(tmp_path: Path, file: str, values: dict[str, object], fact: str) -> None:
    root = flowers(tmp_path)
    scipy_io.savemat(root / file, values)
    with pytest.raises(UserError, match=f"{file}'.*{fact}"):
        read_source(root, [])
    (root / file).write_bytes(b"no MATLAB file")
    with pytest.raises(UserError, match=f"{file}' cannot be read as a MATLAB file"):
        read_source(root, [])


# Pets


def pets(root: Path) -> Path:
    names = ["Abyssinian_1", "Abyssinian_10", "beagle_2", "beagle_3", "american_bulldog_7", "beagle_9"]
    fill(root, [f"images/{name}.jpg" for name in names])
    (root / "images/Abyssinian_1.mat").write_bytes(b"?")
    (root / "annotations/trimaps").mkdir(parents=True)
    fill(root, ["annotations/trimaps/beagle_2.png"])
    (root / "annotations/trainval.txt").write_text("#Image CLASS-ID\nAbyssinian_1 1 1 1\nbeagle_2 5 2 4\n")
    (root / "annotations/test.txt").write_text("american_bulldog_7 2 2 1\nAbyssinian_10 1 1 1\nbeagle_3 5 2 4\n")
    return root


def test_pets(tmp_path: Path) -> None:
    root = pets(tmp_path / "oxford-iiit-pet")
    for path in (root, tmp_path, zipped(root, tmp_path.parent / f"{tmp_path.name}.zip")):
        images, notes = read(path)
        assert "Oxford-IIIT Pets" in notes[0]
        assert len(notes) == 2 and has_note(notes, "Ignored 1 image", "'images/beagle_9.jpg'")
        assert images.classes == ("Abyssinian", "american_bulldog", "beagle")
        assert rows(images) == {
            "images/Abyssinian_1.jpg": ("train", "Abyssinian"),
            "images/Abyssinian_10.jpg": ("test", "Abyssinian"),
            "images/american_bulldog_7.jpg": ("test", "american_bulldog"),
            "images/beagle_2.jpg": ("train", "beagle"),
            "images/beagle_3.jpg": ("test", "beagle"),
        }
        assert images.unreadable == []


def test_pets_with_wrong_or_missing_pieces(tmp_path: Path) -> None:
    root = pets(tmp_path)
    (root / "images/beagle_3.jpg").unlink()
    assert read(root)[0].unreadable == [("images/beagle_3.jpg", ANNOTATED_NOT_FOUND)]
    test = root / "annotations/test.txt"
    for text, facts in (
        ("beagle_3 5 2\n", "test.txt' has the line 'beagle_3 5 2'"),
        ("beagle_3 1 2 4\n", "class 1: 'Abyssinian' and 'beagle'"),
        ("beagle_3 6 2 4\n", "two numbers for the class 'beagle'"),
        ("beagle_2 5 2 4\n", "test.txt' lists 'beagle_2'.*already"),
    ):
        test.write_text(text)
        with pytest.raises(UserError, match=facts):
            read_source(root, [])
    test.unlink()
    with pytest.raises(UserError, match=r"Pets, but 'annotations/test\.txt' is missing.*test split"):
        read_source(root, [])


# Caltech-101


def test_caltech(tmp_path: Path) -> None:
    inner = tmp_path / "caltech-101/101_ObjectCategories"
    fill(inner, numbered({"Faces": 3, "Faces_easy": 3, "accordion": 3, "BACKGROUND_Google": 4}))
    fill(tmp_path, ["caltech-101/Annotations/Faces/annotation_0001.png"])
    archive = zipped(tmp_path / "caltech-101", tmp_path.parent / f"{tmp_path.name}.zip", "caltech-101/")
    for path in (inner, tmp_path / "caltech-101", tmp_path, archive):
        data = open_dataset(path, None)
        assert data.classes == ("Faces", "Faces_easy", "accordion")
        assert "Caltech-101" in data.notes[0]
        assert len(data.notes) == 2 and has_note(data.notes, "Skipped 4 images", "'BACKGROUND_Google'")
        assert names_of(data, "all") == {*numbered({"Faces": 3, "Faces_easy": 3, "accordion": 3})}
    renamed = (tmp_path / "caltech-101").rename(tmp_path / "mine") / "101_ObjectCategories"
    assert len(open_dataset(renamed.rename(tmp_path / "c101"), None).classes) == 3


# folders that are not a standard data set


@pytest.mark.parametrize(
    "names",
    [
        numbered({"images": 3, "annotations": 3}),
        numbered({"jpg": 3, "png": 3}),
        numbered({"train/a": 3, "train/b": 3, "val/a": 1, "val/b": 1}),
        numbered({"train/n01440764": 3, "train/n01443537": 3, "val/n01440764": 1, "val/n01443537": 1}),
        numbered({"n01440764": 3, "n01443537": 3}),
        numbered({"train": 3, "test": 3, "meta": 3}),
        numbered({"Faces": 3, "Faces_easy": 3}),
        numbered({"cifar-10-batches-bin": 3, "tiny-imagenet-200": 3}),
        numbered({"photos/a": 3, "photos/b": 3}),
    ],
)
def test_class_folders_stay_class_folders(tmp_path: Path, names: list[str]) -> None:
    root = fill(tmp_path / "x", names)
    for path in (root, zipped(root, tmp_path / "x.zip")):
        notes: list[str] = []
        assert read_standard(path, notes) is None
        assert notes == []


def test_side_files_of_other_tools_change_nothing(tmp_path: Path) -> None:
    fill(tmp_path, numbered({"images/a": 2, "images/b": 2, "annotations/a": 2, "train/a": 2}))
    plain = contents(open_dataset(tmp_path, None))
    for name, data in {
        "annotations/trainval.txt": b"box_1 1 1 1\nbox_2 1 1 1\n",  # as object detectors use it
        "annotations/test.txt": b"\xff\xfe\x00",
        "wnids.txt": b"n01440764\n",
        "words.txt": b"n01440764\ttench\n",
        "real.json": b"[[1]]",
        "meta": b"?",
        "setid.mat": b"?",
        "batches.meta": b"?",
    }.items():
        (tmp_path / name).write_bytes(data)
    assert contents(open_dataset(tmp_path, None)) == plain


def test_a_folder_of_several_data_sets(tmp_path: Path) -> None:
    pets(tmp_path / "oxford-iiit-pet")
    flowers(tmp_path / "flowers-102")
    with pytest.raises(UserError, match="several data sets, 'flowers-102', 'oxford-iiit-pet'"):
        read_source(tmp_path, [])
    assert Counter(read(tmp_path / "flowers-102")[0].splits) == {"train": 2, "val": 1, "test": 3}
