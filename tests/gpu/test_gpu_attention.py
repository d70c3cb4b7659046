"""The kernels for short sequences, compared with attention in float64 and with torch's kernels."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.models.kernels import short_attention as short
from vitrail.models.kernels.short_attention import short_attention, supports_short_attention

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture(autouse=True)
def _hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("torch's kernels are used on this GPU")


def apart(qkv: Tensor, heads: int) -> tuple[Tensor, ...]:
    batch, tokens, width = qkv.shape
    parts = qkv.view(batch, tokens, 3, heads, width // (3 * heads)).unbind(2)
    return tuple(part.transpose(1, 2) for part in parts)


def torchs(qkv: Tensor, heads: int) -> Tensor:
    return F.scaled_dot_product_attention(*apart(qkv, heads)).transpose(1, 2).flatten(2)


def written_out(qkv: Tensor, heads: int) -> Tensor:
    q, k, v = apart(qkv, heads)
    return ((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)


def both_ways(attention, qkv: Tensor, gradient: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    qkv = qkv.detach().requires_grad_()
    mixed = attention(qkv, heads)
    mixed.backward(gradient.to(mixed.dtype))
    assert qkv.grad is not None
    return mixed.detach(), qkv.grad


@pytest.mark.parametrize(
    ("tokens", "depth", "dtype"),
    [
        *((tokens, 64, torch.bfloat16) for tokens in (1, 17, 50, 64, 65, 128, 197, 256)),
        *((tokens, 64, torch.float16) for tokens in (64, 100, 197)),
    ],
    ids=str,
)
def test_it_is_as_close_to_float64_as_torchs_kernels(tokens: int, depth: int, dtype: torch.dtype) -> None:
    heads = 3
    generator = torch.Generator("cuda").manual_seed(tokens)
    qkv = torch.randn(4, tokens, 3 * heads * depth, device="cuda", generator=generator).mul(1.5).to(dtype)
    gradient = torch.randn(4, tokens, heads * depth, device="cuda", generator=generator).to(dtype)
    assert supports_short_attention(qkv, heads)
    expected = both_ways(written_out, qkv.double(), gradient, heads)
    results = both_ways(short_attention, qkv, gradient, heads)
    torch_results = both_ways(torchs, qkv, gradient, heads)
    for exact, result, torch_result in zip(expected, results, torch_results, strict=True):
        distance = (result - exact).norm() / exact.norm().clamp(min=1)
        assert distance < 1.2 * (torch_result - exact).norm() / exact.norm().clamp(min=1) + 1e-5
        assert distance < 1e-2


def test_results_are_bit_reproducible() -> None:
    qkv = torch.randn(64, 197, 3 * 768, device="cuda", dtype=torch.bfloat16)
    gradient = torch.randn(64, 197, 768, device="cuda", dtype=torch.bfloat16)
    first = both_ways(short_attention, qkv, gradient, 12)
    for _ in range(5):
        again = both_ways(short_attention, qkv, gradient, 12)
        assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


@pytest.mark.parametrize("compiled", [False, True])
def test_network_uses_it_with_equal_gradients(make_net, monkeypatch, compiled: bool) -> None:
    """Loss and gradients of a network with either kind of kernels."""
    pixels = torch.randn(8, 3, 224, 224, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    labels = torch.arange(8, device="cuda")
    results = []
    for tokens in (256, 0):
        monkeypatch.setattr(short, "TOKENS", tokens)
        torch.compiler.reset()
        net = make_net("Ti/16", num_classes=10).train()
        call = torch.compile(net) if compiled else net
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(call(pixels), labels)
        with torch.profiler.profile() as seen:
            loss.backward()
        kernels = {event.name for event in seen.events()}
        assert any("_backward" in name and "flash" not in name for name in kernels) or tokens == 0
        gradient = torch.cat([p.grad.flatten() for p in net.parameters()])
        results.append((loss.detach(), gradient))
    (loss, gradient), (torch_loss, torch_gradient) = results
    assert float(loss) == pytest.approx(float(torch_loss), abs=5e-3)
    assert (gradient - torch_gradient).norm() < 0.03 * torch_gradient.norm()


def test_unsupported_inputs() -> None:
    def projections(tokens: int = 64, depth: int = 64, **options) -> Tensor:
        return torch.zeros(1, tokens, 3 * depth, **{"device": "cuda", "dtype": torch.bfloat16} | options)

    assert supports_short_attention(projections(), 1)
    assert not supports_short_attention(projections(257), 1)
    assert not supports_short_attention(projections(depth=128), 1)
    assert not supports_short_attention(projections(dtype=torch.float32), 1)
    assert not supports_short_attention(projections(device="cpu"), 1)
