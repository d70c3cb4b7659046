"""Load the pickles of the Python version of CIFAR without running any code in them.

A pickle can only build lists, dicts, numbers and strings, and the stand-ins below that record what NumPy would build.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np

from vitrail.errors import UserError


class _Array:
    """Stands in for a NumPy array; keeps its state."""

    def __init__(self, *_: Any) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _DType:
    """Stands in for a NumPy dtype."""

    def __init__(self, code: Any, *_: Any) -> None:
        self.code = code

    def __setstate__(self, _: Any) -> None:
        """Ignore byte order and alignment: only single bytes are read."""


class _Bytes:
    """Stands in for _codecs.encode, which old pickles use for bytes."""

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
    ("numpy", "dtype"): _DType,
    ("_codecs", "encode"): _Bytes,
}


class _Refused(Exception):
    """A function that a pickle asks to call."""


# The unpickler in Python keeps its memo in a dict. The one in C would allocate memory for any index in the file.
class _Unpickler(pickle._Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _STAND_INS:
            raise _Refused(f"{module}.{name}")
        return _STAND_INS[module, name]


def load_pickle(data: bytes, where: str) -> dict[str, Any]:
    """Return the dict in a pickle; `where` is the file name for messages."""
    try:
        values = _Unpickler(io.BytesIO(data), encoding="bytes").load()
    except _Refused as function:
        raise UserError(f"{where} is not safe to open: the pickle calls '{function}'") from None
    except Exception:  # damaged or hostile pickles make the unpickler raise nearly every kind
        raise UserError(f"{where} is not a pickle of CIFAR, or it is damaged") from None
    if not isinstance(values, dict):
        raise UserError(f"{where} is not a pickle of CIFAR: it has no dict")
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
    """Return the array `key`, uint8 (n, width)."""
    state = getattr(values.get(key), "state", None)
    match state:
        case (_, (int(rows), int(columns)), _DType(code="u1" | b"u1" | "|u1" | b"|u1"), by_columns, bytes(data)):
            if columns == width and rows * columns == len(data) and not by_columns:
                return np.frombuffer(data, np.uint8).reshape(rows, columns)
    raise UserError(f"{where} has no array '{key}' with {width:,} bytes per image")


def _list(values: dict[str, Any], key: str, kinds: tuple[type, ...], what: str, where: str) -> list[Any]:
    items = values.get(key)
    if not isinstance(items, list) or not all(type(item) in kinds for item in items):
        raise UserError(f"{where} has no list of {what} '{key}'")
    return items
