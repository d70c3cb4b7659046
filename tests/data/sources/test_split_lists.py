"""Data sets whose splits are lists of images."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data.folders import fill, zipped
from vitrail.data.sources.read import read_standard
from vitrail.errors import UserError


def textures(root: Path) -> Path:
    names = [f"{kind}/{kind}_{number:04d}.jpg" for kind in ("banded", "dotted") for number in range(1, 4)]
    fill(root, [f"images/{name}" for name in names])
    for index, split in enumerate(("train", "val", "test")):
        for fold in (1, 2):
            path = root / "labels" / f"{split}{fold}.txt"
            path.parent.mkdir(exist_ok=True)
            path.write_text("\n".join([names[(index + fold - 1) % 3], names[3 + (index + fold - 1) % 3]]) + "\n")
    return root


def test_textures_have_the_split_of_the_first_fold(tmp_path: Path) -> None:
    root = textures(tmp_path / "data" / "dtd")
    for path in (root, root.parent, zipped(root.parent, tmp_path / "dtd.zip")):
        notes: list[str] = []
        images = read_standard(path, notes)
        assert images is not None and "Describable Textures" in notes[0]
        assert images.classes == ("banded", "dotted")
        pairs = zip(images.entries, images.splits, strict=True)
        rows = {entry.name.rpartition("/")[2]: split for entry, split in pairs}
        assert rows["banded_0001.jpg"] == "train" and rows["dotted_0002.jpg"] == "val"
        assert rows["banded_0003.jpg"] == "test" and len(rows) == 6
    (root / "labels" / "val1.txt").unlink()
    with pytest.raises(UserError, match=r"Describable Textures.*'labels/val1.txt' is missing.*val split"):
        read_standard(root, [])


def vtab_1k(root: Path, lines: dict[str, str]) -> Path:
    fill(root, [f"images/{split}/{number:06d}.jpg" for split in ("train800", "val200", "test") for number in range(3)])
    for name, text in lines.items():
        (root / name).write_text(text)
    return root


LINES = {
    "train800.txt": "images/train800/000000.jpg 0\nimages/train800/000001.jpg 3\n",
    "val200.txt": "images/val200/000000.jpg 1\n",
    "test.txt": "images/test/000000.jpg 3\nimages/test/000001.jpg 2\n",
    "train800val200.txt": "images/train800/000000.jpg 0\nimages/val200/000000.jpg 1\n",
}


def test_a_task_of_vtab_with_its_lists(tmp_path: Path) -> None:
    notes: list[str] = []
    images = read_standard(vtab_1k(tmp_path / "kitti", LINES), notes)
    assert images is not None and "VTAB-1k" in notes[0]
    assert images.classes == ("class 0", "class 1", "class 2", "class 3")
    rows = {
        entry.name: (split, *label)
        for entry, split, label in zip(images.entries, images.splits, images.labels, strict=True)
    }
    assert rows["images/train800/000001.jpg"] == ("train", "class 3")
    assert rows["images/val200/000000.jpg"] == ("val", "class 1")
    assert rows["images/test/000001.jpg"] == ("test", "class 2")
    assert "Ignored 4 images" in notes[1]


@pytest.mark.parametrize(
    ("name", "text", "facts"),
    [
        ("val200.txt", None, "VTAB-1k.*'val200.txt' is missing"),
        ("test.txt", "images/test/000000.jpg three\n", "test.txt' has the line 'images/test/000000.jpg three'"),
        ("test.txt", "images/train800/000000.jpg 1\n", "test.txt' lists 'images/train800/000000.jpg'.*already"),
        ("test.txt", "others/000000.jpg 1\n", "several folders.*'images', 'others'"),
    ],
)
def test_wrong_lists_are_errors(tmp_path: Path, name: str, text: str | None, facts: str) -> None:
    root = vtab_1k(tmp_path / "task", LINES)
    (root / name).unlink() if text is None else (root / name).write_text(text)
    with pytest.raises(UserError, match=facts):
        read_standard(root, [])
