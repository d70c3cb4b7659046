"""MATLAB files, with SciPy as the oracle; damaged ones give values or one sentence, and nothing else."""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from vitrail.data.sources import matfile
from vitrail.data.sources.matfile import read_mat
from vitrail.errors import UserError

scipy_io = pytest.importorskip("scipy.io")

KINDS = [np.float64, np.float32, np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64]
SIDES = hnp.array_shapes(min_dims=2, max_dims=3, min_side=0, max_side=3)
NUMBERS = st.sampled_from([*KINDS, np.bool_, np.complex128]).flatmap(lambda kind: hnp.arrays(kind, SIDES))
WORDS = st.text(st.characters(min_codepoint=33, max_codepoint=0x2FFF, exclude_categories=("C", "Z")), max_size=9)
NAMES = st.from_regex(r"[a-z][a-z0-9_]{0,20}", fullmatch=True)


def cells(values: list[Any]) -> np.ndarray:
    filled = np.empty((1, len(values)), object)
    filled[0, :] = [None] * len(values)
    for column, value in enumerate(values):
        filled[0, column] = value
    return filled


VALUES = st.recursive(
    NUMBERS | WORDS,
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3).map(cells) | st.dictionaries(NAMES, inner, min_size=1, max_size=3)
    ),
    max_leaves=6,
)


def written(values: dict[str, Any], **options: Any) -> bytes:
    file = io.BytesIO()
    scipy_io.savemat(file, values, **options)
    return file.getvalue()


def check_same(ours: Any, theirs: Any) -> None:
    """Theirs is what scipy.io.loadmat gives: text in arrays, structs as records."""
    if isinstance(ours, str | list):
        lines = [ours] if isinstance(ours, str) else ours
        assert lines == (theirs.tolist() or [""])
    elif theirs.dtype.names:
        assert ours.shape == theirs.shape
        for own, other in zip(ours.ravel(), theirs.ravel(), strict=True):
            assert set(own) == set(theirs.dtype.names)
            for name, value in own.items():
                check_same(value, other[name])
    elif theirs.dtype == object:
        assert ours.shape == theirs.shape
        for own, other in zip(ours.ravel(), theirs.ravel(), strict=True):
            check_same(own, other)
    else:
        np.testing.assert_array_equal(ours, theirs)
        assert ours.shape == theirs.shape


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(NAMES, VALUES, min_size=1, max_size=3), st.booleans())
def test_what_scipy_writes_is_read_as_scipy_reads_it(values: dict[str, Any], packed: bool) -> None:
    data = written(values, do_compression=packed)
    theirs = scipy_io.loadmat(io.BytesIO(data))
    ours = read_mat(data, "x.mat")
    assert list(ours) == list(values)
    for name, value in ours.items():
        check_same(value, theirs[name])


def test_files_of_matlab_itself_are_read_as_scipy_reads_them() -> None:
    """SciPy comes with files of several versions of MATLAB, in both orders of bytes."""
    corpus = sorted((Path(scipy_io.__file__).parent / "matlab" / "tests" / "data").glob("test*.mat"))
    if not corpus:
        pytest.skip("this SciPy comes without its test files")
    plain = [path for path in corpus if not any(word in path.name for word in ("_4", "mat4", "empty_struct"))]
    read = 0
    for path in plain:
        try:
            ours = read_mat(path.read_bytes(), "x.mat")
        except UserError:
            assert any(word in path.name for word in ("sparse", "func", "object", "hdf5")), path.name
            continue
        with warnings.catch_warnings(action="ignore"):
            theirs = scipy_io.loadmat(path)
        for name, value in ours.items():
            check_same(value, theirs[name])
        read += 1
    assert read > 20


def element(order: str, kind: int, data: bytes) -> bytes:
    return struct.pack(f"{order}II", kind, len(data)) + data + bytes(-len(data) % 8)


def variable(order: str, kind: int, shape: tuple[int, ...], *parts: bytes, name: bytes = b"x") -> bytes:
    flags = element(order, 6, struct.pack(f"{order}II", kind, 0))
    sides = element(order, 5, struct.pack(f"{order}{len(shape)}i", *shape))
    return element(order, 14, flags + sides + element(order, 1, name) + b"".join(parts))


def file_of(order: str, *variables: bytes) -> bytes:
    version = struct.pack(f"{order}H", 0x0100) + (b"IM" if order == "<" else b"MI")
    return b"MATLAB 5.0 MAT-file".ljust(124) + version + b"".join(variables)


@pytest.mark.parametrize("order", ["<", ">"])
def test_both_orders_of_bytes(order: str) -> None:
    small = struct.pack(f"{order}I", 4 << 16 | 3) + struct.pack(f"{order}2h", 7, -2)  # the data inside the tag
    letters = element(order, 17, "aébdcf".encode("utf-16-le" if order == "<" else "utf-16-be"))
    data = file_of(
        order,
        variable(order, 6, (1, 2), small),
        variable(order, 4, (2, 3), letters, name=b"rows"),
        element(order, 14, b""),
    )
    ours = read_mat(data, "x.mat")
    assert ours["x"].tolist() == [[7.0, -2.0]] and ours["x"].dtype == np.float64
    assert ours["rows"] == ["abc", "édf"]
    theirs = scipy_io.loadmat(io.BytesIO(data[:-8]))
    check_same(ours["x"], theirs["x"])
    check_same(ours["rows"], theirs["rows"])


@settings(max_examples=250, deadline=None)
@given(st.data())
def test_damaged_files_give_values_or_one_sentence(data: st.DataObject) -> None:
    changed = bytearray(DAMAGED[data.draw(st.booleans())])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(124, len(changed) - 1))
        changed[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(changed)) | st.just(len(changed)))
    try:
        assert isinstance(read_mat(bytes(changed[:cut]), "'x.mat'"), dict)
    except UserError as error:
        assert str(error).startswith("'x.mat' cannot be read as a MATLAB file: ")


SYNSETS = np.array([[(1, "n01", "a, b")], [(2, "n02", "c")]], [("ID", object), ("WNID", object), ("words", object)])
DAMAGED = [
    written({"s": SYNSETS, "c": cells([np.eye(2), "text"]), "n": np.arange(5.0) * 1j}, do_compression=packed)
    for packed in (False, True)
]


def nested(depth: int) -> bytes:
    inner = variable("<", 6, (1, 1), element("<", 9, struct.pack("<d", 1)))
    for _ in range(depth):
        inner = variable("<", 1, (1, 1), inner)
    return inner


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not of version 5"),
        (b"\x89HDF\r\n\x1a\n" + bytes(600), "not of version 5"),
        (file_of("<", variable("<", 1, (30_000, 3_000))), "no room for the 90,000,000 values"),
        (file_of("<", variable("<", 1, (2**31 - 1, 2**31 - 1))), "without proper dimensions"),
        (file_of("<", variable("<", 6, (0, -1))), "without proper dimensions"),
        (file_of("<", variable("<", 6, (1,) * 40)), "without proper dimensions"),
        (file_of("<", variable("<", 6, (2, 2), element("<", 9, bytes(8)))), "has 1 numbers for an array of 4"),
        (file_of("<", variable("<", 5, (2, 2))), "'x' is none of numbers, text, cells and structs"),
        (file_of("<", nested(40)), "nested more than 32 deep"),
        (file_of("<", struct.pack("<II", 14, 2**32 - 1)), "cut short"),
        (file_of("<", element("<", 9, bytes(8))), "an element of type 9"),
    ],
)
def test_what_cannot_be_read_is_told_in_one_sentence(data: bytes, reason: str) -> None:
    with pytest.raises(UserError, match=f"^'x.mat' cannot be read as a MATLAB file: .*{reason}"):
        read_mat(data, "'x.mat'")


def test_a_small_file_cannot_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matfile, "MAX_BYTES", 100_000)
    zeros = zlib.compress(variable("<", 9, (1, 60_000), element("<", 2, bytes(60_000))))
    packed = struct.pack("<II", 15, len(zeros)) + zeros
    assert read_mat(file_of("<", packed), "x.mat")["x"].size == 60_000
    with pytest.raises(UserError, match="unpacks to more than 100,000 bytes"):
        read_mat(file_of("<", packed, packed), "x.mat")
    empty = variable("<", 2, (100, 1000), element("<", 5, struct.pack("<i", 32)), element("<", 1, b""))
    with pytest.raises(UserError, match="no room for the 100,000 values"):
        read_mat(file_of("<", empty), "x.mat")
