"""Standard JSON without NaN and Infinity, which Python writes and reads but other parsers reject."""

from __future__ import annotations

import json
import math
from typing import Any

MAX_DEPTH = 64  # nested lists and objects; recursive functions walk the values


def dumps(values: object, **options: Any) -> str:
    """Serialize `values`, with non-finite numbers as null."""
    try:
        return json.dumps(values, allow_nan=False, **options)
    except ValueError:
        return json.dumps(_finite(values), allow_nan=False, **options)


def loads(text: str | bytes) -> Any:
    """Parse JSON. Raises ValueError for non-finite numbers, integers over 64 bits and too deep nesting too."""
    try:
        values = json.loads(text, parse_constant=_refuse, parse_float=_float, parse_int=_int)
    except RecursionError:
        raise ValueError("nested too deeply") from None
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


def _refuse(number: str) -> float:
    raise ValueError(f"{number} is not a valid JSON number")


def _float(digits: str) -> float:
    value = float(digits)
    return value if math.isfinite(value) else _refuse(digits)


def _int(digits: str) -> int:
    value = int(digits)
    return value if abs(value) < 2**63 else int(_refuse(digits[:20]))


def _check_depth(values: object) -> None:
    level = [values]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise ValueError("nested too deeply")
