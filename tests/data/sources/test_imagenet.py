"""ImageNet, its ReaL labels and Tiny-ImageNet in their published layouts."""

from __future__ import annotations

import json
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from tests.data.folders import fill, has_note, image_bytes, zipped
from vitrail.data.dataset import open_dataset
from vitrail.data.files import ANNOTATED_NOT_FOUND, Entry, Listing
from vitrail.data.sources.data_source import DataSource
from vitrail.data.sources.imagenet import read_imagenet
from vitrail.data.sources.read import read_source, read_standard
from vitrail.data.sources.root import Root
from vitrail.errors import UserError

scipy_io = pytest.importorskip("scipy.io")

GOLDFISH, SALAMANDER, SCHOOLBUS = "n01443537", "n01629819", "n04146614"
NAMES = ("n01443537 goldfish", "n01629819 European fire salamander", "n04146614 school bus")
WORDS = {GOLDFISH: "goldfish, Carassius auratus", SALAMANDER: "European fire salamander, x", SCHOOLBUS: "school bus"}
WNIDS = [f"n{number:08d}" for number in range(1000)]


def read(path: Path) -> tuple[DataSource, list[str]]:
    notes: list[str] = []
    images = read_standard(path, notes)
    assert images is not None
    assert [entry.name for entry in images.entries] == sorted(entry.name for entry in images.entries)
    return images, notes


def rows(images: DataSource) -> dict[tuple[str, str], tuple[str, ...]]:
    """(name, split) -> classes."""
    columns = zip(images.entries, images.splits, images.labels, strict=True)
    return {(entry.name, split): labels for entry, split, labels in columns}


# Tiny-ImageNet


def tiny(root: Path) -> Path:
    wnids = SCHOOLBUS, GOLDFISH, SALAMANDER  # the file is not sorted
    fill(root, [f"train/{wnid}/images/{wnid}_{number}.JPEG" for wnid in wnids for number in range(2)])
    fill(root, [f"val/images/val_{number}.JPEG" for number in range(3)])
    fill(root, [f"test/images/test_{number}.JPEG" for number in range(5)])
    for wnid in wnids:
        (root / f"train/{wnid}/{wnid}_boxes.txt").write_text(f"{wnid}_0.JPEG\t0\t10\t63\t58\n")
    (root / "wnids.txt").write_text("\n".join(wnids))
    words = {"n00001740": "entity", **WORDS}
    (root / "words.txt").write_text("".join(f"{wnid}\t{text}\n" for wnid, text in words.items()))
    lines = [f"val_{number}.JPEG\t{wnid}\t0\t32\t44\t62\n" for number, wnid in enumerate(wnids)]
    (root / "val/val_annotations.txt").write_text("".join(lines))
    return root


def test_tiny_imagenet_in_a_folder_and_in_its_archive(tmp_path: Path) -> None:
    root = tiny(tmp_path / "tiny-imagenet-200")
    archive = zipped(root, tmp_path.parent / f"{tmp_path.name}.zip", "tiny-imagenet-200/")
    fingerprints = set()
    for path in (root, tmp_path, archive):
        images, notes = read(path)
        assert "Tiny-ImageNet" in notes[0]
        assert len(notes) == 2 and has_note(notes, "Ignored 5 images of 'test' without a label")
        assert images.classes == NAMES
        assert Counter(images.splits) == {"train": 6, "val": 3}
        labels = rows(images)
        assert labels["val/images/val_0.JPEG", "val"] == (NAMES[2],)
        assert labels[f"train/{SALAMANDER}/images/{SALAMANDER}_1.JPEG", "train"] == (NAMES[1],)
        fingerprints.add(open_dataset(path).fingerprint)
    assert len(fingerprints) == 1


def test_tiny_imagenet_with_missing_files(tmp_path: Path) -> None:
    root = tiny(tmp_path)
    (root / "val/images/val_1.JPEG").unlink()
    (root / "words.txt").unlink()
    fill(root, ["val/images/odd.JPEG", "stray.png"])
    images, notes = read(root)
    assert images.classes == (GOLDFISH, SALAMANDER, SCHOOLBUS)
    assert images.unreadable == [("val/images/val_1.JPEG", ANNOTATED_NOT_FOUND)]
    assert has_note(notes, "WordNet ids", "'words.txt' is missing")
    assert has_note(notes, "Ignored 1 image of 'val'", "not in 'val/val_annotations.txt'")
    assert has_note(notes, "Ignored 1 image", "'stray.png'")
    (root / "val/val_annotations.txt").unlink()
    images, notes = read(root)
    assert set(images.splits) == {"train"}
    assert has_note(notes, "of 'val'", "'val/val_annotations.txt' is missing")


def test_tiny_imagenet_whose_val_was_sorted_into_folders(tmp_path: Path) -> None:
    root = tiny(tmp_path)
    for number, wnid in enumerate((SCHOOLBUS, GOLDFISH, SALAMANDER)):
        (root / f"val/{wnid}/images").mkdir(parents=True)
        (root / f"val/images/val_{number}.JPEG").rename(root / f"val/{wnid}/images/val_{number}.JPEG")
    images, notes = read(root)
    assert Counter(images.splits) == {"train": 6, "val": 3} and images.unreadable == []
    assert rows(images)[f"val/{GOLDFISH}/images/val_1.JPEG", "val"] == (NAMES[0],)
    assert len(notes) == 2


# ImageNet


def imagenet(root: Path, wnids: list[str] | None = None) -> Path:
    for wnid in wnids or sorted(WORDS):
        fill(root, {f"train/{wnid}/{wnid}_1.JPEG": image_bytes(int(wnid[1:]) % 60_000)})
    fill(root, {f"val/ILSVRC2012_val_{number:08d}.JPEG": image_bytes(61_000 + number) for number in (1, 2, 3)})
    return root


def devkit(folder: Path, truth: list[int]) -> None:
    """Numbers in the kit follow no order of the ids; groups of classes have numbers past 1,000."""
    folder.mkdir(parents=True)
    kit = [(1, SCHOOLBUS), (2, GOLDFISH), (3, SALAMANDER), (1001, "n00001740")]
    synsets = [(number, wnid, WORDS.get(wnid, "entity"), 0) for number, wnid in kit]
    names = "ILSVRC2012_ID", "WNID", "words", "num_children"
    table = np.array([[row] for row in synsets], [(name, object) for name in names])
    scipy_io.savemat(folder / "meta.mat", {"synsets": table}, do_compression=True)
    (folder / "ILSVRC2012_validation_ground_truth.txt").write_text("".join(f"{number}\n" for number in truth))


@pytest.mark.parametrize("folder", ["ILSVRC2012_devkit_t12/data", "devkit/data", ""])
def test_a_flat_val_is_labelled_by_the_development_kit(tmp_path: Path, folder: str) -> None:
    root = imagenet(tmp_path / "imagenet")
    kit = tmp_path / "kit"
    devkit(kit, [1, 3, 1, 2])
    (root / folder).mkdir(parents=True, exist_ok=True)
    for file in kit.iterdir():
        file.rename(root / folder / file.name)
    images, notes = read(root)
    assert len(notes) == 1 and "ImageNet (ILSVRC2012)" in notes[0]
    assert images.classes == NAMES
    labels = rows(images)
    assert [labels[f"val/ILSVRC2012_val_{n:08d}.JPEG", "val"] for n in (1, 2, 3)] == [(NAMES[i],) for i in (2, 1, 2)]
    assert images.unreadable == [("val/ILSVRC2012_val_00000004.JPEG", ANNOTATED_NOT_FOUND)]


def test_the_layout_of_kaggle(tmp_path: Path) -> None:
    imagenet(tmp_path / "ILSVRC/Data/CLS-LOC")
    fill(tmp_path, ["ILSVRC/Data/CLS-LOC/test/ILSVRC2012_test_00000001.JPEG"])
    (tmp_path / "ILSVRC/Annotations/CLS-LOC/val").mkdir(parents=True)
    lines = [f"ILSVRC2012_val_{n:08d},{wnid} 85 1 499 272 {wnid} 1 2 3 4\n" for n, wnid in enumerate(sorted(WORDS), 1)]
    (tmp_path / "LOC_val_solution.csv").write_text("ImageId,PredictionString\n" + "".join(lines))
    mapping = "".join(f"{wnid} {text}\n" for wnid, text in WORDS.items())
    (tmp_path / "LOC_synset_mapping.txt").write_text(mapping)
    archive = zipped(tmp_path, tmp_path.parent / f"{tmp_path.name}.zip")
    for path in (tmp_path, archive):
        images, notes = read(path)
        assert len(notes) == 2 and has_note(notes, "Ignored 1 image of 'test' without a label")
        assert images.classes == NAMES and Counter(images.splits) == {"train": 3, "val": 3}
        assert rows(images)["val/ILSVRC2012_val_00000003.JPEG", "val"] == (NAMES[2],)
        assert len(images.files.read("val/ILSVRC2012_val_00000003.JPEG")) == images.entries[-1].size
    (tmp_path / "LOC_val_solution.csv").unlink()
    _, notes = read(tmp_path / "ILSVRC")  # its side files are outside this folder
    assert has_note(notes[1:2], "'words.txt' is missing")


def test_a_flat_val_without_labels_is_ignored_and_the_note_names_the_missing_files(tmp_path: Path) -> None:
    root = imagenet(tmp_path)
    notes = read(root)[1]
    files = "'ILSVRC2012_validation_ground_truth.txt'", "'meta.mat'", "'LOC_val_solution.csv'"
    assert has_note(notes, "Ignored 3 images of 'val'", *files)
    (root / "ILSVRC2012_validation_ground_truth.txt").write_text("1\n")
    notes = read(root)[1]
    assert has_note(notes, "'meta.mat'") and not has_note(notes, "ground_truth.txt")


def test_wrong_development_kits(tmp_path: Path) -> None:
    root = imagenet(tmp_path)
    devkit(root / "devkit/data", [1, 4])
    with pytest.raises(UserError, match=r"label '4' in line 2.*'devkit/data/meta\.mat'"):
        read_source(root, [])
    for synsets, fact in (([1.0, 2.0], "synset without a number or an id"), ([], "no synsets")):
        scipy_io.savemat(root / "devkit/data/meta.mat", {"synsets": np.array(synsets)})
        with pytest.raises(UserError, match=f"meta.mat' .*{fact}"):
            read_source(root, [])


def test_a_val_in_class_folders_gets_the_names_of_a_mapping(tmp_path: Path) -> None:
    fill(tmp_path, [f"{split}/{wnid}/{wnid}_{split}.JPEG" for split in ("train", "val") for wnid in WORDS])
    (tmp_path / "synset_words.txt").write_text("".join(f"{wnid} {text}\n" for wnid, text in WORDS.items()))
    images, _ = read(tmp_path)
    assert images.classes == NAMES and Counter(images.splits) == {"train": 3, "val": 3}


def test_a_val_alone_can_be_evaluated(tmp_path: Path) -> None:
    fill(tmp_path, [f"val/ILSVRC2012_val_{number:08d}.JPEG" for number in (1, 2, 3)])
    devkit(tmp_path / "devkit/data", [1, 2, 3])
    data = open_dataset(tmp_path, None)
    assert data.classes == NAMES and data.splits["val"].labels.tolist() == [2, 0, 1]


# ReaL


class Listed:
    """Stands in for an archive of fifty thousand files."""

    def __init__(self, names: list[str], sides: dict[str, bytes]) -> None:
        self.names, self.sides = names, sides

    def list(self) -> Listing:
        folders = {"/".join(name.split("/")[:depth]) for name in self.names for depth in range(1, name.count("/") + 1)}
        return Listing(images=sorted(Entry(name, 1, 1) for name in self.names), folders=sorted(folders))

    def read(self, name: str) -> bytes:
        if name not in self.sides:
            raise OSError("no such file")
        return self.sides[name]


@pytest.mark.slow
def test_the_published_real_labels() -> None:
    timm = find_spec("timm")
    assert timm is not None and timm.origin is not None
    info = Path(timm.origin).parent / "data" / "_info"
    real = (info / "imagenet_real_labels.json").read_bytes()
    wnids = (info / "imagenet_synsets.txt").read_text().split()
    names = [f"train/{wnid}/1.JPEG" for wnid in wnids]
    names += [f"val/ILSVRC2012_val_{number:08d}.JPEG" for number in range(1, 50_001)]
    notes: list[str] = []
    images = read_imagenet(Root(Listed(names, {"real.json": real}), "x"), notes)  # type: ignore[arg-type]
    assert images is not None and images.classes == tuple(wnids)
    assert Counter(images.splits) == {"train": 1000, "real": 46_837}
    sets = {entry.name: labels for entry, labels in zip(images.entries, images.labels, strict=True)}
    for number, expected in enumerate(json.loads(real), 1):
        assert sets.get(f"val/ILSVRC2012_val_{number:08d}.JPEG", ()) == tuple(wnids[label] for label in expected)
    assert has_note(notes, "'real'", "46,837", "3,163")


@pytest.mark.slow
def test_the_split_real_of_a_data_set(tmp_path: Path) -> None:
    root = imagenet(tmp_path / "x", WNIDS)
    solution = "".join(f"ILSVRC2012_val_{number:08d},{WNIDS[number]} 1 2 3 4\n" for number in (1, 2, 3))
    (root / "LOC_val_solution.csv").write_text(solution)
    (root / "real.json").write_text("[[1, 7], [], [999, 3, 999]]")
    data = open_dataset(root)
    assert {split: len(samples) for split, samples in data.splits.items()} == {"train": 1000, "val": 3, "real": 2}
    real, val = data.splits["real"], data.splits["val"]
    assert val.sets is None and val.labels.tolist() == [1, 2, 3]
    assert real.sets is not None and [real.sets[row].tolist() for row in range(2)] == [[1, 7], [999, 3]]
    assert [real.name(row) for row in range(2)] == [val.name(0), val.name(2)]
    assert real.read(1) == val.read(2)
    assert np.flatnonzero(real.labels_of(np.array([1]))[0]).tolist() == [3, 999]


def test_real_labels_of_a_val_alone() -> None:
    sides = {"real.json": b"[[1, 7]]", "LOC_synset_mapping.txt": "\n".join(f"{w} x, y" for w in WNIDS).encode()}
    images = read_imagenet(Root(Listed(["val/ILSVRC2012_val_00000001.JPEG"], sides), "x"), [])  # type: ignore[arg-type]
    assert images is not None and images.splits == ["real"]
    assert images.labels == [("n00000001 x", "n00000007 x")]
    del sides["real.json"]
    with pytest.raises(UserError, match=r"'x' has no image with a label: .*ground_truth\.txt"):
        read_imagenet(Root(Listed(["val/ILSVRC2012_val_00000001.JPEG"], sides), "x"), [])  # type: ignore[arg-type]


def test_real_labels_that_do_not_fit(tmp_path: Path) -> None:
    root = imagenet(tmp_path / "few")
    (root / "real.json").write_text("[[1]]")
    images, notes = read(root)
    assert "real" not in images.splits
    assert has_note(notes, "Ignored 'real.json'", "1,000 classes", "has 3.")
    names = [*(f"train/{wnid}/1.JPEG" for wnid in WNIDS), "val/ILSVRC2012_val_00000001.JPEG"]
    for data in (b"{}", b"[1]", b"[[1000]]", b"[[true]]", b"[[-1]]", b"[[0.5]]", b"[" * 9999, b"\xff"):
        with pytest.raises(UserError, match=r"'x/real\.json' is not .*0 to 999"):
            read_imagenet(Root(Listed(names, {"real.json": data}), "x"), [])  # type: ignore[arg-type]
