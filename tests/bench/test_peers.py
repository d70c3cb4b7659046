"""The benchmark's claim of equal maths: each peer with our weights gives our logits and gradients, and a peer that does
not is caught."""

from __future__ import annotations

import json

import pytest
import torch

from bench import model
from bench.__main__ import main, parser
from bench.harness import Effort
from bench.peers import PEERS, NotComparable, build_ours, build_peer, disagreement
from vitrail.config import ModelConfig

TINY = ModelConfig(width=48, depth=2, mlp_dim=96, heads=3, patch=(8, 8), image_size=(32, 32), num_classes=7, gelu="erf")


def pixels() -> torch.Tensor:
    return torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("gelu", ["erf", "tanh"])
@pytest.mark.parametrize("name", PEERS)
def test_peers_compute_the_same(name, gelu):
    ours = build_ours(TINY.model_copy(update={"gelu": gelu}))
    assert ours(pixels()).std() > 0.01  # not a comparison of zeros
    if (name, gelu) == ("torchvision", "tanh"):
        with pytest.raises(NotComparable, match="erf"):
            build_peer(name, ours)
        return
    logits, gradients = disagreement(ours, build_peer(name, ours), pixels())
    assert logits < 1e-5
    assert gradients < 1e-5


@pytest.mark.parametrize("name", PEERS)
def test_a_difference_is_caught(name):
    ours = build_ours(TINY)
    peer = build_peer(name, ours)
    with torch.no_grad():
        next(p for n, p in peer.named_parameters() if "norm" in n or "ln" in n).add_(0.01)
    logits, gradients = disagreement(ours, peer, pixels())
    assert max(logits, gradients) > model.TOLERANCE


def test_the_other_gelu_is_caught():
    peer = build_peer("timm", build_ours(TINY))
    other = build_ours(TINY.model_copy(update={"gelu": "tanh"}))  # the same seed, so the same weights
    logits, gradients = disagreement(other, peer, pixels())
    assert max(logits, gradients) > model.TOLERANCE


def test_a_library_that_is_missing_is_left_out_with_its_name(monkeypatch):
    def gone(config):
        raise ImportError("no module")

    monkeypatch.setitem(PEERS, "timm", gone)
    with pytest.raises(NotComparable, match="timm cannot be imported"):
        build_peer("timm", build_ours(TINY))


def test_the_whole_benchmark_writes_its_results(monkeypatch, tmp_path, capsys):
    effort = Effort(seconds=0.0, min_rounds=2, max_rounds=2, turn_seconds=0.0)
    monkeypatch.setattr(model.Settings, "effort", effort)
    small = TINY.model_copy(update={"num_classes": model.CLASSES, "image_size": (224, 224), "patch": (56, 56)})
    monkeypatch.setattr(model, "configure", lambda *choice, **options: small)
    arguments = ["model", "--quick", "--models", "Ti/16", "--control", "--out", str(tmp_path)]
    main(arguments)
    assert "timm" in capsys.readouterr().out
    kept = json.loads((tmp_path / "model-fp32-quick-cpu.json").read_text())
    assert {case["kind"] for case in kept["cases"]} == {"forward", "training"}
    for case in kept["cases"]:
        assert list(case["contestants"]) == ["ours", *PEERS, "control"]
    assert kept["agreement"]["Ti/16"]["timm"]["logits"] <= model.TOLERANCE


def test_options_of_the_command_are_the_settings():
    options = vars(parser().parse_args([]))
    assert set(options) - {"name"} == set(model.Settings.__dataclass_fields__)
