"""The folder of a case, and the observation of a case."""

from __future__ import annotations

import json
import platform
import re
import shutil
from pathlib import Path
from typing import Any

import torch

from tests.lock import data, observe
from tests.lock.cases import Case
from tests.lock.command import Finished, run

BASELINE = Path(__file__).parent / "baseline.json"
MADE = "tasks/"  # written by a case itself: many files
UNREAD = ("checkpoints/",)  # listed but not compared: their contents may change as long as old ones can be resumed
REFERENCE = "train"  # the baseline stores other cases as differences from this one


def prepare(template: Path) -> Path:
    """Write the data and copy the files of the old code, once for all cases."""
    data.make(template)
    shutil.copytree(data.OLD, template, dirs_exist_ok=True)
    return template


def enter(template: Path, folder: Path) -> Path:
    """Copy the template for one case, and set the data path of the stopped run."""
    shutil.copytree(template, folder)
    config = folder / "stopped" / "config.toml"
    config.write_text(re.sub(r'(?m)^path = ".*"$', f'path = "{folder / "photos"}"', config.read_text()))
    return folder


def machine() -> dict[str, str]:
    """Facts on which bit-identical results depend."""
    return {
        "torch": torch.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "processor": platform.machine(),
    }


def observed(case: Case, folder: Path) -> dict[str, Any]:
    """Run a case and return its exit codes, errors, outputs and files."""
    before = observe.files(folder)
    finished = []
    for work in case.work:
        if isinstance(work, tuple):
            work = tuple(argument.replace("{fixtures}", str(data.FIXTURES)) for argument in work)
        finished.append(run(work, folder))
    after = observe.files(folder)
    new = [name for name, facts in after.items() if before.get(name) != facts and not name.startswith(MADE)]
    result: dict[str, Any] = {"codes": [run.code for run in finished], "errors": [kind(run) for run in finished]}
    result["files"] = [re.sub(r"step_\d+", "step_N", name) if name.startswith("stopped") else name for name in new]
    result["gone"] = sorted(before.keys() - after.keys())
    for number, (work, ended) in enumerate(zip(case.work, finished, strict=True)):
        if ended.out and (output := printed(work, ended.out, case.numbers, folder)) is not None:
            result[f"out {number}"] = output
    for name in new:
        if any(part in name for part in (*UNREAD, *case.left_out)):
            continue
        if (contents := observe.document(folder / name, folder)) is not None:
            result[name] = contents
        if name.endswith((".safetensors", ".npz")) and not name.endswith("index.npz"):
            result[f"{name} tensors"] = _weights(folder / name, folder)
    error = " ".join(finished[-1].err.split())
    result["unmentioned"] = [text for text in case.mentions if text not in error]
    return result


def _weights(path: Path, folder: Path) -> dict[str, Any]:
    tensors = observe.tensors(path)
    has_card = path.suffix == ".safetensors" and "vitrail" in observe.card(path)
    return observe.weights(observe.called_before(tensors) if has_card else tensors, folder)


def kind(ended: Finished) -> str:
    """The kind of an error, without its wording."""
    if "Traceback" in ended.err:
        return "traceback"
    if "error:" in ended.err:
        return "sentence"
    return "usage" if ended.code else ""


def printed(work: Any, text: str, numbers: bool, folder: Path) -> Any:
    if callable(work) or "--json" in work:
        try:
            found = json.loads(text)
        except ValueError:
            found = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
        if callable(work):
            bits = _take_bits(found)
            return {**observe.flat(found, folder), **({"bits": bits} if bits else {})}
        return observe.flat(found, folder)
    if "--csv" in work:
        return observe.table(text, folder)
    if "--help" in work:
        return dict.fromkeys(sorted(set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text))), "")
    return observe.flat(observe.numbers_in(text), folder) if numbers else None


def _take_bits(found: Any, path: str = "") -> dict[str, Any]:
    """Remove and return checksums, which are not comparable between machines."""
    taken: dict[str, Any] = {}
    if isinstance(found, dict):
        if "bits" in found:
            taken[path] = found.pop("bits")
        for key, value in found.items():
            taken |= _take_bits(value, f"{path}.{key}")
    return taken


def sparse(found: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    """Store documents that are similar to those of the reference as differences; None means a missing key."""
    return {key: _sparse(value, _like(key, reference)) for key, value in found.items()}


def full(kept: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    return {key: _full(value, _like(key, reference)) for key, value in kept.items()}


def _like(key: str, reference: dict[str, Any]) -> dict[str, Any] | None:
    same = reference.get(f"out/{key.rsplit('/')[-1]}")
    return same if isinstance(same, dict) else None


def _sparse(value: Any, like: dict[str, Any] | None) -> Any:
    if like is None or not isinstance(value, dict):
        return value
    changed = {key: value.get(key) for key in sorted(value.keys() | like.keys()) if value.get(key) != like.get(key)}
    return {"but": changed} if len(changed) < len(value) else value


def _full(value: Any, like: dict[str, Any] | None) -> Any:
    if like is None or not isinstance(value, dict) or value.keys() != {"but"}:
        return value
    return {key: item for key, item in (like | value["but"]).items() if item is not None}


def write_baseline(cases: dict[str, dict[str, Any]]) -> None:
    reference = cases[REFERENCE]
    rows = {name: sparse(found, {} if name == REFERENCE else reference) for name, found in sorted(cases.items())}
    text = ",\n".join(f"{json.dumps(name)}: {json.dumps(row, separators=(',', ':'))}" for name, row in rows.items())
    BASELINE.write_text(f'{{"machine": {json.dumps(machine())},\n"cases": {{\n{text}\n}}}}\n')


def read_baseline() -> tuple[dict[str, str], dict[str, dict[str, Any]]]:
    stored = json.loads(BASELINE.read_text())
    reference = stored["cases"][REFERENCE]
    cases = {name: full(row, {} if name == REFERENCE else reference) for name, row in stored["cases"].items()}
    return stored["machine"], cases
