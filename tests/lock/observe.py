"""What a case left behind, as plain values that two commits can be compared by."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import re
import struct
import tomllib
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

# What differs from run to run or from machine to machine, by the last word of its path.
VOLATILE = {
    "seconds",
    "time",
    "times",
    "date",
    "created",
    "created_with",
    "environment",
    "version",
    "images_per_second",
    "data_wait",
    "tflops",
    "memory",
    "free",
    "began",
    "checksums",
    "sha256",
    "digest",
}
INTENDED = tomllib.loads(Path(__file__).with_name("intended.toml").read_text())
RENAMED, KEYS, VALUES = INTENDED["rename"], INTENDED["key"], INTENDED["value"]
MARK = "patch_embed.proj.weight"  # of our Vision Transformers
SHOWN = 6  # values of one path that are kept as they are; of more: how many, mean, deviation, first and last
FIGURES = 9
FORMER = "still called"  # marks what has a former name


def flat(value: Any, folder: Path) -> dict[str, Any]:
    """Every leaf by its path, in which numbers of lists are `[]`; the values of one path together."""
    found: dict[str, list[Any]] = {}
    _walk(value, "", found, folder)
    return {path: _short(values) for path, values in sorted(found.items())}


def _walk(value: Any, path: str, found: dict[str, list[Any]], folder: Path) -> None:
    if re.split(r"[./]", path)[-1] in VOLATILE:
        found[path] = ["~"]
    elif isinstance(value, dict):
        for key, one in value.items():
            _walk(one, f"{path}.{key}" if path else str(key), found, folder)
        if not value:
            found.setdefault(path, []).append("{}")
    elif isinstance(value, list | tuple):
        for one in value:
            _walk(one, f"{path}[]", found, folder)
        if not value:
            found.setdefault(path, []).append("[]")
    else:
        found.setdefault(path, []).append(_leaf(value, folder))


def _leaf(value: Any, folder: Path) -> Any:
    if isinstance(value, bool) or value is None or isinstance(value, int):
        return value
    if isinstance(value, float):
        return float(f"{value:.{FIGURES}g}") if math.isfinite(value) else str(value)
    text = str(value).replace(str(folder), "HERE")
    return text if re.fullmatch(r"[^\s]{1,60}", text) else "words"  # sentences may be put better


def _short(values: list[Any]) -> Any:
    if len(values) <= SHOWN:
        return values
    if all(isinstance(one, int | float) and not isinstance(one, bool) for one in values):
        numbers = np.array(values, float)
        rounded = [float(f"{one:.{FIGURES}g}") for one in (numbers.mean(), numbers.std())]
        return {"n": len(values), "mean": rounded[0], "deviation": rounded[1], "ends": [values[0], values[-1]]}
    kinds = sorted({str(one) for one in values})
    digest = hashlib.sha256("\n".join(map(str, values)).encode()).hexdigest()[:12]
    return {"n": len(values), "kinds": kinds[:SHOWN], "sha": digest}


def document(path: Path, folder: Path) -> dict[str, Any] | None:
    """The contents of a file that a program may read."""
    if path.suffix == ".json":
        return flat(json.loads(path.read_text()), folder)
    if path.suffix == ".jsonl":
        return flat([json.loads(line) for line in path.read_text().splitlines()], folder)
    if path.suffix == ".toml":
        return flat(tomllib.loads(path.read_text()), folder)
    if path.suffix == ".csv":
        return table(path.read_text(), folder)
    if path.suffix == ".safetensors":
        return flat(card(path), folder)
    if path.suffix == ".parquet":
        return _parquet(path)
    return None


def table(text: str, folder: Path) -> dict[str, Any]:
    rows = list(csv.DictReader(io.StringIO(text)))
    return flat([{key: number(cell) for key, cell in row.items() if key is not None} for row in rows], folder)


def number(cell: str) -> Any:
    for kind in (int, float):
        try:
            return kind(cell)
        except (TypeError, ValueError):
            continue
    return cell


def _parquet(path: Path) -> dict[str, Any]:
    import pyarrow.parquet as parquet

    rows = parquet.read_table(path)
    bits = hashlib.sha256(repr([rows.column(name).to_pylist() for name in sorted(rows.column_names)]).encode())
    return {"columns": sorted(rows.column_names), "rows": rows.num_rows, "bits": bits.hexdigest()[:16]}


def header(path: Path) -> tuple[dict[str, Any], bytes]:
    """Of a safetensors file, as its format has it: eight bytes of length, JSON, and the numbers."""
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        return json.loads(file.read(length)), file.read()


def card(path: Path) -> dict[str, Any]:
    """What a weights file says of itself; JSON within its texts counts as values."""
    found = {}
    for key, text in header(path)[0].get("__metadata__", {}).items():
        try:
            found[key] = json.loads(text)
        except ValueError:
            found[key] = text
    return found


def tensors(path: Path) -> dict[str, np.ndarray]:
    if path.suffix == ".npz":
        with np.load(path) as file:
            return {name: file[name] for name in sorted(file.files)}
    names, numbers = header(path)
    names.pop("__metadata__", None)
    kinds = {"F32": "<f4", "F16": "<f2", "F64": "<f8", "U8": "u1", "I64": "<i8", "I32": "<i4", "U32": "<u4"}
    found = {}
    for name, facts in sorted(names.items()):
        start, end = facts["data_offsets"]
        kind = kinds.get(facts["dtype"], "u1")
        shape = facts["shape"] if facts["dtype"] in kinds else (-1,)
        found[name] = np.frombuffer(numbers[start:end], kind).reshape(shape)
    return found


def called_before(tensors: dict[str, Any]) -> dict[str, Any]:
    """Tensors of our networks by the names that they had in the baseline; others as they are. Names alone: shapes and
    bits are compared as ever."""
    if MARK not in tensors:
        return tensors
    found = {}
    for name, tensor in tensors.items():
        for rename in RENAMED:
            name = re.sub(rename["new"], rename["old"], name)
        found[name] = tensor
    assert len(found) == len(tensors)
    return dict(sorted(found.items()))


def keys_before(found: dict[str, Any], document: str = "") -> dict[str, Any]:
    """What a case left, with the keys, files and values of settings called as they were in the baseline. A key, file or
    value that still has its former name is marked: it differs from the baseline, too."""
    named: dict[str, Any] = {}
    for key, value in found.items():
        before = _key_before(key, document)
        if isinstance(value, dict):
            value = keys_before(value, document or key)
        elif isinstance(value, list):
            texts = key in ("files", "gone")
            texts_before = _key_before if key == "files" else _text_before
            value = [texts_before(one, "") if texts else _value_before(before, one) for one in value]
            value = sorted(value) if texts else value
        assert before not in named, f"{key}: another key becomes {before}, too"
        named[before] = value
    return named


def _key_before(key: str, document: str) -> str:
    former = any(re.search(_whole_words(one["old"]), key) for one in _keys_of(document))
    return f"{FORMER} {key}" if former else _text_before(key, document)


def _whole_words(text: str) -> str:
    return rf"(?<!\w){re.escape(text)}" + (r"\b" if text[-1].isalnum() else "")


def _text_before(key: str, document: str) -> str:
    for one in _keys_of(document):
        key = re.sub(one["new"], one["old"], key)
    return key


def _keys_of(document: str) -> list[dict[str, str]]:
    return [one for one in KEYS if fnmatchcase(document, one.get("within", "*"))]


def _value_before(key: str, value: Any) -> Any:
    mine = [one for one in VALUES if re.search(one["key"], key)]
    for one in mine:
        if value == one["new"] and type(value) is type(one["new"]):
            return one["old"]
    former = any(value == one["old"] and type(value) is type(one["old"]) for one in mine)
    return f"{FORMER} {value}" if former else value


def weights(named: dict[str, np.ndarray], folder: Path) -> dict[str, Any]:
    """All bits, and a few numbers for machines that round otherwise."""
    bits = hashlib.sha256()
    about: dict[str, Any] = {}
    for name, values in named.items():
        bits.update(f"{name} {values.dtype} {values.shape}".encode() + np.ascontiguousarray(values).tobytes())
        place = about.setdefault(re.sub(r"(?<=[._/])\d+(?=[._/])", "*", name), [])
        if values.dtype.kind == "f":
            place.append([*values.shape, float(values.mean(dtype=float)), float(values.std(dtype=float))])
        else:
            place.append([*values.shape])
    return {"bits": bits.hexdigest()[:32], "about": flat(about, folder)}


def numbers_in(text: str) -> list[float]:
    """Without those that a clock decides, and without paths: the folder of a case has another name each time."""
    text = re.sub(r"[\d.,]+(?:e-?\d+)? (?:images/s|TFLOP/s|s\b)|data wait \d+ %|\S*/\S*", "", text)
    return [float(one.replace(",", "")) for one in re.findall(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?", text)]


def files(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file with what changes when it is written."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink():
            found[str(path.relative_to(folder))] = (path.stat().st_mtime_ns, path.stat().st_ino)
    return found


def differences(then: Any, now: Any, exact: bool, path: str = "") -> Iterable[tuple[str, str]]:
    """(path, what differs). Not exact: numbers and bits of another machine."""
    if isinstance(then, dict) and isinstance(now, dict):
        for key in sorted(then.keys() | now.keys()):
            place = f"{path}/{key}"
            if key not in now:
                yield place, "is gone"
            elif key not in then:
                yield place, "is new"
            elif key != "bits" or exact:
                yield from differences(then[key], now[key], exact, place)
    elif isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
        for one, other in zip(then, now, strict=True):
            yield from differences(one, other, exact, path)
    elif isinstance(then, float) or isinstance(now, float):
        numbers = all(isinstance(one, int | float) and not isinstance(one, bool) for one in (then, now))
        tolerance = 1e-6 if exact else 1e-4
        if not numbers or not math.isclose(then, now, rel_tol=tolerance, abs_tol=tolerance / 10):
            yield path, f"{then} became {now}"
    elif then != now:
        yield path, f"{then} became {now}"
