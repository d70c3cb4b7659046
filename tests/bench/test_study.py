"""The study runner: every cell is a valid run, one cell of each study trains, and the statistics are correct."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from bench.study import STUDIES, main, summary
from tests.data.folders import fill, image_bytes
from vitrail.config import RunConfig, merge, parse_overrides, read_recipe, validate


@pytest.mark.parametrize("name", STUDIES)
def test_every_cell_is_valid_and_unique(name: str) -> None:
    study = STUDIES[name]
    assert study.baseline in study.cells
    seen = set()
    for changes in study.cells.values():
        config = validate(
            RunConfig, merge(read_recipe(study.recipe), parse_overrides([*study.settings, *changes])), name
        )
        seen.add(config.model_dump_json())
    assert len(seen) == len(study.cells)


FIRST, *OTHERS = STUDIES


@pytest.mark.slow
@pytest.mark.parametrize("name", [FIRST, *(pytest.param(name, marks=pytest.mark.full) for name in OTHERS)])
def test_small_study(name: str, tmp_path: Path) -> None:
    pixels = {f"{label}/{n}.png": image_bytes(80 * k + n, (16, 16)) for k, label in enumerate("ab") for n in range(8)}
    data = fill(
        tmp_path / "data", {f"{split}/{path}": image for split in ("train", "val") for path, image in pixels.items()}
    )
    small = ["model.name=Ti/8", "model.image_size=[16,16]", "train.steps=1", "train.batch_size=8", "data.workers=0"]
    cell = STUDIES[name].baseline
    arguments = [name, str(data), "--seeds", "0", "--cells", cell, "--set", *small, "--out", str(tmp_path)]
    main([*arguments, "--runs", str(tmp_path / "runs")])
    results = json.loads((tmp_path / f"study-{name}.json").read_text())
    (run,) = results["cells"][cell]["runs"]
    assert run["n"] == 16 and 0 <= run["top1"] <= 1 and results["summary"]["top1"]["cells"][cell]["mean"] == run["top1"]
    assert str(tmp_path) not in results["command"]


def test_differences_match_student_t_with_pooled_deviation() -> None:
    values = {"a": [0.40, 0.42, 0.41], "b": [0.44, 0.45, 0.46]}
    cells = {cell: {"runs": [{"top1": value} for value in accuracies]} for cell, accuracies in values.items()}
    cells["b"]["runs"].append({"error": "stopped"})
    difference = summary(cells, "a")["top1"]["cells"]["b"]
    expected = stats.ttest_ind(values["b"], values["a"]).confidence_interval(0.95)
    low, high = difference["difference"] - difference["half_width"], difference["difference"] + difference["half_width"]
    assert np.allclose([low, high], [expected.low, expected.high], rtol=1e-9)
    assert difference["seeds"] == 3
