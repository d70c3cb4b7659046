"""`trace`: attention of chosen blocks, with unchanged outputs."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from vitrail.config import ModelConfig, ResNetConfig
from vitrail.models.build import build_model
from vitrail.models.trace import block_hooks

SMALL = {"width": 24, "depth": 3, "mlp_dim": 40, "heads": 3, "patch": (4, 4), "image_size": (8, 12), "num_classes": 5}
KINDS = {
    "token": {},
    "mean": {"pool": "gap", "class_token": False},
    "map": {"pool": "map", "class_token": False},
    "registers": {"registers": 2, "layer_scale": 0.3},
    "relative": {"positions": "relative"},
    "every layer": {"positions_at": "layers"},
    "axial": {"axial": True, "pool": "gap", "class_token": False},
    "hybrid": {"stem": {"blocks": (1,), "width": 32}, "patch": (1, 1)},
}


def random_net(**options):
    net = build_model(ModelConfig(**{**SMALL, **options}))
    generator = torch.Generator().manual_seed(0)
    for parameter in net.parameters():
        parameter.data.normal_(std=0.3, generator=generator)
    return net.eval()


@pytest.mark.parametrize("kind", KINDS)
def test_the_output_does_not_change_by_one_bit(kind):
    net = random_net(**KINDS[kind])
    pixels = torch.randn(2, 3, 8, 12)
    trace = net.trace(pixels)
    assert torch.equal(trace.logits, net(pixels))
    count, tokens = net.config.blocks, net.config.sequence
    assert list(trace.attention) == list(trace.tokens) == list(range(count))
    for attention in trace.attention.values():
        assert attention.shape == (2, 3, tokens, tokens)
        assert torch.allclose(attention.sum(-1), torch.ones(2, 3, tokens), atol=1e-5)
        assert attention.min() >= 0
    some = net.trace(pixels, layers=[1, -1])
    assert list(some.attention) == [1, count - 1]
    assert torch.equal(some.logits, trace.logits)
    assert torch.equal(some.attention[1], trace.attention[1])


@pytest.mark.parametrize("kind", KINDS)
def test_attention_is_what_the_block_mixes_with(kind):
    """The traced attention times the values equals the output of fused attention."""
    net = random_net(**KINDS[kind])
    pixels = torch.randn(2, 3, 8, 12)
    inputs: dict[int, Tensor] = {}
    hooks = [
        block.norm1.register_forward_hook(lambda _module, _inputs, out, index=index: inputs.setdefault(index, out))
        for index, block in enumerate(net.blocks)
    ]
    net(pixels)
    for hook in hooks:
        hook.remove()
    trace = net.trace(pixels)
    for index, block in enumerate(net.blocks):
        value = block.attn.qkv(inputs[index]).chunk(3, dim=-1)[2]
        heads = value.unflatten(-1, (3, 8)).transpose(1, 2)  # (B, heads, T, 8)
        mixed = (trace.attention[index] @ heads).transpose(1, 2).flatten(2)
        assert torch.allclose(block.attn.proj(mixed), block.attn(inputs[index]), atol=2e-5)


def test_tokens_are_those_the_next_block_gets():
    net = random_net()
    pixels = torch.randn(2, 3, 8, 12)
    trace = net.trace(pixels)
    assert torch.equal(net.blocks[1](trace.tokens[0]), trace.tokens[1])
    assert trace.tokens[2].shape == (2, 7, 24)  # all tokens, although the network uses only the first
    logits = net.head(net.norm(trace.tokens[2])[:, 0])
    assert torch.allclose(logits, trace.logits, atol=1e-5)


def test_only_chosen_blocks_are_looked_at(monkeypatch):
    net = random_net()
    looked: list[int] = []
    for index, block in enumerate(net.blocks):
        plain = block.attn.weights
        monkeypatch.setattr(block.attn, "weights", lambda x, i=index, f=plain: looked.append(i) or f(x))
    net.trace(torch.randn(1, 3, 8, 12), layers=[2])
    assert looked == [2]


def test_dropout_of_the_output_is_not_disturbed():
    net = random_net(dropout=0.2, drop_path=0.3).train()
    pixels = torch.randn(2, 3, 8, 12)
    torch.manual_seed(3)
    plain = net(pixels)
    torch.manual_seed(3)
    assert torch.equal(net.trace(pixels).logits, plain)


def test_tokens_in_training_are_those_that_went_on():
    """Also with dropout: no block runs twice, except the last one if it computed only one token."""
    net = random_net(dropout=0.2, drop_path=0.3).train()
    inputs: list[Tensor] = []
    for block in net.blocks:
        block.register_forward_pre_hook(lambda _module, given: inputs.append(given[0]))
    trace = net.trace(torch.randn(2, 3, 8, 12), layers=[0, 1])
    assert len(inputs) == 3
    assert torch.equal(trace.tokens[0], inputs[1]) and torch.equal(trace.tokens[1], inputs[2])


@pytest.mark.parametrize("layers", [[3], [-4]])
def test_a_block_that_is_not_there(layers):
    with pytest.raises(ValueError, match="blocks 0 to 2"):
        random_net().trace(torch.randn(1, 3, 8, 12), layers=layers)


def test_gradients_reach_the_attention():
    """Gradient-based explanations need this."""
    net = random_net()
    trace = net.trace(torch.randn(1, 3, 8, 12), layers=[0])
    (gradient,) = torch.autograd.grad(trace.attention[0].square().sum(), net.blocks[0].attn.qkv.weight)
    assert gradient.abs().sum() > 0


def test_a_resnet_has_nothing_to_trace():
    assert not hasattr(
        build_model(ResNetConfig(kind="resnet", blocks=(1,), image_size=(32, 32), num_classes=5)), "trace"
    )


def test_trace_leaves_no_hooks():
    net = random_net()
    pixels = torch.randn(1, 3, 8, 12)
    with pytest.raises(RuntimeError, match="stopped"), block_hooks(net, lambda *_: None):
        net(pixels)
        raise RuntimeError("stopped")
    net.trace(pixels)
    assert not any(block.hooks for block in net.blocks)


def test_other_threads_are_not_recorded():
    net = random_net()
    seen: list[int] = []
    with block_hooks(net, lambda index, *_: seen.append(index), chosen=[0, 2]):
        other = threading.Thread(target=net, args=(torch.randn(1, 3, 8, 12),))
        other.start()
        other.join()
        assert not seen
        net(torch.randn(1, 3, 8, 12))
    assert seen == [0, 2]


def test_compiled_blocks_are_traced():
    net = random_net()
    pixels = torch.randn(2, 3, 8, 12)
    plain = net.trace(pixels, layers=[0, -1])
    for block in net.blocks:
        block.compile(backend="eager")
    net(pixels)
    compiled = net.trace(pixels, layers=[0, -1])
    assert list(compiled.attention) == [0, 2]
    assert all(torch.equal(compiled.attention[index], plain.attention[index]) for index in (0, 2))
