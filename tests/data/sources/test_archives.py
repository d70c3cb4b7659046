"""Archives of class folders, and samples sent to worker processes."""

from __future__ import annotations

import os
import pickle
import zipfile
from pathlib import Path

import pytest

from tests.data.folders import contents, fill, image_bytes, names_of, numbered, zipped
from vitrail.data import files as files_module
from vitrail.data.dataset import open_dataset

# archives


@pytest.mark.parametrize("prefix", ["", "photos/", "my/photos/"])
def test_an_archive_gives_the_same_data_as_its_folder(tmp_path: Path, prefix: str) -> None:
    root = fill(tmp_path / "photos", [*numbered({"a": 5, "b ü": 5}), "a/deep/er/x.JPG"])
    (root / "a/cut.png").write_bytes(image_bytes(3)[:30])
    folder, archive = open_dataset(root), open_dataset(zipped(root, tmp_path / "photos.zip", prefix))
    assert archive.fingerprint == folder.fingerprint
    assert archive.classes == folder.classes
    assert contents(archive) == contents(folder)
    assert archive.excluded == folder.excluded
    assert archive.median_size == folder.median_size
    for split, samples in archive.splits.items():
        assert [samples.read(i) for i in range(len(samples))] == [
            folder.splits[split].read(i) for i in range(len(samples))
        ]
    assert sum("class folders inside" in note for note in archive.notes) == prefix.count("/")


def test_hostile_archives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files_module, "MAX_FILE_BYTES", 10_000)
    target = tmp_path / "x.zip"
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in numbered({"a": 2, "b": 2}):
            archive.writestr(name, image_bytes(1))
        for name in ("../../evil/1.png", "/etc/2.png", "a/../../3.png", "__MACOSX/a/._1.png", "a/._1.png"):
            archive.writestr(name, image_bytes(2))
        archive.writestr("a/large.png", bytes(20_000))
        archive.writestr("a/lzma.png", image_bytes(3), zipfile.ZIP_LZMA)
        archive.writestr("a/secret.png", image_bytes(4))
        archive.writestr("b/bent.png", image_bytes(5), zipfile.ZIP_STORED)
    raw = bytearray(target.read_bytes())
    bent = raw.find(image_bytes(5))
    raw[bent + 40] ^= 0xFF
    secret = raw.rfind(b"a/secret.png") - 46  # its entry in the central directory
    raw[secret + 8] |= 1
    target.write_bytes(raw)
    data = open_dataset(target, None)
    assert names_of(data, "all") == {"a/0.png", "a/1.png", "b/0.png", "b/1.png"}
    reasons = dict(data.excluded)
    assert "larger than 10,000 bytes" in reasons["a/large.png"]
    assert "compression is not supported" in reasons["a/lzma.png"]
    assert "encrypted" in reasons["a/secret.png"]
    assert "damaged" in reasons["b/bent.png"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.zip"]
    assert "Ignored 5 hidden items." in data.notes


def test_large_files_in_folders_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files_module, "MAX_FILE_BYTES", 1_000)
    fill(tmp_path, numbered({"a": 2, "b": 2}))
    (tmp_path / "a/large.png").write_bytes(bytes(1_001))
    ((name, reason),) = open_dataset(tmp_path).excluded
    assert name == "a/large.png" and "1,000 bytes" in reason


# in worker processes


def test_pickled_samples_are_small_and_readable(tmp_path: Path) -> None:
    root = fill(tmp_path / "data", numbered({"a": 50, "b": 50}))
    for path in (root, zipped(root, tmp_path / "data.zip")):
        samples = open_dataset(path).splits["train"]
        sent = pickle.dumps(samples)
        assert len(sent) < 6_000
        received = pickle.loads(sent)
        assert [received.name(i) for i in range(len(received))] == [samples.name(i) for i in range(len(samples))]
        assert received.read(3) == samples.read(3)
        assert received.name(-1) == samples.name(len(samples) - 1)
        with pytest.raises(IndexError):
            received.name(len(samples))


def test_a_subset_keeps_order_labels_and_classes(tmp_path: Path) -> None:
    samples = open_dataset(fill(tmp_path, numbered({"a": 10, "b": 10})), None).splits["all"]
    part = samples.subset([15, 2, 2])
    assert [part.name(i) for i in range(3)] == [samples.name(15), samples.name(2), samples.name(2)]
    assert part.labels.tolist() == [1, 0, 0]
    assert part.classes == samples.classes
    assert part.read(0) == samples.read(15)
    assert len(samples.subset([])) == 0


def test_forked_readers_of_one_archive_do_not_disturb_each_other(tmp_path: Path) -> None:
    root = fill(tmp_path / "data", {f"{c}/{i}.png": image_bytes(i, (40, 40)) for c in "ab" for i in range(40)})
    samples = open_dataset(zipped(root, tmp_path / "data.zip"), None).splits["all"]
    expected = [samples.read(i) for i in range(len(samples))]
    children = []
    for _ in range(3):
        child = os.fork()
        if child == 0:
            equal = all(samples.read(i) == expected[i] for _ in range(20) for i in range(len(samples)))
            os._exit(0 if equal else 1)
        children.append(child)
    assert all(samples.read(i) == expected[i] for _ in range(20) for i in range(len(samples)))
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0, 0]
