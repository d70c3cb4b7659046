"""Standard JSON, written in one module."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from vitrail import strict_json

PACKAGE = Path(__file__).parents[1] / "vitrail"
# Modules whose JSON only vitrail reads, or is hashed.
EXCEPTIONS = {
    "strict_json.py",
    "data/pack.py",
    "training/checkpoint.py",
    "weights/bundle.py",
    "weights/checksum.py",
    "weights/safetensors_file.py",
    "workflows/fit.py",
}


def test_non_finite_numbers_are_null():
    values = {
        "a": float("nan"),
        "b": [1.5, -float("inf"), (float("inf"), "NaN")],
        "c": {"d": np.float64("nan"), 3: None},
    }
    text = strict_json.dumps(values, indent=1)
    assert json.loads(text, parse_constant=pytest.fail) == {
        "a": None, "b": [1.5, None, [None, "NaN"]], "c": {"d": None, "3": None}
    }  # fmt: skip
    assert strict_json.dumps([1, "é"], ensure_ascii=False) == '[1, "é"]'


@pytest.mark.parametrize(
    "text", ["NaN", "[Infinity]", "-Infinity", "1e999", "[" * 5_000 + "]" * 5_000, "9" * 30, "", "{"]
)
def test_invalid_json_is_rejected(text):
    with pytest.raises(ValueError):
        strict_json.loads(text)


def test_no_other_module_writes_json():
    writers = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if re.search(r"\bjson\.dumps?\(", path.read_text().replace("strict_json.", ""))
    }
    assert writers <= EXCEPTIONS
