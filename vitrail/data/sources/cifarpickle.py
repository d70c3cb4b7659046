"""Pickles of the Python version of CIFAR, opened so that they can hold its arrays, numbers and names, and run nothing.

What they ask NumPy to build is only written down here, by classes that stand in for NumPy's.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np

from vitrail.errors import UserError


class _Array:
    """In place of an array: what it would be built of."""

    def __init__(self, *_: Any) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Kind:
    """In place of a dtype."""

    def __init__(self, code: Any, *_: Any) -> None:
        self.code = code

    def __setstate__(self, _: Any) -> None:
        """Byte order and the like, which single bytes have no use for."""


class _Bytes:
    """In place of _codecs.encode, by which old pickles write bytes."""

    def __new__(cls, text: str, coding: str | bytes) -> Any:
        if coding not in ("latin1", b"latin1"):
            raise pickle.UnpicklingError
        return text.encode("latin-1")

    def __setstate__(self, _: Any) -> None:
        raise pickle.UnpicklingError


_STAND_INS = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Kind,
    ("_codecs", "encode"): _Bytes,
}


class _Refused(Exception):
    """What a pickle wanted."""


# The one written in Python: it keeps what it remembers in a dict, where the other takes memory for any index it reads.
class _Unpickler(pickle._Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _STAND_INS:
            raise _Refused(f"{module}.{name}")
        return _STAND_INS[module, name]


def plain_values(data: bytes, where: str) -> dict[str, Any]:
    """The dict that such a pickle holds."""
    try:
        values = _Unpickler(io.BytesIO(data), encoding="bytes").load()
    except _Refused as wanted:
        raise UserError(f"{where} wants to run '{wanted}' when opened, so it stays closed") from None
    except Exception:  # whatever a damaged or hostile pickle makes of the unpickler
        raise UserError(f"{where} is not a pickle of CIFAR, or it is damaged") from None
    if not isinstance(values, dict):
        raise UserError(f"{where} is not a pickle of CIFAR: it holds no dict")
    return {key.decode("latin-1") if isinstance(key, bytes) else key: value for key, value in values.items()}


def names_in(values: dict[str, Any], key: str, where: str) -> list[str]:
    names = _list(values, key, (bytes, str), "names", where)
    return [name.decode("utf-8", "replace") if isinstance(name, bytes) else name for name in names]


def numbers_in(values: dict[str, Any], key: str, where: str) -> list[int]:
    numbers = _list(values, key, (int,), "numbers", where)
    if min(numbers, default=0) < 0:
        raise UserError(f"{where} has a negative number in '{key}'")
    return numbers


def byte_rows(values: dict[str, Any], key: str, width: int, where: str) -> np.ndarray:
    """An array of bytes (n, width)."""
    state = getattr(values.get(key), "state", None)
    match state:
        case (_, (int(rows), int(columns)), _Kind(code="u1" | b"u1" | "|u1" | b"|u1"), by_columns, bytes(data)):
            if columns == width and rows * columns == len(data) and not by_columns:
                return np.frombuffer(data, np.uint8).reshape(rows, columns)
    raise UserError(f"{where} has no array of {width:,} bytes an image called '{key}'")


def _list(values: dict[str, Any], key: str, kinds: tuple[type, ...], what: str, where: str) -> list[Any]:
    found = values.get(key)
    if not isinstance(found, list) or not all(type(value) in kinds for value in found):
        raise UserError(f"{where} has no list of {what} called '{key}'")
    return found
