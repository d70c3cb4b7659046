"""The list of images to exclude: writing, reading, applying, and refusing other files."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from tests.data.folders import fill, has_note, image_bytes, names_of, numbered
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


def test_any_name_survives_writing_and_reading(tmp_path: Path) -> None:
    rows = [QuarantineRow(name, f"{number:032x}", "why, and\nwhere") for number, name in enumerate(ODD_NAMES)]
    write_quarantine(tmp_path / "list.csv", rows)
    quarantine = Quarantine.read(tmp_path / "list.csv")
    assert quarantine.digests == {name: f"{number:032x}" for number, name in enumerate(ODD_NAMES)}


def test_a_list_saved_by_a_spreadsheet_is_read(tmp_path: Path) -> None:
    text = "\ufeffName;Reason;Digest\r\na/1.png;a; " + "AB" * 16 + "\r\n\r\n"
    (tmp_path / "list.csv").write_text(text, encoding="utf-8", newline="")
    assert Quarantine.read(tmp_path / "list.csv").digests == {"a/1.png": "ab" * 16}


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("", "columns 'name' and 'digest'"),
        ("hello\nworld\n", "columns 'name' and 'digest'"),
        ("name,digest\na.png\n", "row 2"),
        ("name,digest\na.png," + "0" * 32 + "\nb.png,xyz\n", "row 3"),
        ('name,digest\n"a', "CSV"),
    ],
)
def test_a_file_that_is_no_quarantine_list_is_refused(tmp_path: Path, text: str, fact: str) -> None:
    (tmp_path / "list.csv").write_text(text)
    with pytest.raises(UserError, match=f"list.csv.*{fact}"):
        Quarantine.read(tmp_path / "list.csv")


def test_an_unreadable_list_is_reported_before_the_scan(tmp_path: Path) -> None:
    data = fill(tmp_path / "data", numbered({"a": 3, "b": 3}))

    def scanned(done: int, total: int) -> None:
        raise AssertionError("the scan began")

    for path in (tmp_path / "nowhere.csv", tmp_path):
        with pytest.raises(UserError, match=path.name):
            open_dataset(data, quarantine=path, progress=scanned)


def test_listed_images_are_excluded_and_replaced_ones_are_not(tmp_path: Path) -> None:
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
    kept = {name for split in listed.splits for name in names_of(listed, split)}
    assert kept == {name for split in before.splits for name in names_of(before, split)} - {
        "a/0.png",
        "b/1.png",
        "b/3.png",
    }
    assert has_note(listed.notes, "Skipped 3 images", "list.csv")
    assert has_note(listed.notes, "Used 1 image", "list.csv", "'b/2.png'")
    assert listed.excluded == before.excluded
    assert listed.fingerprint != before.fingerprint
    (data / "a/0.png").write_bytes(image_bytes(77))
    repaired = open_dataset(data, quarantine=tmp_path / "list.csv")
    assert "a/0.png" in {name for split in repaired.splits for name in names_of(repaired, split)}
    assert has_note(repaired.notes, "Used 2 images", "'a/0.png'")


def test_a_list_of_other_data_and_one_of_all_data(tmp_path: Path) -> None:
    data = fill(tmp_path / "data", numbered({"a": 3, "b": 3}))
    write_quarantine(tmp_path / "list.csv", [QuarantineRow("x.png", "0" * 32, "")])
    listed = open_dataset(data, quarantine=tmp_path / "list.csv")
    assert has_note(listed.notes, "list.csv", "no image of this data")
    assert listed.fingerprint == open_dataset(data).fingerprint
    write_quarantine(tmp_path / "list.csv", [])
    assert open_dataset(data, quarantine=tmp_path / "list.csv").notes == open_dataset(data).notes
    everything = [
        QuarantineRow(path.relative_to(data).as_posix(), digest_of(path.read_bytes()), "")
        for path in data.rglob("*.png")
    ]
    write_quarantine(tmp_path / "list.csv", everything)
    with pytest.raises(UserError, match=r"list\.csv' excludes every"):
        open_dataset(data, quarantine=tmp_path / "list.csv")


def test_classes_come_from_the_remaining_images(tmp_path: Path) -> None:
    data = fill(tmp_path / "data", numbered({"a": 3, "b": 3, "c": 1}))
    write_quarantine(tmp_path / "list.csv", [QuarantineRow("c/0.png", digest_of((data / "c/0.png").read_bytes()), "")])
    assert open_dataset(data, quarantine=tmp_path / "list.csv").classes == ("a", "b")
