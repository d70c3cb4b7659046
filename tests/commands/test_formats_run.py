"""Unusual files, missing files and links, in the commands that read data."""

from __future__ import annotations

import csv
import io
import json
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.data.folders import fill, image_bytes, numbered
from tests.data.test_formats import CR2, NOISE, UNSUPPORTED, cases_of
from tests.small import SMALL
from vitrail.commands.check import check

Typed = Callable[..., tuple[int, str, str]]
FEW = [part for setting in (*SMALL, "train.steps=2", "train.batch_size=4") for part in ("--set", setting)]


@pytest.fixture
def inbox(tmp_path: Path) -> Path:
    root = fill(tmp_path / "inbox", ["1.png", "2.ppm", "no ending", "x.dat"])
    fill(root, {"raw.cr2": CR2, "sub/drawing.svg": b"<svg/>", "cut.avif": b"\0\0\0\x20ftypavif" + bytes(80)})
    fill(root, {"notes.txt": b"words", "a.mp4": NOISE, "b.mp4": NOISE, ".hidden.png": image_bytes(9)})
    (root / "gone.jpg").symlink_to("nowhere.jpg")
    return root


@pytest.mark.parametrize("form", ["--csv", "--json"])
def test_predict_has_a_row_for_every_image(form: str, inbox: Path, stand_in: Path, typed: Typed) -> None:
    code, output, errors = typed("predict", stand_in, inbox, form)
    rows = list(csv.DictReader(io.StringIO(output))) if form == "--csv" else list(map(json.loads, output.splitlines()))
    found = {str(Path(row["file"]).relative_to(inbox)): row for row in rows}
    assert sorted(name for name, row in found.items() if row.get("label")) == ["1.png", "2.ppm", "no ending", "x.dat"]
    bad = {name: row["error"] for name, row in found.items() if row.get("error")}
    assert sorted(bad) == ["cut.avif", "gone.jpg", "raw.cr2", "sub/drawing.svg"]
    assert bad["raw.cr2"].startswith("unsupported format: ") and "camera RAW" in bad["raw.cr2"]
    assert bad["gone.jpg"].startswith("the file cannot be found")
    assert code == 2
    lines = errors.splitlines()
    assert "Ignored 3 non-image files: .mp4 2, .txt 1." in lines
    assert {"1 missing: .jpg 1", "1 unreadable: .avif 1", "2 in unsupported formats: .cr2 1, .svg 1"} <= set(lines)


def test_predict_reports_missing_files_of_a_table(tmp_path: Path, stand_in: Path, typed: Typed) -> None:
    fill(tmp_path, {"1.png": image_bytes(1), "cut.png": image_bytes(2)[:40]})
    (tmp_path / "list.csv").write_text("path\n1.png\ncut.png\ngone.png\n")
    code, output, errors = typed("predict", stand_in, tmp_path / "list.csv", "--csv")
    error = {row["file"]: row["error"] for row in csv.DictReader(io.StringIO(output))}
    assert error["1.png"] == "" and error["gone.png"].startswith("the file cannot be found")
    assert not error["cut.png"].startswith("the file cannot be found") and error["cut.png"]
    assert code == 2 and "1 missing: .png 1" in errors and "1 unreadable: .png 1" in errors


def test_predict_without_images_reports_what_was_found(tmp_path: Path, stand_in: Path, typed: Typed) -> None:
    fill(tmp_path, {"a.mp4": NOISE, "b.txt": b"words"})
    code, output, errors = typed("predict", stand_in, tmp_path)
    assert code == 2 and not output and ".mp4 1, .txt 1" in errors and "JPEG 2000" in errors


def test_no_follow_excludes_links_in_every_command(tmp_path: Path, stand_in: Path, typed: Typed) -> None:
    store = fill(tmp_path / "store", ["8.png", "9.png"])
    root = fill(tmp_path / "data", numbered({"a": 6, "b": 6}))
    (root / "a/link.png").symlink_to(store / "8.png")
    (root / "b/more").symlink_to(store)
    for more, links in (([], 3), (["--no-follow"], 0)):
        code, output, errors = typed("predict", stand_in, root, "--csv", *more)
        assert code == 0 and len(output.splitlines()) == 1 + 12 + links
        assert ("Skipped 2 links" if more else "Followed 2 links") in errors
        out = tmp_path / f"check{links}"
        _, output, errors = typed("check", root, "--out", out, *more)
        assert json.loads((out / "report.json").read_text())["images"] == 12 + links
        assert ("Skipped 2 links" if more else "Followed 2 links") in output
        code, output, errors = typed("pack", root, tmp_path / f"packed{links}", *more)
        assert code == 0, errors
        assert json.loads((tmp_path / f"packed{links}/manifest.json").read_text())["shards"][0]["images"] == 12 + links


@pytest.mark.slow
def test_train_reports_excluded_files(tmp_path: Path, typed: Typed) -> None:
    root = fill(tmp_path / "data", {name: image_bytes(7 * i) for i, name in enumerate(numbered({"a": 8, "b": 8}))})
    fill(root, {"a/raw.CR2": CR2, "b/cut.png": image_bytes(3)[:40]})
    (root / "b/link.png").symlink_to(root / "a/0.png")
    run = tmp_path / "run"
    code, output, errors = typed("train", root, "--recipe", "scratch", "--out", run, "--no-follow", *FEW)
    assert code == 0, errors
    rows = list(csv.DictReader(io.StringIO((run / "excluded.csv").read_text())))
    assert [row["name"] for row in rows] == ["a/raw.CR2", "b/cut.png"] and all(row["reason"] for row in rows)
    assert ".cr2 1, .png 1" in output and "Skipped 1 link" in output
    assert tomllib.loads((run / "config.toml").read_text())["data"]["follow_links"] is False
    code, output, errors = typed("evaluate", run, root, "--no-follow", "--json")
    assert code == 0 and json.loads(output)["n"] > 0, errors


def test_check_reports_them_on_its_page(tmp_path: Path) -> None:
    root = fill(tmp_path / "data", numbered({"a": 6, "b": 6}))
    fill(root, {name: CR2 if name.endswith("CR2") else b"<svg/>" for name in UNSUPPORTED if "." in name})
    (root / "a/gone.png").symlink_to("nowhere.png")
    found = check(root, out=tmp_path / "out")
    page = (tmp_path / "out/report.html").read_text()
    cases = cases_of(found)
    assert cases["missing"] == ["a/gone.png"] and cases["format"] == ["a/raw.CR2", "b/drawing.svg", "b/raw.nef"]
    for name in (*cases["missing"], *cases["format"]):
        assert name.rpartition("/")[2] in page
