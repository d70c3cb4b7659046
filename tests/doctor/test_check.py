"""check_dataset finds the planted problems and nothing else, and its quarantine removes leaks."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from bench.check import compare
from bench.planted import encode, generated, plant
from tests.data.folders import fill, numbered
from vitrail.data.dataset import open_dataset
from vitrail.data.quarantine import QuarantineRow, write_quarantine
from vitrail.doctor import duplicates
from vitrail.doctor.check import check_dataset
from vitrail.doctor.findings import SEVERITY, Finding, Findings
from vitrail.errors import UserError

pytestmark = pytest.mark.slow

PHOTOS = list(generated(40, (60, 80)))
DATA = [encode(photo, "PNG") for photo in PHOTOS]


def by_kind(found: Findings) -> dict[str, Finding]:
    return {finding.kind: finding for finding in found.findings}


def names(finding: Finding) -> list[set[str]]:
    return [set(case.names) for case in finding.cases]


def quarantined(found: Findings) -> dict[str, str]:
    return {row.name: row.reason for row in found.quarantine}


@pytest.fixture
def clean(tmp_path: Path) -> Path:
    """Two classes in two splits, with nothing wrong."""
    files = [f"{split}/{label}/{i}.png" for split in ("train", "test") for label in "ab" for i in range(6)]
    return fill(tmp_path / "data", dict(zip(files, DATA, strict=False)))


def test_clean_data_has_no_findings(clean: Path) -> None:
    found = check_dataset(clean)
    assert found.findings == []
    assert found.quarantine == []
    assert not found.severe
    assert found.balance == {"a": {"train": 6, "test": 6}, "b": {"train": 6, "test": 6}}


def test_planted_faults(tmp_path: Path) -> None:
    planted = plant(tmp_path, generated(400, (90, 120)), 400)
    found = check_dataset(tmp_path)
    for kind, counts in compare(planted, found).items():
        assert counts["found"] == counts["planted"], kind
        assert counts["others"] == 0, kind
    assert set(by_kind(found)) - {"few-images", "grey", "shape"} == set(planted.cases)
    assert [finding.kind for finding in found.findings] == [kind for kind in SEVERITY if kind in by_kind(found)]
    write_quarantine(tmp_path / "list.csv", found.quarantine)
    data = open_dataset(tmp_path, None, quarantine=tmp_path / "list.csv")
    trained = {data.splits["train"].name(i) for i in range(len(data.splits["train"]))}
    for kind in ("leak", "near-leak", "conflict", "corrupt"):
        for case in planted.cases[kind]:
            assert not any(name in trained for name in case if name.startswith("train/")), kind
    for case in planted.cases["duplicate"]:
        assert len(case & trained) == 1
    for case in planted.cases["near-duplicate"]:
        assert case <= trained
    assert not any(note.startswith("Exact copies") for note in data.notes)


def test_the_split_of_higher_priority_keeps_a_leaked_image(tmp_path: Path) -> None:
    files = [f"{split}/{label}/unique.png" for split in ("train", "val", "test") for label in "ab"]
    contents = dict(zip(files, DATA, strict=False))
    contents |= {f"{split}/a/same.png": DATA[20] for split in ("train", "val", "test")}
    contents |= {f"{split}/b/same.png": DATA[21] for split in ("train", "val")}
    found = check_dataset(fill(tmp_path, contents))
    assert names(by_kind(found)["leak"]) == [
        {"train/a/same.png", "val/a/same.png", "test/a/same.png"},
        {"train/b/same.png", "val/b/same.png"},
    ]
    assert quarantined(found).keys() == {"train/a/same.png", "val/a/same.png", "train/b/same.png"}
    assert quarantined(found)["train/b/same.png"] == "same bytes as 'val/b/same.png' in val"


def test_all_copies_with_conflicting_labels_are_quarantined(clean: Path) -> None:
    fill(clean, {"train/a/x.png": DATA[30], "train/b/x.png": DATA[30], "test/b/y.png": DATA[30]})
    found = check_dataset(clean)
    kinds = by_kind(found)
    assert names(kinds["conflict"]) == [{"train/a/x.png", "train/b/x.png", "test/b/y.png"}]
    assert len(kinds["leak"].cases) == 1
    assert "duplicate" not in kinds
    assert quarantined(found).keys() == {"train/a/x.png", "train/b/x.png", "test/b/y.png"}
    assert quarantined(found)["train/a/x.png"].endswith("labelled b")


def test_near_duplicates_with_different_labels_are_reported_not_quarantined(clean: Path) -> None:
    fill(clean, {"train/b/again.jpg": encode(PHOTOS[0], quality=80)})
    found = check_dataset(clean)
    assert names(by_kind(found)["near-conflict"]) == [{"train/a/0.png", "train/b/again.jpg"}]
    assert found.quarantine == []
    assert not found.severe


def test_same_pixels_in_other_bytes_are_a_near_duplicate(clean: Path) -> None:
    fill(clean, {"test/a/other.png": encode(PHOTOS[0], "PNG", compress_level=1)})
    found = check_dataset(clean)
    assert "leak" not in by_kind(found)
    assert names(by_kind(found)["near-leak"]) == [{"train/a/0.png", "test/a/other.png"}]
    assert quarantined(found).keys() == {"train/a/0.png"}
    assert found.severe


def test_stricter_limits_where_all_images_look_alike(clean: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shifted = PHOTOS[1].crop((3, 2, 80, 60))
    fill(clean, {"test/a/same.jpg": encode(PHOTOS[0], quality=95), "test/a/shifted.jpg": encode(shifted, quality=80)})
    assert len(by_kind(check_dataset(clean))["near-leak"].cases) == 2
    monkeypatch.setattr(duplicates, "MAX_PAIRS_PER_IMAGE", 0)
    assert names(by_kind(check_dataset(clean))["near-leak"]) == [{"train/a/0.png", "test/a/same.jpg"}]


def screens(count: int, size: tuple[int, int] = (120, 160)) -> list[bytes]:
    """One layout, a bar and three panels, with a few lines of other text in each."""
    layout = np.full((*size, 3), 235, np.uint8)
    layout[:18], layout[18:, :40] = (40, 60, 120), (90, 95, 100)
    layout[26:70, 50:150], layout[78:112, 50:150] = 255, (200, 220, 200)
    found = []
    for seed in range(count):
        random, pixels = np.random.default_rng(seed), layout.copy()
        for top in (34, 46, 58, 90):
            pixels[top : top + 3, 60 : 60 + random.integers(6, 26)] = random.integers(60, 160)
        found.append(encode(Image.fromarray(pixels), "PNG"))
    return found


@pytest.fixture
def crowd(tmp_path: Path) -> Path:
    files = [f"{split}/{'ab'[i % 2]}/{i}.png" for split, n in (("train", 40), ("test", 20)) for i in range(n)]
    return fill(tmp_path / "screens", dict(zip(files, screens(60), strict=True)))


def test_a_common_layout_is_reported_not_quarantined(crowd: Path) -> None:
    found = check_dataset(crowd)
    leaks = by_kind(found)["near-leak"]
    assert len(leaks.cases) > duplicates.MIN_LEAKS
    assert leaks.severity == "severe" and found.severe
    assert "layout" in leaks.advice and "quarantine.csv" in leaks.advice
    assert found.quarantine == []


def test_many_similar_images_trigger_the_stricter_limits(crowd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all images look alike, only the closest pairs are near duplicates."""
    few = len(by_kind(check_dataset(crowd))["near-leak"].cases)
    monkeypatch.setattr(duplicates, "MAX_PAIRS_PER_IMAGE", 10**9)
    assert few < len(by_kind(check_dataset(crowd))["near-leak"].cases)


def test_unsplit_data_has_no_leaks(tmp_path: Path) -> None:
    files = {f"{label}/{i}.png": DATA[6 * (label == "b") + i] for label in "ab" for i in range(6)}
    found = check_dataset(fill(tmp_path, {**files, "a/copy.png": DATA[0], "a/near.jpg": encode(PHOTOS[1])}))
    assert set(by_kind(found)) == {"duplicate", "near-duplicate"}
    assert quarantined(found).keys() == {"a/copy.png"}


def test_groups_in_more_than_one_split(tmp_path: Path) -> None:
    fill(tmp_path, {f"{i}.png": DATA[i] for i in range(12)})
    rows = ["path,label,split,group"]
    rows += [f"{i}.png,{'ab'[i % 2]},{'train' if i < 6 else 'test'},g{i % 7}" for i in range(12)]
    (tmp_path / "list.csv").write_text("\n".join(rows))
    found = check_dataset(tmp_path / "list.csv")
    torn = by_kind(found)["torn-group"]
    assert [case.detail[:3] for case in torn.cases] == [f"g{i}:" for i in range(5)]
    assert names(torn)[0] == {"0.png", "7.png"}
    assert found.severe
    assert found.quarantine == []


def test_multilabel_data(tmp_path: Path) -> None:
    fill(tmp_path, {"1.png": DATA[0], "2.png": DATA[0], "3.png": DATA[1], "4.png": DATA[2]})
    (tmp_path / "list.csv").write_text("path,labels\n1.png,a|b\n2.png,a\n3.png,\n4.png,b\n")
    found = check_dataset(tmp_path / "list.csv")
    assert by_kind(found)["conflict"].cases[0].detail == "a|b / a"
    assert found.balance == {"a": {"all": 2}, "b": {"all": 2}}


def test_class_balance(tmp_path: Path) -> None:
    counts = {"train/a": 20, "train/b": 2, "test/a": 3, "test/c": 2}
    files = [f"{folder}/{i}.png" for folder, count in counts.items() for i in range(count)]
    kinds = by_kind(check_dataset(fill(tmp_path, dict(zip(files, DATA, strict=False)))))
    assert [case.detail for case in kinds["missing-class"].cases] == ["b: no images in test", "c: no images in train"]
    assert [case.detail for case in kinds["few-images"].cases] == ["b: 2 images"]
    assert "imbalance" not in kinds


def test_imbalanced_classes(tmp_path: Path) -> None:
    files = [f"{label}/{i}.png" for label, count in {"a": 30, "b": 3}.items() for i in range(count)]
    kinds = by_kind(check_dataset(fill(tmp_path, dict(zip(files, DATA, strict=False)))))
    assert "10 times" in kinds["imbalance"].title


def test_extreme_shapes(clean: Path) -> None:
    for name, index, size in (("x", 30, (900, 60)), ("y", 31, (15, 15)), ("z", 32, (800, 600))):
        fill(clean, {f"train/a/{name}.png": encode(PHOTOS[index].resize(size), "PNG")})
    cases = {case.names[0]: case.detail for case in by_kind(check_dataset(clean))["shape"].cases}
    assert "900x60" in cases["train/a/x.png"] and "15 times" in cases["train/a/x.png"]
    assert "16 pixels" in cases["train/a/y.png"]
    assert "100 times" in cases["train/a/z.png"]


def test_grey_images_are_reported_among_colour_images_only(clean: Path) -> None:
    fill(clean, {"train/a/grey.jpg": encode(PHOTOS[30].convert("L").convert("RGB"))})
    assert names(by_kind(check_dataset(clean))["grey"]) == [{"train/a/grey.jpg"}]
    for path in clean.rglob("*.png"):
        Image.open(path).convert("L").save(path)
    assert "grey" not in by_kind(check_dataset(clean))


def test_a_class_emptied_by_the_quarantine_is_noted(tmp_path: Path) -> None:
    files = dict(zip(("train/a/0.png", "train/b/0.png", "test/a/0.png", "test/b/0.png"), DATA, strict=False))
    files["train/c/0.png"] = files["test/c/0.png"] = DATA[9]
    assert any("quarantine.csv" in note and "'c'" in note for note in check_dataset(fill(tmp_path, files)).notes)


def test_notes_of_reading_the_data_are_kept(clean: Path) -> None:
    (clean / "train/a/.hidden").write_bytes(b"")
    (clean / "train/a/readme.txt").write_bytes(b"")
    assert check_dataset(clean).notes == ["Ignored 1 hidden item.", "Ignored 1 non-image file: .txt 1."]


def test_no_usable_image_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no usable image"):
        check_dataset(fill(tmp_path, {"a/1.png": b"x", "b/1.png": b"y"}))


def test_json_report_is_complete_and_accepts_any_file_name(clean: Path) -> None:
    odd = "train/a/" + b"\xff\n.png".decode("utf-8", "surrogateescape")
    fill(clean, {odd: DATA[0], "train/b/cut.png": DATA[1][:200]})
    found = check_dataset(clean)
    report = json.loads(json.dumps(found.to_dict()))
    assert report["severe"] is True
    cases = {finding["kind"]: finding["cases"] for finding in report["findings"]}
    assert [image["name"] for image in cases["duplicate"][0]["images"]] == ["train/a/0.png", odd]
    assert cases["duplicate"][0]["images"][0]["labels"] == ["a"]
    assert {row["name"] for row in report["quarantine"]} == {odd, "train/b/cut.png"}
    write_quarantine(clean / "list.csv", found.quarantine)
    with (clean / "list.csv").open(newline="", encoding="utf-8", errors="surrogateescape") as file:
        assert [QuarantineRow(*row) for row in list(csv.reader(file))[1:]] == found.quarantine


@pytest.mark.slow
def test_checking_does_not_import_torch() -> None:
    code = "import sys, vitrail.commands.check; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_classes_that_training_rejects_are_reported(tmp_path: Path) -> None:
    fill(tmp_path, numbered({"train/a": 3, "train/b": 3, "test/a": 2, "test/zebra": 2}))
    found = check_dataset(tmp_path)
    refused = next(finding for finding in found.findings if finding.kind == "classes")
    assert "'zebra'" in refused.cases[0].names[0] and "test" in refused.cases[0].names[0] and found.severe
