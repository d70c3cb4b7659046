"""JSON that every reader takes: it has no NaN and no Infinity, neither where it is written nor where it is read."""

from __future__ import annotations

import json
import math
from typing import Any

DEEPEST = 64  # lists and objects within each other; what is read is walked by functions that call themselves


def dumps(values: object, **options: Any) -> str:
    """Text of plain values; a number that is not finite, for which JSON has no word, is null."""
    try:
        return json.dumps(values, allow_nan=False, **options)
    except ValueError:
        return json.dumps(_finite(values), allow_nan=False, **options)


def loads(text: str | bytes) -> Any:
    """Plain values of text, or ValueError: also for numbers that are not finite, for integers of more than 64 bits and
    for what is nested too deep."""
    try:
        values = json.loads(text, parse_constant=_refuse, parse_float=_float, parse_int=_int)
    except RecursionError:
        raise ValueError("nested too deep") from None
    _check_depth(values)
    return values


def _finite(values: object) -> object:
    match values:
        case dict():
            return {key: _finite(value) for key, value in values.items()}
        case list() | tuple():
            return [_finite(value) for value in values]
        case float():
            return values if math.isfinite(values) else None
    return values


def _refuse(word: str) -> float:
    raise ValueError(f"{word} is no number of JSON")


def _float(digits: str) -> float:
    value = float(digits)
    return value if math.isfinite(value) else _refuse(digits)


def _int(digits: str) -> int:
    value = int(digits)
    return value if abs(value) < 2**63 else int(_refuse(digits[:20]))


def _check_depth(values: object) -> None:
    level = [values]
    for _ in range(DEEPEST):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise ValueError("nested too deep")
