"""LayerScale, registers, stochastic depth, attention pooling and axial attention, each against its definition."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.tokens import every_token
from vitrail.config import ModelConfig
from vitrail.models.build import build_model
from vitrail.models.layers import DROP_PATH_STEPS, DropPath

SMALL = {"width": 24, "depth": 3, "mlp_dim": 40, "heads": 3, "patch": (4, 4), "image_size": (8, 12), "num_classes": 5}


def random_net(**options):
    net = build_model(ModelConfig(**{**SMALL, **options})).double()
    generator = torch.Generator().manual_seed(0)
    for parameter in net.parameters():
        parameter.data.normal_(std=0.3, generator=generator)
    return net.eval()


def pixels(count: int = 2) -> Tensor:
    return torch.randn(count, 3, 8, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_layer_scale_starts_at_its_value_and_scales_both_branches():
    fresh = build_model(ModelConfig(**SMALL, layer_scale=1e-5))
    gains = [p for name, p in fresh.named_parameters() if name.endswith("gamma")]
    assert len(gains) == 6 and all(bool((gain == 1e-5).all()) for gain in gains)
    net = random_net(layer_scale=1e-5)
    block, x = net.blocks[0], torch.randn(2, 7, 24, dtype=torch.float64)
    middle = x + block.ls1.gamma * block.attn(block.norm1(x))
    expected = middle + block.ls2.gamma * block.mlp(block.norm2(middle))
    assert torch.allclose(block(x), expected, rtol=0, atol=1e-12)


def test_layer_scale_of_one_is_no_layer_scale():
    plain, scaled = random_net(), random_net(layer_scale=1.0)
    gains = {name: torch.ones(24) for name in scaled.state_dict() if name.endswith("gamma")}
    scaled.load_state_dict({**plain.state_dict(), **gains})
    assert torch.equal(plain(pixels()), scaled(pixels()))


def test_registers_stand_between_class_token_and_patches_and_are_not_pooled():
    net = random_net(registers=2, pool="gap", num_classes=0, prefix_positions=False)
    tokens = net.add_prefix_tokens(net.patch_embed(pixels()))
    assert tokens.shape[1] == 1 + 2 + 6
    assert torch.equal(tokens[0, :1], net.cls_token[0])
    assert torch.equal(tokens[0, 1:3], net.reg_token[0])
    last = every_token(net, pixels())
    assert torch.allclose(net(pixels()), last[:, 3:].mean(1), rtol=0, atol=1e-12)


def test_registers_do_not_start_equal():
    registers = build_model(ModelConfig(**SMALL, registers=4)).reg_token[0]
    assert len(torch.unique(registers, dim=0)) == 4


def test_stochastic_depth_rates_grow_from_zero():
    net = build_model(ModelConfig(**SMALL, drop_path=0.4))
    net.to(torch.bfloat16)  # precision.parameters=bf16 must not round them
    kept = [getattr(block.drop_path, "keep_steps", DROP_PATH_STEPS) / DROP_PATH_STEPS for block in net.blocks]
    kept = [float(share) for share in kept]
    assert kept == pytest.approx([1.0, 0.8, 0.6], abs=1e-7)


def test_stochastic_depth_drops_whole_images_and_keeps_the_mean():
    torch.manual_seed(0)
    drop = DropPath(0.25).train()
    out = drop(torch.ones(4000, 3, 2))
    assert out.unique().tolist() == pytest.approx([0.0, 1 / 0.75])
    assert bool((out == out[:, :1, :1]).all())  # one random choice per image
    assert out.mean().item() == pytest.approx(1.0, abs=0.03)
    assert torch.equal(drop.eval()(torch.ones(2, 3, 2)), torch.ones(2, 3, 2))


def test_stochastic_depth_is_active_in_training_only():
    net = random_net(drop_path=0.5)
    assert torch.equal(net(pixels()), net(pixels()))
    net.train()
    torch.manual_seed(0)
    assert not torch.equal(net(pixels(8)), net(pixels(8)))


def test_attention_pooling_by_its_definition():
    net = random_net(pool="map", class_token=False, num_classes=0)
    pool, x = net.attn_pool, torch.randn(2, 6, 24, dtype=torch.float64)
    q = pool.q(pool.latent[0, 0]).view(3, 8)
    k, v = (part.view(2, 6, 3, 8) for part in pool.kv(x).chunk(2, dim=-1))
    mixed = torch.zeros(2, 3, 8, dtype=torch.float64)
    for image in range(2):
        for head in range(3):
            shares = (k[image, :, head] @ q[head] / 8**0.5).softmax(0)
            mixed[image, head] = shares @ v[image, :, head]
    gathered = pool.proj(mixed.flatten(1))
    expected = gathered + pool.mlp(pool.norm(gathered))
    assert torch.allclose(pool(x), expected, rtol=0, atol=1e-12)


def test_axial_blocks_attend_along_rows_then_columns():
    """Equal to full attention with a mask outside the row or column."""
    net = random_net(axial=True, pool="gap", class_token=False)
    assert len(net.blocks) == 6
    row = torch.arange(6) // 3
    column = torch.arange(6) % 3
    x = torch.randn(2, 6, 24, dtype=torch.float64)
    for block, line in zip(net.blocks, [row, column] * 3, strict=True):
        q, k, v = (part.view(2, 6, 3, 8).transpose(1, 2) for part in block.attn.qkv(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=line[:, None] == line)
        expected = block.attn.proj(mixed.transpose(1, 2).flatten(2))
        assert torch.allclose(block.attn(x), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "options",
    [
        {"axial": True},
        {"axial": True, "pool": "gap", "class_token": False, "registers": 1},
        {"axial": True, "pool": "gap", "class_token": False, "positions": "relative"},
        {"pool": "map", "norm": "after_pool"},
        {"stem": {"width": 48}, "patch": (1, 1)},
        {"stem": {"blocks": (1, 1, 1)}, "patch": (1, 1)},
    ],
    ids=str,
)
def test_invalid_networks(options):
    with pytest.raises(ValueError, match=r"axial|map|groups|multiple"):
        ModelConfig(**{**SMALL, **options})
