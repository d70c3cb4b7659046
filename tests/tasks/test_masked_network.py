"""What the network does with corrupted patches, for every kind of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.tokens import every_token
from vitrail.config import ModelConfig, ResNetConfig
from vitrail.errors import UserError
from vitrail.models.build import build_model
from vitrail.models.masked import KEPT, MASK, OTHER, Corruption, MaskedPatchNetwork

SMALL = {"width": 32, "depth": 2, "mlp_dim": 40, "heads": 4, "patch": (8, 8), "image_size": (32, 24), "num_classes": 0}
KINDS = {
    "token": {"dropout": 0.1, "representation": 16},
    "mean": {"pool": "gap", "class_token": False},
    "norm after pooling": {"pool": "gap", "norm": "after_pool"},
    "map, patches first": {"pool": "map", "prefix_positions": False},
    "registers": {"registers": 2, "layer_scale": 1.0},
    "2d at every layer": {"positions": "2d", "positions_at": "layers"},
    "1d shared": {"positions_at": "shared"},
    "relative": {"positions": "relative"},
    "hybrid": {"stem": {"blocks": (1, 1), "width": 32}, "patch": (1, 1)},
}
WHERE = torch.tensor([[4, 0, 11, 7], [1, 2, 3, 10]])
SOURCE = torch.tensor([[4, 3, 11, 7], [1, 0, 3, 10]])
MIXED = Corruption(WHERE, torch.tensor([[1, 2, 3, 1], [1, 2, 3, 1]]), SOURCE)
UNCHANGED = Corruption(WHERE, torch.full((2, 4), KEPT), WHERE)


def made(kind, target="color"):
    torch.manual_seed(0)
    net = MaskedPatchNetwork(build_model(ModelConfig(**{**SMALL, **KINDS[kind]})), target)
    nn.init.normal_(net.head.weight, std=0.1)
    return net.eval()


def images():
    return torch.randn(2, 3, 32, 24, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", KINDS)
def test_with_every_patch_kept_tokens_are_those_of_the_plain_network(kind):
    net = made(kind)
    plain = net.net
    with torch.no_grad():
        tokens = every_token(plain, images())[:, plain.config.prefix :]
        norm = plain.fc_norm if plain.config.norm == "after_pool" else nn.Identity()
        expected = net.head(norm(tokens))  # (B, N, 512)
        got = net(images(), UNCHANGED)
        assert every_token(plain, images()).shape[1] == plain.config.sequence
    assert got.shape == (2, 4, 512)
    for row in range(2):
        assert torch.allclose(got[row], expected[row, WHERE[row]], atol=1e-6)


def test_the_plain_network_reads_the_same_tokens():
    plain = made("token").net
    with torch.no_grad():
        tokens = every_token(plain, images())
        assert torch.allclose(plain(images()), plain.pre_logits(plain.pool(tokens)), atol=1e-6)


def test_embeddings_are_replaced_as_asked():
    net = made("registers")
    patches = torch.randn(2, 12, 32)
    got = net.corrupt(patches, MIXED)
    expected = patches.clone()
    for row in range(2):
        for where, kind, source in zip(*(part[row].tolist() for part in MIXED), strict=True):
            if kind == MASK:
                expected[row, where] = net.mask.detach()
            elif kind == OTHER:
                expected[row, where] = patches[row, source]
    assert torch.equal(got, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_the_encoder_sees_the_embeddings_replaced(kind):
    """Those of kind OTHER too, which make only a tenth of the corrupted patches in training."""
    net = made(kind)
    plain = net.net
    with torch.no_grad():
        patches = plain.patch_embed(images())
        seen = patches.clone()
        for row, where, what, source in [
            (r, *(part[r, m].item() for part in MIXED)) for r in range(2) for m in range(4)
        ]:
            seen[row, where] = {MASK: net.mask, OTHER: patches[row, source], KEPT: patches[row, where]}[what]
        tokens = plain.add_positions(plain.add_prefix_tokens(seen))
        for block in plain.blocks:
            tokens = block(tokens)
        norm = plain.fc_norm if plain.config.norm == "after_pool" else plain.norm
        expected = net.head(norm(tokens[:, plain.config.prefix :]))
        got = net(images(), MIXED)
    for row in range(2):
        assert torch.allclose(got[row], expected[row, WHERE[row]], atol=1e-6)


def test_what_a_masked_patch_shows_changes_nothing():
    """A patch hidden behind [mask] may show anything; one that is kept may not."""
    net = made("token")
    changed = images()
    changed[0, :, 8:16, 8:16] += 1  # patch 4 of a 4 x 3 grid: masked
    with torch.no_grad():
        assert torch.equal(net(changed, MIXED), net(images(), MIXED))
        assert not torch.allclose(net(changed, UNCHANGED)[0], net(images(), UNCHANGED)[0])


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_that_can_learn_gets_a_gradient(kind):
    """Processes that train together wait for each of them in each step."""
    net = made(kind).train()
    net(images(), MIXED).square().sum().backward()
    missing = {name for name, p in net.named_parameters() if p.requires_grad and p.grad is None}
    assert not missing
    assert net.mask.grad.abs().sum() > 0
    frozen = {name.split(".")[1] for name, p in net.named_parameters() if not p.requires_grad}
    assert frozen <= {"pre_logits", "attn_pool"}


@pytest.mark.parametrize(("target", "size"), [("color", 512), ("grid", 16 * 512), ("pixels", 3 * 8 * 8)])
@pytest.mark.parametrize("kind", ["token", "hybrid"])
def test_outputs_fit_the_target(target, size, kind):
    net = made(kind, target)
    assert net.net.config.cell == (8, 8)
    assert net(images(), MIXED).shape == (2, 4, size)


def test_a_fresh_head_is_zero_and_the_mask_is_not():
    net = MaskedPatchNetwork(build_model(ModelConfig(**SMALL)), "color")
    assert net(images(), MIXED).abs().max() == 0
    assert 0.01 < net.mask.std() < 0.03


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_compiles_whole(kind):
    torch.compiler.reset()
    net = made(kind)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    got = compiled(images(), MIXED)
    assert torch.allclose(got, net(images(), MIXED), atol=1e-5)
    got.square().sum().backward()
    assert net.mask.grad.abs().sum() > 0


def test_networks_without_patches_of_their_own_are_refused():
    resnet = ResNetConfig(kind="resnet", blocks=(1,), width=32, image_size=(32, 32), num_classes=0)
    axial = ModelConfig(**{**SMALL, "axial": True, "pool": "gap", "class_token": False})
    with pytest.raises(UserError, match="ResNet has no patches"):
        MaskedPatchNetwork(build_model(resnet), "color")
    with pytest.raises(UserError, match="Axial"):
        MaskedPatchNetwork(build_model(axial), "color")
    with pytest.raises(ValueError, match="num_classes"):
        MaskedPatchNetwork(build_model(ModelConfig(**{**SMALL, "num_classes": 5})), "color")
