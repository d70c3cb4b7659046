"""Pickles of the Python version of CIFAR, opened so that they can hold its arrays, numbers and names, and run nothing.

What they ask NumPy to build is only written down here, by classes that stand in for NumPy's.
"""

from __future__ import annotations

import io
import math
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


class Values:
    """The top of such a pickle, a dict."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self._values, self._where = values, where

    def _list(self, key: str, kinds: tuple[type, ...], what: str) -> list[Any]:
        values = self._values.get(key)
        if not isinstance(values, list) or not all(type(value) in kinds for value in values):
            raise UserError(f"{self._where} has no list of {what} called '{key}'")
        return values

    def texts(self, key: str) -> list[str]:
        values = self._list(key, (bytes, str), "names")
        return [value.decode("utf-8", "replace") if isinstance(value, bytes) else value for value in values]

    def numbers(self, key: str) -> list[int]:
        values = self._list(key, (int,), "numbers")
        if min(values, default=0) < 0:
            raise UserError(f"{self._where} has a negative number in '{key}'")
        return values

    def bytes(self, key: str, width: int) -> np.ndarray:
        """An array of bytes (n, width)."""
        array = self._values.get(key)
        state = array.state if isinstance(array, _Array) else None
        if isinstance(state, tuple) and len(state) == 5:
            _, shape, kind, by_columns, data = state
            good = (
                isinstance(kind, _Kind)
                and kind.code in ("u1", b"u1", "|u1", b"|u1")
                and isinstance(data, bytes)
                and isinstance(shape, tuple)
                and len(shape) == 2
                and all(type(size) is int and size >= 0 for size in shape)
                and shape[1] == width
                and math.prod(shape) == len(data)
                and not by_columns
            )
            if good:
                return np.frombuffer(data, np.uint8).reshape(shape)
        raise UserError(f"{self._where} has no array of {width:,} bytes an image called '{key}'")


def plain_values(data: bytes, where: str) -> Values:
    try:
        values = _Unpickler(io.BytesIO(data), encoding="bytes").load()
    except _Refused as wanted:
        raise UserError(f"{where} wants to run '{wanted}' when opened, so it stays closed") from None
    except Exception:  # whatever a damaged or hostile pickle makes of the unpickler
        raise UserError(f"{where} is not a pickle of CIFAR, or it is damaged") from None
    if not isinstance(values, dict):
        raise UserError(f"{where} is not a pickle of CIFAR: it holds no dict")
    names = {key.decode("latin-1") if isinstance(key, bytes) else key: value for key, value in values.items()}
    return Values(names, where)
