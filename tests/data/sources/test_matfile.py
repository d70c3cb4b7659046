"""MATLAB files, with SciPy as the oracle. Damaged files give values or a UserError, and nothing else."""

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


def check_same(value: Any, expected: Any) -> None:
    """Compare with what scipy.io.loadmat returns: text in arrays, structs as records."""
    if isinstance(value, str | list):
        lines = [value] if isinstance(value, str) else value
        assert lines == (expected.tolist() or [""])
    elif expected.dtype.names:
        assert value.shape == expected.shape
        for item, record in zip(value.ravel(), expected.ravel(), strict=True):
            assert set(item) == set(expected.dtype.names)
            for name, field in item.items():
                check_same(field, record[name])
    elif expected.dtype == object:
        assert value.shape == expected.shape
        for item, expected_item in zip(value.ravel(), expected.ravel(), strict=True):
            check_same(item, expected_item)
    else:
        np.testing.assert_array_equal(value, expected)
        assert value.shape == expected.shape


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(NAMES, VALUES, min_size=1, max_size=3), st.booleans())
def test_files_written_by_scipy_are_read_as_scipy_reads_them(values: dict[str, Any], packed: bool) -> None:
    data = written(values, do_compression=packed)
    expected = scipy_io.loadmat(io.BytesIO(data))
    variables = read_mat(data, "x.mat")
    assert list(variables) == list(values)
    for name, value in variables.items():
        check_same(value, expected[name])


def test_files_written_by_matlab_are_read_as_scipy_reads_them() -> None:
    """SciPy comes with files of several versions of MATLAB, in both byte orders."""
    corpus = sorted((Path(scipy_io.__file__).parent / "matlab" / "tests" / "data").glob("test*.mat"))
    if not corpus:
        pytest.skip("this SciPy comes without its test files")
    plain = [path for path in corpus if not any(word in path.name for word in ("_4", "mat4", "empty_struct"))]
    read = 0
    for path in plain:
        try:
            variables = read_mat(path.read_bytes(), "x.mat")
        except UserError:
            assert any(word in path.name for word in ("sparse", "func", "object", "hdf5")), path.name
            continue
        with warnings.catch_warnings(action="ignore"):
            expected = scipy_io.loadmat(path)
        for name, value in variables.items():
            check_same(value, expected[name])
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
def test_both_byte_orders(order: str) -> None:
    small = struct.pack(f"{order}I", 4 << 16 | 3) + struct.pack(f"{order}2h", 7, -2)  # the data inside the tag
    letters = element(order, 17, "aébdcf".encode("utf-16-le" if order == "<" else "utf-16-be"))
    data = file_of(
        order,
        variable(order, 6, (1, 2), small),
        variable(order, 4, (2, 3), letters, name=b"rows"),
        element(order, 14, b""),
    )
    variables = read_mat(data, "x.mat")
    assert variables["x"].tolist() == [[7.0, -2.0]] and variables["x"].dtype == np.float64
    assert variables["rows"] == ["abc", "édf"]
    expected = scipy_io.loadmat(io.BytesIO(data[:-8]))
    check_same(variables["x"], expected["x"])
    check_same(variables["rows"], expected["rows"])


@settings(max_examples=250, deadline=None)
@given(st.data())
def test_damaged_files_give_values_or_a_user_error(data: st.DataObject) -> None:
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
        (file_of("<", variable("<", 1, (30_000, 3_000))), "too small for its 90,000,000 values"),
        (file_of("<", variable("<", 1, (2**31 - 1, 2**31 - 1))), "invalid dimensions"),
        (file_of("<", variable("<", 6, (0, -1))), "invalid dimensions"),
        (file_of("<", variable("<", 6, (1,) * 40)), "invalid dimensions"),
        (file_of("<", variable("<", 6, (2, 2), element("<", 9, bytes(8)))), "has 1 numbers for an array of 4"),
        (file_of("<", variable("<", 5, (2, 2))), "'x' is not numbers"),
        (file_of("<", nested(40)), "nested more than 32 deep"),
        (file_of("<", struct.pack("<II", 14, 2**32 - 1)), "cut short"),
        (file_of("<", element("<", 9, bytes(8))), "an element of type 9"),
    ],
)
def test_the_reason_why_a_file_cannot_be_read(data: bytes, reason: str) -> None:
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
    with pytest.raises(UserError, match="too small for its 100,000 values"):
        read_mat(file_of("<", empty), "x.mat")
