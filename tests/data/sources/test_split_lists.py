"""Data sets whose lists say which image is where."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data.folders import fill, zipped
from vitrail.data.sources.read import read_standard
from vitrail.errors import UserError


def textures(root: Path) -> Path:
    names = [f"{kind}/{kind}_{number:04d}.jpg" for kind in ("banded", "dotted") for number in range(1, 4)]
    fill(root, [f"images/{name}" for name in names])
    for place, split in enumerate(("train", "val", "test")):
        for fold in (1, 2):
            path = root / "labels" / f"{split}{fold}.txt"
            path.parent.mkdir(exist_ok=True)
            path.write_text("\n".join([names[(place + fold - 1) % 3], names[3 + (place + fold - 1) % 3]]) + "\n")
    return root


def test_textures_have_the_split_of_the_first_fold(tmp_path: Path) -> None:
    root = textures(tmp_path / "data" / "dtd")
    for place in (root, root.parent, zipped(root.parent, tmp_path / "dtd.zip")):
        notes: list[str] = []
        found = read_standard(place, notes)
        assert found is not None and "Describable Textures" in notes[0]
        assert found.classes == ("banded", "dotted")
        rows = {entry.name.rpartition("/")[2]: split for entry, split in zip(found.entries, found.splits, strict=True)}
        assert rows["banded_0001.jpg"] == "train" and rows["dotted_0002.jpg"] == "val"
        assert rows["banded_0003.jpg"] == "test" and len(rows) == 6
    (root / "labels" / "val1.txt").unlink()
    with pytest.raises(UserError, match=r"without 'labels/val1.txt', its val split"):
        read_standard(root, [])


def thousand(root: Path, lines: dict[str, str]) -> Path:
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
    found = read_standard(thousand(tmp_path / "kitti", LINES), notes)
    assert found is not None and notes[0] == "Read as a task of VTAB-1k with its published lists."
    assert found.classes == ("class 0", "class 1", "class 2", "class 3")
    rows = {
        entry.name: (split, *label)
        for entry, split, label in zip(found.entries, found.splits, found.labels, strict=True)
    }
    assert rows["images/train800/000001.jpg"] == ("train", "class 3")
    assert rows["images/val200/000000.jpg"] == ("val", "class 1")
    assert rows["images/test/000001.jpg"] == ("test", "class 2")
    assert "Ignored 4 images that the annotations do not name" in notes[1]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("val200.txt", None, "without 'val200.txt'"),
        ("test.txt", "images/test/000000.jpg three\n", "not an image with its class"),
        ("test.txt", "images/train800/000000.jpg 1\n", "which was listed before"),
        ("test.txt", "others/000000.jpg 1\n", "several folders"),
    ],
)
def test_lists_that_cannot_be_right(tmp_path: Path, name: str, text: str | None, words: str) -> None:
    root = thousand(tmp_path / "task", LINES)
    (root / name).unlink() if text is None else (root / name).write_text(text)
    with pytest.raises(UserError, match=words):
        read_standard(root, [])
