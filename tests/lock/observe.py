"""The files and outputs of a case as plain values, to compare two versions of the code."""

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

# Keys whose values differ from run to run or from machine to machine.
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
MARK = "patch_embed.proj.weight"  # a tensor of vitrail's Vision Transformers
SHOWN = 6  # up to this many values of a path are stored; of more: count, mean, deviation, first and last
FIGURES = 9


def flat(value: Any, folder: Path) -> dict[str, Any]:
    """All leaves of a nested value by path. List indices are `[]`, so a path can have multiple values."""
    leaves: dict[str, list[Any]] = {}
    _walk(value, "", leaves, folder)
    return {path: _short(values) for path, values in sorted(leaves.items())}


def _walk(value: Any, path: str, leaves: dict[str, list[Any]], folder: Path) -> None:
    if re.split(r"[./]", path)[-1] in VOLATILE:
        leaves[path] = ["~"]
    elif isinstance(value, dict):
        for key, item in value.items():
            _walk(item, f"{path}.{key}" if path else str(key), leaves, folder)
        if not value:
            leaves.setdefault(path, []).append("{}")
    elif isinstance(value, list | tuple):
        for item in value:
            _walk(item, f"{path}[]", leaves, folder)
        if not value:
            leaves.setdefault(path, []).append("[]")
    else:
        leaves.setdefault(path, []).append(_leaf(value, folder))


def _leaf(value: Any, folder: Path) -> Any:
    if isinstance(value, bool) or value is None or isinstance(value, int):
        return value
    if isinstance(value, float):
        return float(f"{value:.{FIGURES}g}") if math.isfinite(value) else str(value)
    text = str(value).replace(str(folder), "HERE")
    return text if re.fullmatch(r"[^\s]{1,60}", text) else "words"  # the wording of sentences may change


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
    """The contents of a machine-readable file; None for other files."""
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
    """Header and data of a safetensors file: eight bytes of length, JSON, data."""
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        return json.loads(file.read(length)), file.read()


def card(path: Path) -> dict[str, Any]:
    """The metadata of a weights file, with JSON texts parsed."""
    metadata = {}
    for key, text in header(path)[0].get("__metadata__", {}).items():
        try:
            metadata[key] = json.loads(text)
        except ValueError:
            metadata[key] = text
    return metadata


def tensors(path: Path) -> dict[str, np.ndarray]:
    if path.suffix == ".npz":
        with np.load(path) as file:
            return {name: file[name] for name in sorted(file.files)}
    names, numbers = header(path)
    names.pop("__metadata__", None)
    kinds = {"F32": "<f4", "F16": "<f2", "F64": "<f8", "U8": "u1", "I64": "<i8", "I32": "<i4", "U32": "<u4"}
    arrays = {}
    for name, facts in sorted(names.items()):
        start, end = facts["data_offsets"]
        kind = kinds.get(facts["dtype"], "u1")
        shape = facts["shape"] if facts["dtype"] in kinds else (-1,)
        arrays[name] = np.frombuffer(numbers[start:end], kind).reshape(shape)
    return arrays


def called_before(tensors: dict[str, Any]) -> dict[str, Any]:
    """Rename tensors of vitrail's networks to their names in the baseline. All values stay unchanged."""
    if MARK not in tensors:
        return tensors
    renamed = {}
    for name, tensor in tensors.items():
        for rename in RENAMED:
            name = re.sub(rename["new"], rename["old"], name)
        renamed[name] = tensor
    assert len(renamed) == len(tensors)
    return dict(sorted(renamed.items()))


def keys_before(observed: dict[str, Any], document: str = "") -> dict[str, Any]:
    """Rename keys, files and values of settings in the observation of a case to their names in the baseline."""
    named: dict[str, Any] = {}
    for key, value in observed.items():
        before = _key_before(key, document)
        if isinstance(value, dict):
            value = keys_before(value, document or key)
        elif isinstance(value, list):
            texts = key in ("files", "gone")
            value = [_key_before(item, "") if texts else _value_before(before, item) for item in value]
            value = sorted(value) if texts else value
        assert before not in named, f"{key}: two keys are renamed to {before}"
        named[before] = value
    return named


def _key_before(key: str, document: str) -> str:
    for rename in KEYS:
        if fnmatchcase(document, rename.get("within", "*")):
            key = re.sub(rename["new"], rename["old"], key)
    return key


def _value_before(key: str, value: Any) -> Any:
    for rename in VALUES:
        if re.search(rename["key"], key) and value == rename["new"] and type(value) is type(rename["new"]):
            return rename["old"]
    return value


def weights(named: dict[str, np.ndarray], folder: Path) -> dict[str, Any]:
    """A checksum, and statistics of the tensors for machines with different rounding."""
    bits = hashlib.sha256()
    about: dict[str, Any] = {}
    for name, values in named.items():
        bits.update(f"{name} {values.dtype} {values.shape}".encode() + np.ascontiguousarray(values).tobytes())
        rows = about.setdefault(re.sub(r"(?<=[._/])\d+(?=[._/])", "*", name), [])
        if values.dtype.kind == "f":
            rows.append([*values.shape, float(values.mean(dtype=float)), float(values.std(dtype=float))])
        else:
            rows.append([*values.shape])
    return {"bits": bits.hexdigest()[:32], "about": flat(about, folder)}


def numbers_in(text: str) -> list[float]:
    """The numbers in a text, without times and paths: the folder of a case has a different name each time."""
    text = re.sub(r"[\d.,]+(?:e-?\d+)? (?:images/s|TFLOP/s|s\b)|data wait \d+ %|\S*/\S*", "", text)
    return [float(one.replace(",", "")) for one in re.findall(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?", text)]


def files(folder: Path) -> dict[str, tuple[int, int]]:
    """Modification time and inode of all files, which change when a file is written."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.stat().st_ino)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }


def differences(then: Any, now: Any, exact: bool, path: str = "") -> Iterable[tuple[str, str]]:
    """Yield (path, difference). If not `exact`, compare with the tolerance for another machine, without checksums."""
    if isinstance(then, dict) and isinstance(now, dict):
        for key in sorted(then.keys() | now.keys()):
            item = f"{path}/{key}"
            if key not in now:
                yield item, "is gone"
            elif key not in then:
                yield item, "is new"
            elif key != "bits" or exact:
                yield from differences(then[key], now[key], exact, item)
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
