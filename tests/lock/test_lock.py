"""The lock: what the commands did before the package was rebuilt, they do now, but for what intended.toml lists."""

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
    """What differs from before and is not intended."""
    found = differences(BEFORE[name], now, exact=world.machine() == MACHINE)
    meant = [one for one in intended if fnmatchcase(name, one["case"])]
    return [f"{path} {what}" for path, what in found if not any(_is_meant(path, what, one) for one in meant)]


def _is_meant(path: str, what: str, change: dict[str, str]) -> bool:
    return fnmatchcase(path, change["path"]) and fnmatchcase(what, change.get("what", "*"))


@pytest.mark.parametrize(
    "case", [pytest.param(one, id=one.name, marks=() if one.fast else pytest.mark.slow) for one in CASES]
)
def test_nothing_changed(case: Case, template: Path, tmp_path: Path) -> None:
    assert case.name in BEFORE, "a case without a baseline: python -m tests.lock.record, by the code of before"
    now = world.observed(case, world.enter(template, tmp_path / "here"))
    differing = changed(case.name, keys_before(now), CHANGES)
    assert not differing, "\n".join([f"{case.name}: {len(differing)} things differ", *differing[:40]])


def test_every_case_of_the_baseline_is_run() -> None:
    assert sorted(BEFORE) == sorted(one.name for one in CASES)
    assert len(CASES) == len({one.name for one in CASES})


def test_every_intended_change_has_a_reason_and_a_case() -> None:
    for change in CHANGES:
        assert change.keys() - {"what"} == {"case", "path", "reason"} and len(change["reason"]) > 10, change
        assert any(fnmatchcase(name, change["case"]) for name in BEFORE), change


def test_the_lock_sees_what_differs() -> None:
    """An exit code, a file, a key, an integer, a float in its seventh digit and a bit of the weights."""
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


def test_an_intended_change_is_let_pass() -> None:
    now = copy.deepcopy(BEFORE["train"])
    now["codes"][0] = 1
    assert changed("train", now, []) == ["/codes 0 became 1"]
    assert changed("train", now, [{"case": "train", "path": "/codes", "reason": "an example"}]) == []
    assert changed("train", now, [{"case": "train-*", "path": "/codes", "reason": "an example"}]) != []
    assert changed("train", now, [{"case": "train", "path": "/codes", "what": "is new", "reason": "an example"}]) != []


def test_what_is_still_called_as_before_differs() -> None:
    """A name that was not changed, or was changed back."""
    now = {
        "files": ["out/answers.csv", "out/predictions.csv"],
        "out/config.toml": {"data.val": [False], "model.start": ["found"], "optimizer.clip_grad_norm": [1.0]},
        "out/model.safetensors": {"vitrail.several": [False], "vitrail.answering.threshold": [0.5]},
    }
    assert keys_before(now) == {
        "files": ["out/answers.csv", "still called out/answers.csv"],
        "out/config.toml": {
            "still called data.val": ["watch"],
            "model.start": ["still called found"],
            "optimizer.clip": [1.0],
        },
        "out/model.safetensors": {
            "still called vitrail.several": [False],
            "still called vitrail.answering.threshold": [0.5],
        },
    }
    right = {"out/model.safetensors": {"vitrail.task": ["classification"], "vitrail.postprocess.threshold": [0.5]}}
    assert keys_before(right) == {
        "out/model.safetensors": {"vitrail.several": [False], "vitrail.answering.threshold": [0.5]}
    }
