"""CIFAR in its four published versions, in folders and archives, complete and damaged."""

from __future__ import annotations

import io
import os
import pickle
import struct
import tarfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.data.folders import contents, has_note, zipped
from vitrail.data.dataset import Dataset, open_dataset
from vitrail.data.decode import decode
from vitrail.data.sources.cifar import bmp
from vitrail.data.sources.cifarpickle import byte_rows, load_pickle, numbers_in
from vitrail.data.sources.read import read_source
from vitrail.data.splits import SplitRule
from vitrail.errors import UserError

ROWS = 6
TEN = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
HUNDRED = [f"fine {number}" for number in range(100)]
FILES = {10: [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"], 100: ["train", "test"]}


def planes(file: int) -> np.ndarray:
    """The pixels of a batch as the files store them: images, colours, rows, columns."""
    return np.random.default_rng(file).integers(0, 256, (ROWS, 3, 32, 32), np.uint8)


def labels(kind: int, file: int) -> list[int]:
    return [(file + row) % kind for row in range(ROWS)]


def binary(root: Path, kind: int) -> Path:
    folder = root / ("cifar-10-batches-bin" if kind == 10 else "cifar-100-binary")
    folder.mkdir(parents=True)
    names = TEN if kind == 10 else HUNDRED
    (folder / ("batches.meta.txt" if kind == 10 else "fine_label_names.txt")).write_text("\n".join(names) + "\n\n")
    for number, name in enumerate(FILES[kind]):
        coarse = b"" if kind == 10 else b"\x13"
        rows = zip(labels(kind, number), planes(number), strict=True)
        data = b"".join(coarse + bytes([label]) + image.tobytes() for label, image in rows)
        (folder / f"{name}.bin").write_bytes(data)
    return folder


def old_text(text: str) -> bytes:
    return b"U" + bytes([len(text)]) + text.encode()


def old_batch(kind: int, number: int) -> bytes:
    """A pickle as Python 2 writes it."""
    data = planes(number).tobytes()
    array = b"cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\nq\x04K\x00\x85U\x01b\x87Rq\x05(K\x01"
    shape = b"K" + bytes([ROWS]) + b"M\x00\x0c\x86q\x06cnumpy\ndtype\nq\x07U\x02u1K\x00K\x01\x87Rq\x08"
    order = (
        b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T" + struct.pack("<I", len(data)) + data + b"tb"
    )
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels(kind, number)) + b"e"
    key = "labels" if kind == 10 else "fine_labels"
    return b"\x80\x02}q\x01(" + old_text("data") + array + shape + order + old_text(key) + numbers + b"u."


def python(root: Path, kind: int, old: bool = True) -> Path:
    folder = root / ("cifar-10-batches-py" if kind == 10 else "cifar-100-python")
    folder.mkdir(parents=True)
    key, names = ("label", TEN) if kind == 10 else ("fine_label", HUNDRED)
    listed = b"](" + b"".join(map(old_text, names)) + b"e"
    meta = b"\x80\x02}(" + old_text(f"{key}_names") + listed + b"u." if old else pickle.dumps({f"{key}_names": names})
    (folder / ("batches.meta" if kind == 10 else "meta")).write_bytes(meta)
    for number, name in enumerate(FILES[kind]):
        values = {"data": planes(number).reshape(ROWS, -1), f"{key}s": labels(kind, number)}
        new = pickle.dumps(values, protocol=2)  # writes bytes through _codecs.encode
        (folder / name).write_bytes(old_batch(kind, number) if old else new)
    return folder


def packed(folder: Path, target: Path) -> Path:
    with tarfile.open(target, "w:gz") as archive:
        archive.add(folder, folder.name)
    return target


def check_pixels(data: Dataset, kind: int, suffix: str) -> None:
    for samples in data.splits.values():
        for row in range(len(samples)):
            name, _, number = samples.name(row).partition("#")
            file = FILES[kind].index(name.removesuffix(suffix))
            assert samples.labels[row] == labels(kind, file)[int(number)]
            expected = planes(file)[int(number)].transpose(1, 2, 0)
            np.testing.assert_array_equal(decode(samples.read(row)), expected)


@pytest.mark.parametrize("kind", [10, 100])
@pytest.mark.parametrize("version", ["binary", "python", "new pickles"])
def test_every_version_in_folders_and_archives(tmp_path: Path, kind: int, version: str) -> None:
    root = tmp_path / "around"
    folder = binary(root, kind) if version == "binary" else python(root, kind, old=version == "python")
    suffix = ".bin" if version == "binary" else ""
    archives = [packed(folder, tmp_path / "x.tar.gz"), zipped(root, tmp_path / "x.zip")]
    opened = [open_dataset(path, SplitRule(val_fraction=0.3)) for path in (folder, root, *archives)]
    for data in opened:
        assert data.classes == tuple(TEN if kind == 10 else HUNDRED)
        assert data.given_split and len(data.splits["test"]) == ROWS
        assert sum(map(len, data.splits.values())) == ROWS * len(FILES[kind])
        assert f"CIFAR-{kind} " in data.notes[0]
        assert ("binary version" if version == "binary" else "Python version") in data.notes[0]
        assert has_note(data.notes, "20 coarse") == (kind == 100)
        check_pixels(data, kind, suffix)
        assert contents(data) == contents(opened[0])
        copy = pickle.loads(pickle.dumps(data.splits["test"]))
        assert [copy.read(row) for row in range(ROWS)] == [data.splits["test"].read(row) for row in range(ROWS)]
        assert len(pickle.dumps(data.splits["test"])) < 5_000
    assert len({data.fingerprint for data in opened}) == 1


def test_an_image_is_a_valid_bmp_file() -> None:
    image = planes(3)[0]
    opened = Image.open(io.BytesIO(bmp(image.tobytes())))
    assert (opened.format, opened.mode, opened.size) == ("BMP", "RGB", (32, 32))
    np.testing.assert_array_equal(np.asarray(opened), image.transpose(1, 2, 0))
    saved = io.BytesIO()
    opened.save(saved, "BMP")
    assert saved.getvalue()[54:] == bmp(image.tobytes())[54:]


def test_names_that_are_not_in_the_batches(tmp_path: Path) -> None:
    for folder in (binary(tmp_path / "a", 10), python(tmp_path / "b", 10)):
        files = read_source(folder, []).files
        batch = "test_batch.bin" if "bin" in folder.name else "test_batch"
        for name in (f"{batch}#{ROWS}", f"{batch}#-1", f"{batch}#x", batch, "../x#0", "data_batch_9#0"):
            with pytest.raises(OSError, match=r"no such|too early"):
                files.read(name)


# missing and damaged files


def test_a_missing_batch_is_noted(tmp_path: Path) -> None:
    folder = binary(tmp_path, 10)
    (folder / "data_batch_3.bin").unlink()
    notes: list[str] = []
    images = read_source(folder, notes)
    assert Counter(images.splits) == {"train": 4 * ROWS, "test": ROWS}
    assert has_note(notes, "Missing", "CIFAR-10", "'data_batch_3.bin'")
    assert has_note(notes, "train split", "24", "50,000")


@pytest.mark.parametrize(
    ("name", "data", "fact"),
    [
        ("batches.meta.txt", None, "is missing.*CIFAR-10"),
        ("batches.meta.txt", b"cat\ncat\n", "must list .*CIFAR-10, each once"),
        ("data_batch_2.bin", bytes(3072), "has 3,072 bytes.* 3,073"),
        ("data_batch_2.bin", b"", "has 0 bytes"),
        ("test_batch.bin", b"\x0a" + bytes(3072), "has the label 10, .*batches.meta.txt .*10 classes"),
    ],
)
def test_damaged_binaries(tmp_path: Path, name: str, data: bytes | None, fact: str) -> None:
    folder = binary(tmp_path, 10)
    (folder / name).unlink() if data is None else (folder / name).write_bytes(data)
    with pytest.raises(UserError, match=f"{name}' {fact}"):
        read_source(folder, [])


class Call:
    def __init__(self, function: object, *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return self.call


@pytest.mark.parametrize(
    ("data", "fact"),
    [
        (pickle.dumps(Call(os.system, "touch evil")), "not safe.*'posix.system'"),
        (pickle.dumps(Call(np.zeros, 9)), "not safe.*'numpy.zeros'"),
        (pickle.dumps(Call(getattr, "", "join")), "not safe.*getattr"),
        (pickle.dumps([1]), "no dict"),
        (pickle.dumps({"labels": [0]}), "no array 'data' with 3,072 bytes"),
        (pickle.dumps({"data": np.zeros((2, 3), np.uint8), "labels": [0, 0]}, 2), "no array 'data' with 3,072 bytes"),
        (pickle.dumps({"data": np.zeros((1, 3072)), "labels": [0]}, 2), "no array 'data' with 3,072 bytes"),
        (pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": [0]}, 2), "has 2 images and 1 labels"),
        (pickle.dumps({"data": np.zeros((1, 3072), np.uint8), "labels": [-1]}, 2), "negative number in 'labels'"),
        (pickle.dumps({"data": np.zeros((1, 3072), np.uint8), "labels": "0"}, 2), "no list of numbers 'labels'"),
        (old_batch(10, 0)[:5000], "not a pickle of CIFAR, or it is damaged"),
        (b"\x80\x02r\xff\xff\xff\xff.", "damaged"),  # an index that would make a memory of gigabytes
        (b"\x80\x02c_codecs\nencode\n}U\x01x\x86b.", "damaged"),  # sets attributes of a stand-in
        (b"\x80\x02cnumpy\ndtype\nN}U\x07__new__K\x01s\x86b.", "damaged"),
    ],
)
def test_other_and_hostile_pickles_are_errors_and_run_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes, fact: str
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = python(tmp_path, 10)
    (folder / "test_batch").write_bytes(data)
    with pytest.raises(UserError, match=f"test_batch' .*{fact}"):
        read_source(folder, [])
    assert not (tmp_path / "evil").exists()


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_damaged_pickles_give_values_or_a_user_error(data: st.DataObject) -> None:
    changed = bytearray(old_batch(10, 0).replace(planes(0).tobytes(), b"").replace(b"T\x00\x48\x00\x00", b"U\x00"))
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    try:
        values = load_pickle(bytes(changed), "'x'")
        numbers_in(values, "labels", "'x'")
        byte_rows(values, "data", 3072, "'x'")
    except UserError as error:
        assert str(error).startswith("'x' ")


def test_archives_that_are_not_cifar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    other = tmp_path / "other.tar.gz"
    with tarfile.open(other, "w:gz") as archive:
        archive.add(Path(__file__), "package/readme.txt")
    text = tmp_path / "text.tgz"
    text.write_text("no archive")
    for path in (other, text):
        with pytest.raises(UserError, match=f"{path.name}' is not a data set.*CIFAR"):
            read_source(path, [])
    whole = packed(binary(tmp_path / "a", 10), tmp_path / "cut.tar.gz")
    whole.write_bytes(whole.read_bytes()[:60_000])
    with pytest.raises(UserError, match=r"cut.tar.gz' cannot be read: "):
        read_source(whole, [])
    hostile = tmp_path / "hostile.tar"
    with tarfile.open(hostile, "w") as archive:
        for name in ("cifar-10-batches-bin/../../up.bin", "/cifar-10-batches-bin/test_batch.bin"):
            member = tarfile.TarInfo(name)
            member.size = 3073
            archive.addfile(member, io.BytesIO(bytes(3073)))
        link = tarfile.TarInfo("cifar-10-batches-bin/batches.meta.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/hostname"
        archive.addfile(link)
    with pytest.raises(UserError, match=r"batches.meta.txt' is missing"):
        read_source(hostile, [])
    assert not (tmp_path / "up.bin").exists() and not (tmp_path.parent / "up.bin").exists()
