"""The page of `vitrail check` is complete, safe and self-contained, whatever the file names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench.planted import encode, generated
from tests.data.folders import fill
from tests.report.test_page import EVIL, Reader
from vitrail.doctor.check import check_dataset
from vitrail.report.check_page import MAX_IMAGES, render_check_page, write_check_page

DATA = [encode(photo, "PNG") for photo in generated(80, (40, 50))]


@pytest.fixture(scope="module")
def messy(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A page with leaks, duplicates and broken files whose names are hostile HTML."""
    names = [name.replace("/", "").replace("\0", "").encode("utf-8", "replace").decode() for name in EVIL]
    files = {f"train/a{name}/{i}.png": DATA[7 * i + 60] for i, name in enumerate(names) if name and i < 2}
    files |= {f"test/a{name}/{i}.png": DATA[7 * i + 60] for i, name in enumerate(names) if name and i < 2}
    files |= {f"train/b/{i}.png": data for i, data in enumerate(DATA[:45])}
    files |= {f"test/b/{i}.png": data for i, data in enumerate(DATA[:45])}
    files |= {f"train/b/x{name}.png": b"no image" for name in names}
    findings = check_dataset(fill(tmp_path_factory.mktemp("messy") / "data", files))
    return render_check_page(findings, EVIL[0], ["vitrail train 'a b'"])


def test_the_page_is_well_formed_and_loads_nothing(messy: str) -> None:
    page = Reader(messy)
    assert not any(tag in ("script", "iframe", "object") for tag, _ in page.tags)
    addresses = [value for _, attributes in page.tags for key, value in attributes.items() if key in ("src", "href")]
    assert all(value and value.startswith(("data:", "#")) for value in addresses)
    assert not re.search(r"url\(|@import|https?:", messy)
    ids = {attributes["id"] for _, attributes in page.tags if "id" in attributes}
    assert {value[1:] for value in addresses if value and value.startswith("#")} <= ids


def test_names_are_escaped(messy: str) -> None:
    words = "".join(Reader(messy).words)
    assert "<script>alert(1)" in words
    assert "8638" not in words  # 1234 * 7


def test_the_number_of_images_is_limited(messy: str) -> None:
    section = messy[messy.index('<section id="leak"') : messy.index('<section id="corrupt"')]
    assert MAX_IMAGES - 2 <= section.count("<img") <= MAX_IMAGES
    assert re.search(r"\b17 more .*report\.json", section)


def test_a_deleted_image_is_a_grey_square(tmp_path: Path) -> None:
    root = fill(tmp_path / "data", {f"{label}/{i}.png": DATA[i] for label in "ab" for i in range(2)})
    findings = check_dataset(root)
    for path in root.rglob("*.png"):
        path.unlink()
    write_check_page(tmp_path / "page.html", findings, "data", [])
    assert (tmp_path / "page.html").read_text().count("<img") == 4


def test_the_page_of_clean_data(tmp_path: Path) -> None:
    findings = check_dataset(
        fill(tmp_path, {f"{label}/{i}.png": DATA[i + 10 * (label == "b")] for label in "ab" for i in range(6)})
    )
    words = " ".join(Reader(render_check_page(findings, "data", [])).words)
    assert "No leaks" in words
