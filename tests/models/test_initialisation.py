"""Initialization: the statistics of the original code's initializers, and a zero head."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from vitrail.models.build import build_model
from vitrail.models.variants import config_from_name
from vitrail.models.vit import VisionTransformer


@pytest.fixture(scope="module")
def net() -> VisionTransformer:
    torch.manual_seed(0)
    return VisionTransformer(config_from_name("B/16", 1000, depth=1, representation=768))


def assert_uniform(weight: torch.Tensor, limit: float) -> None:
    """Uniform in [-limit, limit], with standard deviation limit/sqrt(3)."""
    assert 0.999 * limit < weight.abs().max().item() <= limit
    assert weight.std().item() == pytest.approx(limit / math.sqrt(3), rel=0.01)
    assert abs(weight.mean().item()) < 0.01 * limit


def assert_lecun(weight: torch.Tensor, fan_in: int) -> None:
    """Variance 1/fan_in of a normal truncated at two standard deviations, as in flax."""
    std = fan_in**-0.5
    assert weight.std().item() == pytest.approx(std, rel=0.01)
    bound = 2 * std / 0.8796256610342398
    assert 0.99 * bound < weight.abs().max().item() <= bound


@pytest.mark.parametrize("part", [0, 1, 2, 3], ids=["query", "key", "value", "out"])
def test_attention_matrices_have_deviation_one_over_root_width(net, part):
    attn = net.blocks[0].attn
    weight = torch.cat([attn.qkv.weight, attn.proj.weight]).view(4, 768, 768)[part]
    assert weight.std().item() == pytest.approx(768**-0.5, rel=0.01)
    assert_uniform(weight, math.sqrt(6 / (768 + 768)))


def test_mlp(net):
    mlp = net.blocks[0].mlp
    for layer in (mlp.fc1, mlp.fc2):
        assert_uniform(layer.weight, math.sqrt(6 / (768 + 3072)))
        assert layer.bias.std().item() == pytest.approx(1e-6, rel=0.1)


def test_patches_and_representation_layer(net):
    assert_lecun(net.patch_embed.proj.weight, fan_in=16 * 16 * 3)
    assert_lecun(net.pre_logits.fc.weight, fan_in=768)


def test_positions(net):
    assert net.pos_embed.table.std().item() == pytest.approx(0.02, rel=0.01)
    assert abs(net.pos_embed.table.mean().item()) < 2e-4
    assert net.pos_embed.table.abs().max().item() > 4 * 0.02  # the normal is not truncated


def test_parameters_initialized_to_zero_and_one(net):
    block = net.blocks[0]
    zeros = [net.cls_token, net.patch_embed.proj.bias, net.pre_logits.fc.bias, net.head.weight]
    zeros += [block.attn.qkv.bias, block.attn.proj.bias, net.head.bias]
    norms = [block.norm1, block.norm2, net.norm]
    assert all(not tensor.any() for tensor in zeros + [norm.bias for norm in norms])
    assert all(bool((norm.weight == 1).all()) for norm in norms)


@pytest.mark.parametrize("bias", [0.0, -10.0])
def test_first_logits_are_the_bias_alone(bias):
    net = VisionTransformer(config_from_name("Ti/16", 10, 32, depth=2, head_bias=bias))
    pixels = torch.randn(4, 3, 32, 32)
    assert torch.equal(net(pixels), torch.full((4, 10), bias))
    assert net.forward_features(pixels).std() > 0.1  # the zero logits come from the head


def test_first_loss():
    net = VisionTransformer(config_from_name("Ti/16", 1000, 32, depth=1, head_bias=-10))
    logits = net(torch.randn(4, 3, 32, 32))
    labels = torch.arange(4)
    assert F.cross_entropy(logits, labels).item() == pytest.approx(math.log(1000), rel=1e-6)
    sigmoid = F.binary_cross_entropy_with_logits(logits, F.one_hot(labels, 1000).float(), reduction="none").sum(1)
    assert sigmoid[0].item() == pytest.approx(10 + 1000 * 4.54e-5, rel=1e-4)


def test_attention_pooling():
    """As in flax: the probe has one input and D outputs; each D x D matrix has a separate Xavier limit."""
    torch.manual_seed(0)
    pool = build_model(config_from_name("B/16", 10, depth=1, pool="map", dropout=0.1)).attn_pool
    limit = math.sqrt(6 / (1 + 768))
    assert 0.95 * limit < pool.latent.abs().max().item() <= limit
    assert pool.latent.std().item() == pytest.approx(limit / math.sqrt(3), rel=0.1)
    for weight in (pool.q.weight, *pool.kv.weight.chunk(2), pool.proj.weight):
        assert_uniform(weight, math.sqrt(6 / (768 + 768)))
    assert not any(layer.bias.any() for layer in (pool.q, pool.kv, pool.proj))
    assert pool.mlp.dropout.p == 0  # no dropout in a head


@pytest.mark.slow
def test_hybrid_stem():
    """Convolutions as in flax; the last norm of each block is 0, so each block initially returns its shortcut."""
    torch.manual_seed(0)
    net = build_model(config_from_name("R26+S/32", 10, depth=1))
    block = net.patch_embed.stem.stages[2][1]
    assert_lecun(block.conv2.weight, fan_in=9 * 256)
    assert_lecun(net.patch_embed.stem.root.weight, fan_in=49 * 3)
    assert_lecun(net.patch_embed.proj.weight, fan_in=2048)
    for stage in net.patch_embed.stem.stages:
        for unit in stage:
            assert not unit.norm3.weight.any() and not unit.norm3.bias.any()
            assert bool((unit.norm1.weight == 1).all() and (unit.norm2.weight == 1).all())
    x = torch.randn(1, 1024, 4, 4)
    assert torch.equal(block(x), F.relu(x))
    for module in net.patch_embed.stem.modules():  # as when storage is allocated after the network is built
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert not block.norm3.weight.any()


def test_resnet():
    torch.manual_seed(0)
    net = build_model(config_from_name("R26x1", 10, 32, head_bias=-3))
    assert_lecun(net.stages[3][1].conv2.weight, fan_in=9 * 512)
    assert all(bool((module.weight == 1).all()) for module in net.modules() if isinstance(module, torch.nn.GroupNorm))
    assert torch.equal(net(torch.randn(2, 3, 32, 32)), torch.full((2, 10), -3.0))


@pytest.mark.parametrize(
    ("options", "name", "std"),
    [
        ({"positions": "2d"}, "pos_embed.rows", 0.02),
        ({"positions": "2d"}, "pos_embed.columns", 0.02),
        ({"positions": "relative"}, "blocks.0.attn.relative.table", 0.02),
        ({"positions_at": "layers"}, "pos_embed.0.table", 0.02),
        ({"prefix_positions": False}, "pos_embed.table", 768**-0.5),  # big_vision's
        ({"registers": 8}, "reg_token", 0.02),
    ],
)
def test_tables_and_registers(options, name, std):
    torch.manual_seed(0)
    tensor = dict(build_model(config_from_name("B/16", 10, depth=1, **options)).named_parameters())[name]
    assert tensor.std().item() == pytest.approx(std, rel=0.05)
    assert abs(tensor.mean().item()) < 0.1 * std
