"""Read MATLAB files of version 5 to 7.2 as far as data sets use them: numbers, text, cells and structs.

A file is a list of elements, each a tag (type, bytes) and its data. A variable is an element made of other elements:
flags, dimensions, name and contents. Cells and structs contain variables again.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from vitrail.errors import UserError

MAX_BYTES = 100_000_000  # unpacked; the largest file of a known data set has three million
MAX_DEPTH = 32
MAX_EMPTY = 10_000  # structs without fields, which take no bytes in the file
MAX_DIMENSIONS = 32

_STORED = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
_NUMBERS = {6: "f8", 7: "f4", 8: "i1", 9: "u1", 10: "i2", 11: "u2", 12: "i4", 13: "u4", 14: "i8", 15: "u8"}
_MATRIX, _COMPRESSED = 14, 15  # types of elements
_CELL, _STRUCT, _CHAR = 1, 2, 4  # classes of variables
_COMPLEX, _LOGICAL = 0x0800, 0x0200
_TEXT = {1: "latin-1", 2: "latin-1", 4: "utf-16", 16: "utf-8", 17: "utf-16"}

Element = tuple[int, memoryview]  # (type, data)


def read_mat(data: bytes, where: str) -> dict[str, Any]:
    """Return the variables by name.

    Numbers are arrays. Text is a string, or a list of strings for several rows. Cells and structs are object arrays in
    MATLAB's shape; the items of a struct are dicts. `where` is the file name for messages.
    """
    try:
        return _variables(data)
    except _MatError as error:
        reason = str(error)
    except (struct.error, zlib.error, UnicodeDecodeError):
        reason = "it is damaged"
    raise UserError(f"{where} cannot be read as a MATLAB file: {reason}")


class _MatError(Exception):
    """The reason why a file cannot be read."""


def _variables(data: bytes) -> dict[str, Any]:
    byte_orders = {b"IM": "<", b"MI": ">"}
    if len(data) < 128 or data[126:128] not in byte_orders:
        raise _MatError("it is not of version 5 to 7.2")
    order = byte_orders[data[126:128]]
    if struct.unpack(f"{order}H", data[124:126])[0] != 0x0100:
        raise _MatError("it is not of version 5 to 7.2")
    variables, room = {}, MAX_BYTES
    for kind, body in _elements(memoryview(data)[128:], order):
        if kind == _COMPRESSED:
            unpacked = _unpacked(body, room)
            room -= len(unpacked)
            kind, body = next(_elements(memoryview(unpacked), order), (0, body))
        if kind != _MATRIX:
            raise _MatError(f"it has an element of type {kind} where a variable should be")
        name, value = _variable(body, order, 0)
        variables[name] = value
    return variables


def _unpacked(body: memoryview, room: int) -> bytes:
    stream = zlib.decompressobj()
    unpacked = stream.decompress(body, room + 1)
    if len(unpacked) > room:
        raise _MatError(f"it unpacks to more than {MAX_BYTES:,} bytes")
    if not stream.eof:
        raise _MatError("it is cut short")
    return unpacked


def _elements(data: memoryview, order: str) -> Iterator[Element]:
    """Yield the elements in order. The tag itself can contain up to four bytes of data."""
    at = 0
    while at < len(data):
        if len(data) - at < 8:
            raise _MatError("it is cut short")
        kind, size = struct.unpack_from(f"{order}II", data, at)
        start, step = at + 8, -(-size // 8) * 8
        if kind >> 16:
            kind, size, start, step = kind & 0xFFFF, kind >> 16, at + 4, 0
            if size > 4:
                raise _MatError("it is damaged")
        elif kind == _COMPRESSED:
            step = size  # compressed elements are not padded to eight bytes
        if start + size > len(data):
            raise _MatError("it is cut short")
        yield kind, data[start : start + size]
        at += 8 + step


def _variable(body: memoryview, order: str, depth: int) -> tuple[str, Any]:
    """Return the name and the value of a variable; inside cells and structs the name is empty."""
    if depth > MAX_DEPTH:
        raise _MatError(f"its values are nested more than {MAX_DEPTH} deep")
    if not body:
        return "", np.zeros((0, 0))  # an empty cell is written this way
    parts = _elements(body, order)
    flags = _numbers(_next(parts), order, "u4")
    if len(flags) < 2:
        raise _MatError("it is damaged")
    kind = int(flags[0]) & 0xFF
    shape = tuple(_numbers(_next(parts), order, "i4").tolist())
    if not 2 <= len(shape) <= MAX_DIMENSIONS or min(shape) < 0 or math.prod(max(n, 1) for n in shape) > MAX_BYTES:
        raise _MatError("it has an array with invalid dimensions")
    name = bytes(_next(parts)[1]).decode("latin-1")
    if kind == _CHAR:
        return name, _text(parts, order, shape)
    if kind in _NUMBERS:
        return name, _array(parts, order, kind, int(flags[0]), shape)
    if kind == _CELL:
        return name, _filled(shape, [_inner(parts, order, depth) for _ in range(_checked_size(shape, 1, body))])
    if kind == _STRUCT:
        return name, _structs(parts, order, shape, body, depth)
    raise _MatError(f"its variable '{name}' is not numbers, text, cells or structs")


def _next(parts: Iterator[Element]) -> Element:
    element = next(parts, None)
    if element is None:
        raise _MatError("it is cut short")
    return element


def _inner(parts: Iterator[Element], order: str, depth: int) -> Any:
    kind, body = _next(parts)
    if kind != _MATRIX:
        raise _MatError(f"it has an element of type {kind} where a value should be")
    return _variable(body, order, depth + 1)[1]


def _numbers(element: Element, order: str, wanted: str = "") -> np.ndarray:
    kind, data = element
    if kind not in _STORED or (wanted and _STORED[kind] != wanted):
        raise _MatError(f"it has an element of type {kind} where numbers should be")
    stored = _STORED[kind]
    if len(data) % int(stored[1]):
        raise _MatError("it is damaged")
    return np.frombuffer(data, order + stored).astype(stored)


def _array(parts: Iterator[Element], order: str, kind: int, flags: int, shape: tuple[int, ...]) -> np.ndarray:
    """Return an array in its own type. MATLAB stores numbers in the smallest type that fits."""
    values = _numbers(_next(parts), order)
    with np.errstate(invalid="ignore", over="ignore"):
        values = values.astype(bool if flags & _LOGICAL else _NUMBERS[kind])
        if flags & _COMPLEX:
            imaginary = _numbers(_next(parts), order)
            if len(imaginary) != len(values):
                raise _MatError("it is damaged")
            numbers = np.empty(values.shape, np.complex128)  # not values + 1j * imaginary: 1j * inf has a NaN part
            numbers.real, numbers.imag = values, imaginary
            values = numbers
    if len(values) != math.prod(shape):
        raise _MatError(f"it has {len(values):,} numbers for an array of {math.prod(shape):,}")
    return values.reshape(shape, order="F")


def _text(parts: Iterator[Element], order: str, shape: tuple[int, ...]) -> str | list[str]:
    kind, data = _next(parts)
    if kind not in _TEXT:
        raise _MatError(f"it has an element of type {kind} where text should be")
    coding = _TEXT[kind] + ("-le" if order == "<" else "-be") * (_TEXT[kind] == "utf-16")
    text, rows = bytes(data).decode(coding), shape[0]
    if rows == 1 or not text:
        return text
    if len(text) != math.prod(shape):
        raise _MatError(f"it has {len(text):,} characters for an array of {math.prod(shape):,}")
    return [text[row::rows] for row in range(rows)]


def _structs(parts: Iterator[Element], order: str, shape: tuple[int, ...], body: memoryview, depth: int) -> np.ndarray:
    width = _numbers(_next(parts), order, "i4").tolist()
    kind, names = _next(parts)
    if len(width) != 1 or width[0] < 1 or kind not in _TEXT or len(names) % width[0]:
        raise _MatError("it has a struct with invalid field names")
    cells = [bytes(names[at : at + width[0]]) for at in range(0, len(names), width[0])]
    fields = [cell.split(b"\0")[0].decode("latin-1") for cell in cells]
    number = _checked_size(shape, len(fields), body)
    return _filled(shape, [{name: _inner(parts, order, depth) for name in fields} for _ in range(number)])


def _checked_size(shape: tuple[int, ...], each: int, body: memoryview) -> int:
    """Return the number of cells or structs; raise if the file is too small for their values of eight bytes or more."""
    number = math.prod(shape)
    if number * each * 8 > len(body) or (not each and number > MAX_EMPTY):
        raise _MatError(f"it is too small for its {number:,} values")
    return number


def _filled(shape: tuple[int, ...], values: list[Any]) -> np.ndarray:
    filled = np.empty(len(values), object)
    for row, value in enumerate(values):
        filled[row] = value
    return filled.reshape(shape, order="F")
