"""The scan of a data set and its cache, and the images that come with the package."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.data.folders import fill, image_bytes, numbered, zipped
from vitrail.data import scan as scan_module
from vitrail.data.dataset import bundled_images, open_dataset
from vitrail.data.decode import decode
from vitrail.data.files import FolderFiles
from vitrail.data.formats import UNSUPPORTED_FORMAT
from vitrail.data.similar import descriptor
from vitrail.data.traits import Trait

# the cache


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the files that were decoded."""
    sizes: list[int] = []

    def spy(data: bytes, **options: int) -> np.ndarray:
        sizes.append(len(data))
        return decode(data, **options)

    monkeypatch.setattr(scan_module, "decode", spy)
    return sizes


@pytest.mark.parametrize("as_archive", [False, True])
def test_only_new_and_changed_files_are_decoded_again(tmp_path: Path, decoded: list[int], as_archive: bool) -> None:
    root = fill(tmp_path / "data", numbered({"a": 5, "b": 5}))
    (root / "a/bad.png").write_bytes(b"bad")
    place = zipped(root, tmp_path / "data.zip") if as_archive else root
    first = open_dataset(place)
    assert len(decoded) == 11
    second = open_dataset(place)
    assert len(decoded) == 11
    assert second.fingerprint == first.fingerprint
    assert second.excluded == first.excluded
    assert second.median_size == first.median_size
    if not as_archive:
        (root / "a/0.png").write_bytes(image_bytes(99, (9, 9)))
        fill(root, {"b/new.png": image_bytes(98)})
        (root / "b/0.png").unlink()
        assert open_dataset(place).fingerprint != first.fingerprint
        assert len(decoded) == 13


def test_a_replaced_archive_is_scanned_again(tmp_path: Path) -> None:
    root = fill(tmp_path / "data", numbered({"a": 3, "b": 3}))
    target = zipped(root, tmp_path / "data.zip")
    before = open_dataset(target).fingerprint
    (root / "a/0.png").write_bytes(image_bytes(55))
    assert open_dataset(zipped(root, target)).fingerprint != before


@pytest.mark.parametrize("damage", [b"", b"not an archive", b"PK\x03\x04 cut"])
def test_a_damaged_cache_is_ignored(tmp_path: Path, decoded: list[int], damage: bytes) -> None:
    fill(tmp_path / "data", numbered({"a": 3, "b": 3}))
    expected = open_dataset(tmp_path / "data").fingerprint
    for file in (scan_module.cache_folder() / "scans").iterdir():
        file.write_bytes(damage)
    assert open_dataset(tmp_path / "data").fingerprint == expected
    assert len(decoded) == 12


def test_a_cache_that_cannot_be_written_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, {"file": b""})
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "file"))
    assert open_dataset(fill(tmp_path / "data", numbered({"a": 3, "b": 3}))).classes == ("a", "b")


def test_reasons_cached_by_earlier_versions_are_recognised(tmp_path: Path, decoded: list[int]) -> None:
    fill(tmp_path, numbered({"a": 3, "b": 3}))
    (tmp_path / "a/raw.png").write_bytes(b"bad")
    open_dataset(tmp_path)
    cache = max((scan_module.cache_folder() / "scans").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    with np.load(cache) as file:
        stored = {key: file[key] for key in file.files}
    stored["reasons"] = np.frombuffer(b"not read: camera RAW; convert it\0", np.uint8)
    with cache.open("wb") as file:
        np.savez(file, **stored)
    ((name, reason),) = open_dataset(tmp_path).excluded
    assert name == "a/raw.png" and reason == f"{UNSUPPORTED_FORMAT}camera RAW; convert it" and len(decoded) == 7


def test_an_interrupted_scan_resumes(tmp_path: Path, decoded: list[int]) -> None:
    fill(tmp_path, numbered({"a": 50, "b": 50}))

    def interrupt(done: int, total: int) -> None:
        if done >= 64:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_dataset(tmp_path, progress=interrupt)
    decoded.clear()
    open_dataset(tmp_path)
    assert len(decoded) <= 100 - 64
    leftovers = [path.name for path in (scan_module.cache_folder() / "scans").iterdir() if path.suffix != ".npz"]
    assert leftovers == []


def test_two_tables_in_one_folder_are_both_cached(
    tmp_path: Path, decoded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, {**{f"{i}.png": image_bytes(i) for i in range(8)}, "bad.png": b"bad"})
    rows = [f"{i}.png,{'ab'[i % 2]}" for i in range(8)]
    (tmp_path / "first.csv").write_text("\n".join(["path,label", *rows[:5], "bad.png,a"]))
    (tmp_path / "second.csv").write_text("\n".join(["path,label", *rows[4:]]))
    tables = [tmp_path / "first.csv", tmp_path / "second.csv"]
    before = [open_dataset(table) for table in tables]
    assert len(decoded) == 9  # the image in both tables only once
    after = [open_dataset(table) for table in tables * 2]
    assert len(decoded) == 9
    assert [data.fingerprint for data in after] == [data.fingerprint for data in before] * 2
    assert after[2].excluded == before[0].excluded != []
    fill(tmp_path, {"0.png": image_bytes(70)})  # a replaced row is not cached twice
    open_dataset(tables[0])
    open_dataset(tables[1])
    assert len(decoded) == 10
    monkeypatch.setattr(scan_module, "_MAX_CACHED", 6)
    fill(tmp_path, {"1.png": image_bytes(71)})
    open_dataset(tables[0])
    assert len(decoded) == 11
    open_dataset(tables[1])
    assert len(decoded) == 14  # three rows did not fit into the cache


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    fill(tmp_path, numbered({"a": 40, "b": 40}))
    calls: list[tuple[int, int]] = []
    open_dataset(tmp_path, progress=lambda done, total: calls.append((done, total)))
    assert calls[0] == (0, 80)
    assert calls[-1] == (80, 80)
    assert calls == sorted(calls)
    calls.clear()
    open_dataset(tmp_path, progress=lambda done, total: calls.append((done, total)))
    assert calls == [(80, 80)]


def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("VITRAIL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert scan_module.cache_folder() == tmp_path / "vitrail"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert scan_module.cache_folder() == tmp_path / ".cache" / "vitrail"


# traits and descriptors


def test_traits_and_descriptors_are_cached_and_zero_for_broken_images(tmp_path: Path, decoded: list[int]) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    Image.fromarray(pixels[:, :, 0]).save(tmp_path / "b.png")
    (tmp_path / "c.png").write_bytes(b"bad")
    entries = FolderFiles(str(tmp_path)).list().images
    for _ in range(2):
        result = scan_module.scan(FolderFiles(str(tmp_path)), entries, 10_000)
        assert result.traits.tolist() == [0, Trait.GREY, 0]
        np.testing.assert_array_equal(result.descriptors[0], descriptor(pixels))
        assert result.descriptors.any(axis=1).tolist() == [True, True, False]
    assert len(decoded) == 3


def test_a_scan_result_without_traits_and_descriptors_has_zeros() -> None:
    result = scan_module.ScanResult(np.zeros((5, 16), np.uint8), np.zeros((5, 2), np.int32), {})
    assert result.traits.tolist() == [0] * 5
    assert result.descriptors.shape == (5, 64)


@pytest.mark.parametrize(("values", "grey"), [((9, 9, 9), True), ((9, 11, 12), True), ((9, 9, 30), False)])
def test_grey_pictures_stored_in_colour(values: tuple[int, int, int], grey: bool) -> None:
    file = io.BytesIO()
    Image.new("RGB", (30, 20), values).save(file, "PNG")
    assert (scan_module.scan_image(file.getvalue(), "a.png", 10_000).traits == Trait.GREY) == grey


# the bundled images


@pytest.mark.slow
def test_the_bundled_images() -> None:
    data = open_dataset(bundled_images(), None)
    assert data.given_split
    assert data.excluded == []
    assert data.notes == []
    assert data.median_size == (32, 32)
    assert len(data.classes) == 10
    assert np.bincount(data.splits["train"].labels).tolist() == [200] * 10
    assert np.bincount(data.splits["test"].labels).tolist() == [100] * 10
    pixels = {split: [decode(s.read(i)) for i in range(len(s))] for split, s in data.splits.items()}
    assert {image.shape for images in pixels.values() for image in images} == {(32, 32, 3)}
    distinct = {image.tobytes() for images in pixels.values() for image in images}
    assert len(distinct) == 3_000
    assert bundled_images().stat().st_size < 7_000_000


def test_opening_data_does_not_import_torch() -> None:
    code = "import sys, vitrail.data.dataset, vitrail.data.decode; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
