"""Standard data sets in their original layouts, what is missing from them, and folders that only look like them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tests.data.folders import contents, fill, names_of, numbered, zipped
from vitrail.data.dataset import open_dataset
from vitrail.data.sources.image_list import ImageList
from vitrail.data.sources.oxford import flower_names
from vitrail.data.sources.read import read_source, read_standard
from vitrail.errors import UserError

scipy_io = pytest.importorskip("scipy.io")


def read(place: Path) -> tuple[ImageList, list[str]]:
    notes: list[str] = []
    found = read_standard(place, notes)
    assert found is not None
    return found, notes


def rows(found: ImageList) -> dict[str, tuple[str, str]]:
    """Name -> (split, class)."""
    each = zip(found.entries, found.splits, found.labels, strict=True)
    return {entry.name: (split, label) for entry, split, (label,) in each}


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
    for place in (root, tmp_path, zipped(tmp_path, tmp_path.parent / f"{tmp_path.name}.zip")):
        found, notes = read(place)
        assert notes[0] == "Read as Oxford Flowers-102 in its original layout."
        assert "Ignored 1 image that the annotations do not name: 'jpg/extra.jpg'." in notes
        assert found.classes == flower_names() and len(set(found.classes)) == 102
        assert found.splits == ["train", "train", "val", "test", "test", "test"]
        kinds = "pink primrose", "petunia", "trumpet creeper"
        assert [label for (label,) in found.labels] == [*kinds, *kinds]
        assert [entry.name for entry in found.entries] == [f"jpg/image_{n:05d}.jpg" for n in range(1, 7)]
        assert found.files.read("jpg/image_00001.jpg") == (root / "jpg/image_00001.jpg").read_bytes()
    data = open_dataset(root)
    assert {split: len(samples) for split, samples in data.splits.items()} == {"train": 2, "val": 1, "test": 3}
    assert data.splits["test"].labels.tolist() == [0, 50, 100]


def test_flowers_of_which_images_are_missing(tmp_path: Path) -> None:
    found, _ = read(flowers(tmp_path, images=4))
    assert len(found.entries) == 4
    reason = "the annotations name it, and there is no such file"
    assert found.unreadable == [("jpg/image_00005.jpg", reason), ("jpg/image_00006.jpg", reason)]


def test_flowers_without_a_side_file(tmp_path: Path) -> None:
    root = flowers(tmp_path)
    setid = (root / "setid.mat").read_bytes()
    (root / "setid.mat").unlink()
    with pytest.raises(UserError, match=r"Flowers-102 without 'setid.mat', which tells the split of each image$"):
        read_source(root, [])
    (root / "setid.mat").write_bytes(setid)
    (root / "imagelabels.mat").unlink()
    with pytest.raises(UserError, match=r"Flowers-102 without 'imagelabels.mat', which tells the class of each image$"):
        read_source(root, [])


@pytest.mark.parametrize(
    ("file", "values", "reason"),
    [
        ("setid.mat", {"trnid": [1]}, "setid.mat' has no numbers called 'valid'"),
        ("setid.mat", {"trnid": [1], "valid": [1], "tstid": [2]}, "names image 1 twice"),
        ("setid.mat", {"trnid": [1], "valid": [9], "tstid": [2]}, "names image 9, and there are 6 labels"),
        ("imagelabels.mat", {"labels": "text"}, "has no numbers called 'labels'"),
        ("imagelabels.mat", {"labels": [1, 2, 3, 4, 5, 103]}, "has labels outside 1 to 102"),
        ("imagelabels.mat", {"labels": [1.0, np.nan]}, "has no numbers called 'labels'"),
    ],
)
def test_flowers_with_wrong_side_files(tmp_path: Path, file: str, values: dict[str, object], reason: str) -> None:
    root = flowers(tmp_path)
    scipy_io.savemat(root / file, values)
    with pytest.raises(UserError, match=reason):
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
    for place in (root, tmp_path, zipped(root, tmp_path.parent / f"{tmp_path.name}.zip")):
        found, notes = read(place)
        assert notes[0] == "Read as Oxford-IIIT Pets in its original layout."
        assert notes[1:] == ["Ignored 1 image that the annotations do not name: 'images/beagle_9.jpg'."]
        assert found.classes == ("Abyssinian", "american_bulldog", "beagle")
        assert rows(found) == {
            "images/Abyssinian_1.jpg": ("train", "Abyssinian"),
            "images/Abyssinian_10.jpg": ("test", "Abyssinian"),
            "images/american_bulldog_7.jpg": ("test", "american_bulldog"),
            "images/beagle_2.jpg": ("train", "beagle"),
            "images/beagle_3.jpg": ("test", "beagle"),
        }
        assert found.unreadable == []


def test_pets_with_wrong_or_missing_pieces(tmp_path: Path) -> None:
    root = pets(tmp_path)
    (root / "images/beagle_3.jpg").unlink()
    reason = "the annotations name it, and there is no such file"
    assert read(root)[0].unreadable == [("images/beagle_3.jpg", reason)]
    test = root / "annotations/test.txt"
    for text, problem in (
        ("beagle_3 5 2\n", "has the line 'beagle_3 5 2', and not an image with three numbers"),
        ("beagle_3 1 2 4\n", "calls class 1 'Abyssinian' and 'beagle'"),
        ("beagle_3 6 2 4\n", "gives the class 'beagle' two numbers"),
        ("beagle_2 5 2 4\n", "lists 'beagle_2', which was listed before"),
    ):
        test.write_text(text)
        with pytest.raises(UserError, match=problem):
            read_source(root, [])
    test.unlink()
    with pytest.raises(UserError, match=r"Pets without 'annotations/test.txt', which lists the images to test on$"):
        read_source(root, [])


# Caltech-101


def test_caltech(tmp_path: Path) -> None:
    inner = tmp_path / "caltech-101/101_ObjectCategories"
    fill(inner, numbered({"Faces": 3, "Faces_easy": 3, "accordion": 3, "BACKGROUND_Google": 4}))
    fill(tmp_path, ["caltech-101/Annotations/Faces/annotation_0001.png"])
    archive = zipped(tmp_path / "caltech-101", tmp_path.parent / f"{tmp_path.name}.zip", "caltech-101/")
    for place in (inner, tmp_path / "caltech-101", tmp_path, archive):
        data = open_dataset(place, None)
        assert data.classes == ("Faces", "Faces_easy", "accordion")
        assert data.notes == [
            "Read as Caltech-101 in its original layout.",
            "Left out 4 images of 'BACKGROUND_Google', which is no class.",
        ]
        assert names_of(data, "all") == {*numbered({"Faces": 3, "Faces_easy": 3, "accordion": 3})}
    renamed = (tmp_path / "caltech-101").rename(tmp_path / "mine") / "101_ObjectCategories"
    assert len(open_dataset(renamed.rename(tmp_path / "c101"), None).classes) == 3


# what is no standard data set


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
    for place in (root, zipped(root, tmp_path / "x.zip")):
        notes: list[str] = []
        assert read_standard(place, notes) is None
        assert notes == []


def test_side_files_of_other_origin_change_nothing(tmp_path: Path) -> None:
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
    with pytest.raises(UserError, match="holds several data sets, 'flowers-102', 'oxford-iiit-pet'; give the folder"):
        read_source(tmp_path, [])
    assert Counter(read(tmp_path / "flowers-102")[0].splits) == {"train": 2, "val": 1, "test": 3}
