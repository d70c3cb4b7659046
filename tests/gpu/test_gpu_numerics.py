"""Outputs and gradients on CUDA are equal to those on the CPU, in fp32 and bf16 autocast, eager and compiled."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; run with `make gpu`"),
]

FLOAT32 = 1e-4  # relative error of fp32 sums in another order, with a margin
BFLOAT16 = 3e-2  # bf16 has 8 bits of precision; the error grows over twelve blocks
BFLOAT16_GRADIENTS = 6e-2


def relative(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def gradient_error(actual: nn.Module, expected: nn.Module) -> float:
    """Relative error over all parameters together: the true gradient of some (key biases) is 0, with rounding only."""
    pairs = list(zip(actual.parameters(), expected.parameters(), strict=True))
    apart = sum(float((a.grad.double() - b.grad.double()).square().sum()) for a, b in pairs)
    return math.sqrt(apart / sum(float(b.grad.double().square().sum()) for _, b in pairs))


def images(batch: int = 8, size: int = 224) -> Tensor:
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(1)).cuda()


def step(call, pixels: Tensor, autocast: bool = False) -> Tensor:
    labels = torch.arange(len(pixels), device=pixels.device)
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        logits = call(pixels)
        loss = F.cross_entropy(logits, labels)
    loss.backward()
    return logits.detach()


def test_cuda_agrees_with_the_cpu(make_net):
    with torch.no_grad():
        on_device = make_net("Ti/16")(images(2))
        on_cpu = make_net("Ti/16", device="cpu")(images(2).cpu())
    assert relative(on_device.cpu(), on_cpu) < FLOAT32 * 10


@pytest.mark.parametrize("pool", ["token", "gap"])
def test_compiled_forward_is_one_graph_and_matches_eager(make_net, pool):
    net = make_net("Ti/16", pool=pool).eval()
    compiled = torch.compile(net, fullgraph=True)
    with torch.no_grad():
        assert relative(compiled(images()), net(images())) < FLOAT32


def test_compiled_training_step_matches_eager(make_net):
    eager, net = make_net("Ti/16"), make_net("Ti/16")
    expected = step(eager, images())
    result = step(torch.compile(net, fullgraph=True), images())
    assert relative(result, expected) < FLOAT32
    assert gradient_error(net, eager) < FLOAT32


def test_compiled_bf16_training_step_matches_eager_fp32(make_net):
    eager, net = make_net("Ti/16"), make_net("Ti/16")
    expected = step(eager, images())
    result = step(torch.compile(net, fullgraph=True), images(), autocast=True)
    assert relative(result, expected) < BFLOAT16
    assert gradient_error(net, eager) < BFLOAT16_GRADIENTS


def test_bf16_autocast_step_of_s16_matches_fp32(make_net):
    exact, net = make_net("S/16"), make_net("S/16")
    expected = step(exact, images())
    result = step(net, images(), autocast=True)
    assert relative(result, expected) < BFLOAT16
    assert gradient_error(net, exact) < BFLOAT16_GRADIENTS
    assert {parameter.grad.dtype for parameter in net.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("name", "parameters"), [pytest.param("L/16", 304_326_632, id="L16"), pytest.param("H/14", 632_045_800, id="H14")]
)
def test_large_networks_run_in_bf16(make_net, name, parameters):
    net = make_net(name).eval()
    assert sum(p.numel() for p in net.parameters()) == parameters
    with torch.no_grad():
        exact = net(images(4))
        logits = net.bfloat16()(images(4).bfloat16())
    assert logits.shape == (4, 1000)
    assert logits.dtype == torch.bfloat16
    assert relative(logits, exact) < 2 * BFLOAT16  # pure bf16, including residuals, and up to 32 blocks
