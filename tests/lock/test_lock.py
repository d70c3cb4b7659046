"""The lock: commands behave as in the recorded baseline, except for the changes in intended.toml."""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from tests.lock import world
from tests.lock.cases import CASES, Case
from tests.lock.observe import differences, keys_before

INTENDED = Path(__file__).with_name("intended.toml")
CHANGES = tomllib.loads(INTENDED.read_text()).get("change", [])
MACHINE, BEFORE = world.read_baseline()


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return world.prepare(tmp_path_factory.mktemp("lock") / "template")


def changed(name: str, now: dict[str, Any], intended: Sequence[dict[str, str]]) -> list[str]:
    """Differences from the baseline that are not intended."""
    found = differences(BEFORE[name], keys_before(now), exact=world.machine() == MACHINE)
    patterns = [change["path"] for change in intended if fnmatchcase(name, change["case"])]
    return [
        f"{path} {difference}"
        for path, difference in found
        if not any(fnmatchcase(path, pattern) for pattern in patterns)
    ]


@pytest.mark.parametrize(
    "case", [pytest.param(one, id=one.name, marks=() if one.fast else pytest.mark.slow) for one in CASES]
)
def test_nothing_changed(case: Case, template: Path, tmp_path: Path) -> None:
    assert case.name in BEFORE, "the case has no baseline: run python -m tests.lock.record with the reference code"
    now = world.observed(case, world.enter(template, tmp_path / "here"))
    differing = changed(case.name, now, CHANGES)
    assert not differing, "\n".join([f"{case.name}: {len(differing)} differences", *differing[:40]])


def test_every_case_of_the_baseline_is_run() -> None:
    assert sorted(BEFORE) == sorted(one.name for one in CASES)
    assert len(CASES) == len({one.name for one in CASES})


def test_every_intended_change_has_a_reason_and_a_case() -> None:
    for change in CHANGES:
        assert change.keys() == {"case", "path", "reason"} and len(change["reason"]) > 10, change
        assert any(fnmatchcase(name, change["case"]) for name in BEFORE), change


def test_the_lock_detects_differences() -> None:
    """An exit code, a file, a key, an integer, the seventh digit of a float and a bit of the weights."""
    now = copy.deepcopy(BEFORE["train"])
    now["codes"][0] = 1
    now["files"].remove("out/answers.csv")
    del now["out/config.toml"]["train.seed"]
    now["out/model.safetensors"]["vitrail.metrics.n"][0] += 1
    now["out/metrics.jsonl"]["[].loss"][0] *= 1 + 2e-6
    now["out/metrics.jsonl"]["[].lr"][1] *= 1 + 1e-9
    now["out/model.safetensors tensors"]["bits"] = "0"
    paths = {path for path, _ in differences(BEFORE["train"], now, exact=True)}
    assert paths == {
        "/codes",
        "/files",
        "/out/config.toml/train.seed",
        "/out/model.safetensors/vitrail.metrics.n",
        "/out/metrics.jsonl/[].loss",
        "/out/model.safetensors tensors/bits",
    }
    assert not list(differences(BEFORE["train"], BEFORE["train"], exact=True))
    elsewhere = {path for path, _ in differences(BEFORE["train"], now, exact=False)}
    assert elsewhere == paths - {"/out/metrics.jsonl/[].loss", "/out/model.safetensors tensors/bits"}


def test_intended_changes_are_allowed() -> None:
    now = copy.deepcopy(BEFORE["train"])
    now["codes"][0] = 1
    assert changed("train", now, []) == ["/codes 0 became 1"]
    assert changed("train", now, [{"case": "train", "path": "/codes", "reason": "an example"}]) == []
    assert changed("train", now, [{"case": "train-*", "path": "/codes", "reason": "an example"}]) != []
