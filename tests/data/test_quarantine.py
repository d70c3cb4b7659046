"""The list of images to leave out: written, read, obeyed, and refused when it is not one."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from tests.data.folders import fill, image_bytes, names_of, numbered
from vitrail.data.dataset import open_dataset
from vitrail.data.quarantine import Quarantine, QuarantineRow, write_quarantine
from vitrail.errors import UserError

ODD_NAMES = [
    "a,b.png",
    'quo"te.png',
    "new\nline.png",
    "cr\r.png",
    "日本.png",
    os.fsdecode(b"\xff.png"),
    "=1+1.png",
    " x ",
]


def digest_of(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def test_any_name_comes_back(tmp_path: Path) -> None:
    rows = [QuarantineRow(name, f"{number:032x}", "why, and\nwhere") for number, name in enumerate(ODD_NAMES)]
    write_quarantine(tmp_path / "list.csv", rows)
    found = Quarantine.read(tmp_path / "list.csv")
    assert found.digests == {name: f"{number:032x}" for number, name in enumerate(ODD_NAMES)}


def test_a_spreadsheet_may_write_it_again(tmp_path: Path) -> None:
    text = "\ufeffName;Reason;Digest\r\na/1.png;a; " + "AB" * 16 + "\r\n\r\n"
    (tmp_path / "list.csv").write_text(text, encoding="utf-8", newline="")
    assert Quarantine.read(tmp_path / "list.csv").digests == {"a/1.png": "ab" * 16}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "needs the columns name and digest"),
        ("hello\nworld\n", "needs the columns name and digest"),
        ("name,digest\na.png\n", "in row 2"),
        ("name,digest\na.png," + "0" * 32 + "\nb.png,xyz\n", "in row 3"),
        ('name,digest\n"a', "not a proper CSV table"),
    ],
)
def test_what_is_no_list_is_refused_in_a_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "list.csv").write_text(text)
    with pytest.raises(UserError, match=sentence):
        Quarantine.read(tmp_path / "list.csv")


def test_a_list_that_cannot_be_read_is_told_before_the_scan(tmp_path: Path) -> None:
    data = fill(tmp_path / "data", numbered({"a": 3, "b": 3}))

    def scanned(done: int, total: int) -> None:
        raise AssertionError("the scan began")

    for path in (tmp_path / "nowhere.csv", tmp_path):
        with pytest.raises(UserError, match="cannot be read"):
            open_dataset(data, quarantine=path, progress=scanned)


def test_listed_images_are_left_out_and_replaced_ones_are_not(tmp_path: Path) -> None:
    data = fill(tmp_path / "data", numbered({"a": 6, "b": 6}))
    (data / "a/bad.png").write_bytes(b"bad")
    rows = [
        QuarantineRow("a/0.png", digest_of((data / "a/0.png").read_bytes()), "copy"),
        QuarantineRow("b/1.png", digest_of((data / "b/1.png").read_bytes()), "copy"),
        QuarantineRow("a/bad.png", digest_of(b"bad"), "broken"),
        QuarantineRow("b/2.png", "0" * 32, "could not be read"),
        QuarantineRow("b/3.png", "", "added by hand"),
        QuarantineRow("gone.png", "0" * 32, "no longer there"),
    ]
    write_quarantine(tmp_path / "list.csv", rows)
    before = open_dataset(data)
    listed = open_dataset(data, quarantine=tmp_path / "list.csv")
    left = {name for split in listed.splits for name in names_of(listed, split)}
    assert left == {name for split in before.splits for name in names_of(before, split)} - {
        "a/0.png",
        "b/1.png",
        "b/3.png",
    }
    assert any(note.startswith("Left out 3 images that ") for note in listed.notes)
    assert any(note.startswith("Used 1 image that ") and "'b/2.png'" in note for note in listed.notes)
    assert listed.excluded == before.excluded
    assert listed.fingerprint != before.fingerprint
    (data / "a/0.png").write_bytes(image_bytes(77))
    mended = open_dataset(data, quarantine=tmp_path / "list.csv")
    assert "a/0.png" in {name for split in mended.splits for name in names_of(mended, split)}
    assert any("'a/0.png'" in note and note.startswith("Used 2 images") for note in mended.notes)


def test_a_list_of_other_data_and_one_of_all_data(tmp_path: Path) -> None:
    data = fill(tmp_path / "data", numbered({"a": 3, "b": 3}))
    write_quarantine(tmp_path / "list.csv", [QuarantineRow("x.png", "0" * 32, "")])
    listed = open_dataset(data, quarantine=tmp_path / "list.csv")
    assert any("lists no image of this data" in note for note in listed.notes)
    assert listed.fingerprint == open_dataset(data).fingerprint
    write_quarantine(tmp_path / "list.csv", [])
    assert open_dataset(data, quarantine=tmp_path / "list.csv").notes == open_dataset(data).notes
    everything = [
        QuarantineRow(path.relative_to(data).as_posix(), digest_of(path.read_bytes()), "")
        for path in data.rglob("*.png")
    ]
    write_quarantine(tmp_path / "list.csv", everything)
    with pytest.raises(UserError, match="nothing is left"):
        open_dataset(data, quarantine=tmp_path / "list.csv")


def test_classes_are_made_of_what_is_left(tmp_path: Path) -> None:
    data = fill(tmp_path / "data", numbered({"a": 3, "b": 3, "c": 1}))
    write_quarantine(tmp_path / "list.csv", [QuarantineRow("c/0.png", digest_of((data / "c/0.png").read_bytes()), "")])
    assert open_dataset(data, quarantine=tmp_path / "list.csv").classes == ("a", "b")
