"""Every kind of network on CUDA: equal to the CPU, compiled without graph breaks, and estimated by `plan`."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from bench.step import measure_step
from vitrail.models.estimate import ACCELERATORS, estimate_training_step
from vitrail.models.variants import config_from_name

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; run with `make gpu`"),
]

FAMILY = {
    "class token": ("S/16", {}),
    "mean": ("S/16", {"pool": "gap"}),
    "attention pooling": ("S/16", {"pool": "map"}),
    "registers": ("S/16", {"registers": 4, "layer_scale": 0.1, "drop_path": 0.1}),
    "2d": ("S/16", {"positions": "2d", "positions_at": "layers"}),
    "sincos": ("S/16", {"positions": "sincos", "positions_at": "shared"}),
    "relative": ("S/16", {"positions": "relative"}),
    "axial": ("Axial-S/16", {}),
    "hybrid": ("R26+S/32", {}),
    "root alone": ("R+Ti/16", {}),
    "resnet": ("R26x1", {}),
}


def build_kind(make_net, kind: str, device: str = "cuda"):
    name, options = FAMILY[kind]
    depth = {} if name == "R26x1" else {"depth": 2}
    return make_net(name, 10, device, image_size=(64, 96), **depth, **options)


@pytest.mark.parametrize("kind", FAMILY)
def test_the_gpu_computes_what_the_cpu_does(make_net, kind):
    pixels = torch.randn(4, 3, 64, 96)
    there, here = build_kind(make_net, kind).eval(), build_kind(make_net, kind, "cpu").eval()
    with torch.no_grad():
        actual, expected = there(pixels.cuda()).cpu().double(), here(pixels).double()
    assert (actual - expected).norm() / expected.norm() < 1e-4


@pytest.mark.parametrize("kind", FAMILY)
def test_compiles_whole_and_trains_in_bfloat16(make_net, kind):
    net = build_kind(make_net, kind)
    pixels, labels = torch.randn(4, 3, 64, 96, device="cuda"), torch.arange(4, device="cuda")
    with torch.no_grad():
        expected = net.eval()(pixels)
    compiled = torch.compile(net, fullgraph=True)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
    net.train()
    losses = []
    for _ in range(3):
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(compiled(pixels), labels)
        if not losses:
            first = loss.detach()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    if not net.config.model_dump().get("drop_path"):
        assert torch.allclose(first, F.cross_entropy(expected, labels), rtol=0.05)


@pytest.mark.parametrize(("name", "batch"), [("B/16", 256), ("L/16", 128), ("H/14", 64)])
def test_plan_is_within_a_tenth_of_what_is_measured(name, batch):
    device = torch.cuda.get_device_name().replace("NVIDIA ", "")
    if device not in ACCELERATORS:
        pytest.skip(f"no figures for a {device}")
    planned = estimate_training_step(config_from_name(name, 1000), batch, ACCELERATORS[device])
    measured = measure_step(name, batch)
    assert planned.memory.total == pytest.approx(measured.memory, rel=0.1)
    assert planned.seconds == pytest.approx(measured.seconds, rel=0.1)
