"""The folder of a case, and what a case does there."""

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
from tests.lock.command import Ended, run

BASELINE = Path(__file__).parent / "baseline.json"
MADE = "tasks/"  # by a case itself, and many
UNREAD = ("checkpoints/",)  # listed, not compared: what is in them may change as long as old ones resume
REFERENCE = "train"  # the case that others are written down by what differs


def prepare(template: Path) -> Path:
    """All data and all that the old code made, once."""
    data.make(template)
    shutil.copytree(data.OLD, template, dirs_exist_ok=True)
    return template


def enter(template: Path, folder: Path) -> Path:
    """A copy for one case; the stopped run finds its images here."""
    shutil.copytree(template, folder)
    config = folder / "stopped" / "config.toml"
    config.write_text(re.sub(r'(?m)^path = ".*"$', f'path = "{folder / "photos"}"', config.read_text()))
    return folder


def machine() -> dict[str, str]:
    """Where bits can be the same."""
    return {
        "torch": torch.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "processor": platform.machine(),
    }


def observed(case: Case, folder: Path) -> dict[str, Any]:
    """Do it, and say what came of it."""
    before = observe.files(folder)
    ended = []
    for work in case.work:
        if isinstance(work, tuple):
            work = tuple(word.replace("{fixtures}", str(data.FIXTURES)) for word in work)
        ended.append(run(work, folder))
    after = observe.files(folder)
    new = [name for name, facts in after.items() if before.get(name) != facts and not name.startswith(MADE)]
    found: dict[str, Any] = {"codes": [one.code for one in ended], "errors": [kind(one) for one in ended]}
    found["files"] = [re.sub(r"step_\d+", "step_N", name) if name.startswith("stopped") else name for name in new]
    found["gone"] = sorted(before.keys() - after.keys())
    for number, (work, one) in enumerate(zip(case.work, ended, strict=True)):
        if one.out and (said := printed(work, one.out, case.numbers, folder)) is not None:
            found[f"out {number}"] = said
    for name in new:
        if any(part in name for part in (*UNREAD, *case.left_out)):
            continue
        if (contents := observe.document(folder / name, folder)) is not None:
            found[name] = contents
        if name.endswith((".safetensors", ".npz")) and not name.endswith("index.npz"):
            found[f"{name} tensors"] = _weights(folder / name, folder)
    missing = [word for word in case.mentions if word not in " ".join(ended[-1].err.split())]
    found["unmentioned"] = missing
    return found


def _weights(path: Path, folder: Path) -> dict[str, Any]:
    found = observe.tensors(path)
    ours = path.suffix == ".safetensors" and "vitrail" in observe.card(path)
    return observe.weights(observe.called_before(found) if ours else found, folder)


def kind(ended: Ended) -> str:
    """How a failure was said, but not in which words."""
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
    """Hashes of bits, apart from what other machines can be held to."""
    taken: dict[str, Any] = {}
    if isinstance(found, dict):
        if "bits" in found:
            taken[path] = found.pop("bits")
        for key, value in found.items():
            taken |= _take_bits(value, f"{path}.{key}")
    return taken


def sparse(found: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    """Documents that are much like those of the reference, as what differs: None stands for what is not there."""
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
    return {key: one for key, one in (like | value["but"]).items() if one is not None}


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
