"""Each library computes the same logits and gradients with the same weights; a difference is detected."""

from __future__ import annotations

import json

import pytest
import torch

from bench import model
from bench.__main__ import main, parser
from bench.harness import Effort
from bench.peers import PEERS, NotComparable, build_ours, build_peer, disagreement
from bench.variants import CHANGES, TIMM_CONSTANTS, variant
from vitrail.config import ModelConfig, ResNetConfig, StemConfig

pytestmark = pytest.mark.slow  # networks of other libraries are built

TINY = ModelConfig(width=48, depth=2, mlp_dim=96, heads=3, patch=(8, 8), image_size=(32, 32), num_classes=7, gelu="erf")
STEM = StemConfig(width=32, **TIMM_CONSTANTS)
RESNET = ResNetConfig(kind="resnet", blocks=(1, 2), width=32, image_size=(32, 32), num_classes=7, **TIMM_CONSTANTS)
VARIANTS = {
    "gap": TINY.model_copy(update={"pool": "gap", "class_token": False}),
    "gap over a class token, norm after it": TINY.model_copy(update={"pool": "gap", "norm": "after_pool"}),
    "map": TINY.model_copy(update={"pool": "map", "class_token": False}),
    "registers": TINY.model_copy(update={"registers": 4, "prefix_positions": False}),
    "layerscale": TINY.model_copy(update={"layer_scale": 1e-5}),
    "root alone": TINY.model_copy(update={"patch": (2, 2), "stem": STEM}),
    "hybrid": TINY.model_copy(update={"patch": (1, 1), "stem": STEM.model_copy(update={"blocks": (1, 2)})}),
    "resnet": RESNET,
    "resnet of big_vision": RESNET.model_copy(update={"pool_padding": "none"}),
}


def pixels() -> torch.Tensor:
    return torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def differ(logits: float, gradients: float) -> bool:
    return logits > model.LOGITS_TOLERANCE or gradients > model.GRADIENTS_TOLERANCE


@pytest.mark.parametrize("gelu", ["erf", "tanh"])
@pytest.mark.parametrize("name", PEERS)
def test_peers_compute_the_same_outputs(name, gelu):
    ours = build_ours(TINY.model_copy(update={"gelu": gelu}))
    assert ours(pixels()).std() > 0.01  # not a comparison of zeros
    if (name, gelu) == ("torchvision", "tanh"):
        with pytest.raises(NotComparable, match="erf"):
            build_peer(name, ours)
        return
    logits, gradients = disagreement(ours, build_peer(name, ours), pixels())
    assert logits < 1e-5
    assert gradients < 1e-12


@pytest.mark.parametrize("config", VARIANTS.values(), ids=list(VARIANTS))
def test_timm_computes_the_same_variants_and_other_libraries_are_not_comparable(config):
    ours = build_ours(config)
    assert ours(pixels()).std() > 0.01
    logits, gradients = disagreement(ours, build_peer("timm", ours), pixels())
    assert logits < 1e-5
    assert gradients < 1e-12
    for name in ("transformers", "torchvision"):
        with pytest.raises(NotComparable, match="plain"):
            build_peer(name, ours)


@pytest.mark.parametrize("name", PEERS)
def test_different_weights_are_detected(name):
    ours = build_ours(TINY)
    peer = build_peer(name, ours)
    with torch.no_grad():
        next(p for n, p in peer.named_parameters() if "norm" in n or "ln" in n).add_(0.01)
    assert differ(*disagreement(ours, peer, pixels()))


@pytest.mark.parametrize("change", [{"weight_eps": 1e-6}, {"norm_eps": 1e-6}, {"pool_padding": "none"}])
def test_different_resnet_constants_are_detected(change):
    peer = build_peer("timm", build_ours(RESNET))
    other = build_ours(RESNET.model_copy(update=change))
    assert differ(*disagreement(other, peer, pixels()))


def test_constants_that_timm_lacks_are_not_comparable():
    ours = build_ours(RESNET.model_copy(update={"weight_eps_in": "deviation"}))
    with pytest.raises(NotComparable, match="variance"):
        build_peer("timm", ours)


def test_different_gelu_is_detected():
    peer = build_peer("timm", build_ours(TINY))
    other = build_ours(TINY.model_copy(update={"gelu": "tanh"}))  # the same seed, so the same weights
    assert differ(*disagreement(other, peer, pixels()))


def test_missing_library_is_named(monkeypatch):
    def gone(config):
        raise ImportError("no module")

    monkeypatch.setitem(PEERS, "timm", gone)
    with pytest.raises(NotComparable, match=r"timm .*import"):
        build_peer("timm", build_ours(TINY))


def test_variant_names():
    config = variant("S/16 reg4+layerscale", 10, 224, "erf")
    assert (config.width, config.registers, config.layer_scale, config.prefix_positions) == (384, 4, 1e-5, False)
    assert variant("S/16 gap", 10, 224, "tanh").class_token is False
    assert variant("R50+B/16", 10, 224, "erf").stem.weight_eps_in == "variance"
    assert variant("R50x1", 10, 224, "erf").weight_eps == 1e-8


def test_every_benchmark_case_is_a_known_variant():
    for cases in model.CASES.values():
        for name in {name for kind in cases.values() for name in kind}:
            variant(name, 10, 224, "erf")
    assert all(any(change in name for name in model.CPU["forward"]) for change in CHANGES)
    assert model.CPU["forward"].keys() == model.CPU["training"].keys()


@pytest.mark.parametrize("name", ["S/16 fast", "S/15x"])
def test_unknown_variant_is_rejected_before_the_run(name, tmp_path):
    with pytest.raises(SystemExit, match="S/1"):
        main(["model", "--models", "Ti/16", name, "--out", str(tmp_path)])
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_benchmark_writes_its_results(monkeypatch, tmp_path, capsys):
    effort = Effort(seconds=0.0, min_rounds=2, max_rounds=2, turn_seconds=0.0)
    monkeypatch.setattr(model.Settings, "effort", effort)
    small = TINY.model_copy(update={"num_classes": model.CLASSES, "image_size": (224, 224), "patch": (56, 56)})
    monkeypatch.setattr(model, "variant", lambda name, *options: small)
    arguments = ["model", "--quick", "--models", "Ti/16", "--control", "--out", str(tmp_path)]
    main(arguments)
    assert "timm" in capsys.readouterr().out
    kept = json.loads((tmp_path / "model-fp32-quick-cpu.json").read_text())
    assert {case["kind"] for case in kept["cases"]} == {"forward", "training"}
    for case in kept["cases"]:
        assert list(case["contestants"]) == ["ours", *PEERS, "control"]
    assert kept["agreement"]["Ti/16"]["timm"]["logits"] <= model.LOGITS_TOLERANCE


def test_command_line_options_match_the_settings():
    options = vars(parser().parse_args([]))
    assert set(options) - {"name"} == set(model.Settings.__dataclass_fields__)
