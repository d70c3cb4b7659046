"""The pre-training study: comparable costs, valid recipes, and a small run of all of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from bench import pretraining
from bench.pretraining import FAMILIES, LENGTHS, PRETRAINED, RATES, RECIPES, SCRATCH, main, network, summarise
from tests.data.folders import fill, image_bytes
from vitrail.config import RunConfig, merge, parse_overrides, read_recipe, validate
from vitrail.models.flops import count_macs
from vitrail.weights.bundle import read_card


def test_families_have_similar_costs() -> None:
    costs = [count_macs(network(family)) for family in FAMILIES.values()]
    assert max(costs) < 1.5 * min(costs)


@pytest.mark.parametrize(
    "optimizer", [changes for family in FAMILIES.values() for changes in family.optimizers.values()]
)
def test_every_run_is_valid(optimizer: tuple[str, ...]) -> None:
    assert LENGTHS.keys() == RATES.keys()
    for recipe, changes in (("pretraining", ()), *(("fine-tuning", length) for length in LENGTHS.values())):
        overrides = parse_overrides([*optimizer, *changes])
        validate(RunConfig, merge(read_recipe(str(RECIPES / f"{recipe}.toml")), overrides), recipe)


@pytest.mark.full
def test_small_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(FAMILIES["ViT"], shape={"depth": 1}, optimizers=pretraining.MUON)
    monkeypatch.setattr(pretraining, "FAMILIES", {"ViT": small})
    pixels = {f"{label}/{n}.png": image_bytes(80 * k + n, (16, 16)) for k, label in enumerate("ab") for n in range(16)}
    data, other = (
        fill(tmp_path / name, {f"{split}/{path}": image for split in ("train", name) for path, image in pixels.items()})
        for name in ("val", "test")
    )
    arguments = [str(data), "--to", f"flowers={other}", "--seeds", "0", "--out", str(tmp_path)]
    arguments += [
        "--set",
        "train.steps=1",
        "train.batch_size=8",
        "data.workers=0",
        "--parallel",
        "2",
        "--runs",
        str(tmp_path / "runs"),
    ]
    main([*arguments, "--families", "ViT"])
    path = tmp_path / "study-pretraining.json"
    results = json.loads(path.read_text())
    assert [len(results[part]) for part in ("tries", "pretraining", "transfer")] == [1, 1, 2]
    assert results["not_finished"] == [] and str(tmp_path) not in results["command"]
    pretrained, scratch = sorted(results["transfer"], key=lambda row: row["start"])
    assert (pretrained["start"], scratch["start"]) == (PRETRAINED, SCRATCH)
    assert pretrained["n"] == scratch["n"] == 32
    gain = results["summary"]["flowers"]["gains"]["ViT"]["difference"]
    assert gain == pretrained["top1"] - scratch["top1"]
    assert read_card(tmp_path / "runs" / pretrained["folder"] / "model.safetensors").source.startswith(
        "runs/pretraining-ViT-0"
    )
    monkeypatch.setattr(pretraining, "measure", lambda job: pytest.fail("a finished run was repeated"))
    main([*arguments, "--families", "ViT"])
    again = json.loads(path.read_text())
    assert again["tries"] == results["tries"] and again["pretraining"] == results["pretraining"]
    assert again["summary"] == results["summary"] and again["not_finished"] == []


def test_gains_match_student_t_with_pooled_deviation() -> None:
    values = {SCRATCH: [0.40, 0.42, 0.41], PRETRAINED: [0.64, 0.65, 0.66]}
    rows = [
        {"family": "ViT", "data": "flowers", "start": start, "seed": seed, "top1": top1}
        for start, accuracies in values.items()
        for seed, top1 in enumerate(accuracies)
    ]
    rows.append({"family": "ViT", "data": "flowers", "start": SCRATCH, "seed": 3, "error": "stopped"})
    gain = summarise({"families": {"ViT": {}}, "pretraining": [], "transfer": rows})["flowers"]["gains"]["ViT"]
    expected = stats.ttest_ind(values[PRETRAINED], values[SCRATCH]).confidence_interval(0.95)
    low, high = gain["difference"] - gain["half_width"], gain["difference"] + gain["half_width"]
    assert np.allclose([low, high], [expected.low, expected.high], rtol=1e-9)


def test_no_gain_without_both_starts() -> None:
    row = {"family": "ViT", "data": "flowers", "start": SCRATCH, "seed": 0, "top1": 0.4}
    summary = summarise({"families": {"ViT": {}}, "pretraining": [], "transfer": [row]})["flowers"]
    assert summary["gains"]["ViT"] == {} and summary["cells"]["ViT, scratch"]["mean"] == 0.4
