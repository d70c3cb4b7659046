"""Rollout and relevance against a plain float64 computation that forms every attention matrix."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from tests.interpret.nets import KINDS, noise, random_net
from tests.tokens import every_token
from vitrail.config import ModelConfig, ResNetConfig
from vitrail.errors import UserError
from vitrail.interpret.attention import attention_maps, map_query, require_vit
from vitrail.interpret.relevance import relevance
from vitrail.interpret.rollout import rollout
from vitrail.models.build import build_model
from vitrail.models.vit import VisionTransformer


def pool_attention(net, tokens):
    """Attention of the attention pool, by the formula."""
    size = net.config.width // net.config.heads
    q = net.attn_pool.q(net.attn_pool.latent).view(net.config.heads, size)
    k = net.attn_pool.kv(tokens)[..., : net.config.width].unflatten(-1, (net.config.heads, size))
    return torch.einsum("hd,bthd->bht", q, k).div(size**0.5).softmax(-1)


def read(net, total, tokens):
    """The row of the query, by the kind of pool."""
    prefix = net.config.prefix
    if net.config.pool == "map":
        row = torch.einsum("bt,btk->bk", pool_attention(net, tokens).mean(1), total)
    else:
        row = total[:, 0] if net.config.pool == "token" else total[:, prefix:].mean(1)
    return row[:, prefix:].unflatten(1, net.config.grid)


@pytest.mark.parametrize("kind", KINDS)
def test_rollout_equals_the_product_of_matrices(kind):
    net = random_net(**KINDS[kind])
    pixels = noise()
    found = rollout(net, pixels)
    net = net.double()
    attention = net.trace(pixels.double()).attention
    product = torch.eye(net.config.sequence, dtype=torch.float64)
    for layer in sorted(attention):
        mixed = attention[layer].mean(1) + torch.eye(net.config.sequence)
        product = mixed / mixed.sum(-1, keepdim=True) @ product
    tokens = every_token(net, pixels.double())
    expected = read(net, product, tokens).numpy()
    assert found.shape == (2, *net.config.grid)
    assert np.allclose(found, expected, atol=1e-6)
    if not net.config.prefix:
        assert np.allclose(found.sum((1, 2)), 1, atol=1e-5)


class ExplicitAttention(nn.Module):
    """Attention that forms its matrix and keeps it."""

    def __init__(self, attention):
        super().__init__()
        self.inner = attention

    def forward(self, x, keep=None):
        self.matrix = self.inner.weights(x)
        self.matrix.retain_grad()
        v = self.inner.qkv(x).unflatten(-1, (3, self.inner.heads, -1))[:, :, 2].transpose(1, 2)
        return self.inner.proj((self.matrix @ v).transpose(1, 2).flatten(2))[:, :keep]


@pytest.mark.parametrize("against", [None, [4, 0]])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "map"])
def test_relevance_equals_explicit_matrices(kind, against):
    net = random_net(**KINDS[kind])
    pixels = noise()
    found = relevance(net, pixels, [1, 3], against)
    formed = copy.deepcopy(net).double().requires_grad_()
    for block in formed.blocks:
        block.attn = ExplicitAttention(block.attn)
    logits = formed(pixels.double())
    target = logits[0, 1] + logits[1, 3]
    if against:
        target = target - logits[0, 4] - logits[1, 0]
    target.backward()
    total = torch.eye(net.config.sequence, dtype=torch.float64).repeat(2, 1, 1)
    for block in formed.blocks:
        matrix = block.attn.matrix
        total = total + (matrix * matrix.grad).clamp_min(0).mean(1).detach() @ total
    expected = read(formed, total - torch.eye(net.config.sequence), None).numpy()  # a mean would show the identity
    assert expected.max() > 1e-4
    assert np.allclose(found, expected, rtol=1e-3, atol=1e-3 * expected.max())


def test_relevance_of_an_attention_pool():
    """The pool's own attention is weighted like that of a block, and starts from it."""
    net = random_net(**KINDS["map"])
    pixels = noise()
    found = relevance(net, pixels, [1, 3])
    net = net.double().requires_grad_()
    plain = net(pixels.double())
    for block in net.blocks:
        block.attn = ExplicitAttention(block.attn)
    tokens = every_token(net, pixels.double())
    matrix = pool_attention(net, tokens)
    matrix.retain_grad()
    v = net.attn_pool.kv(tokens)[..., net.config.width :].unflatten(-1, (3, -1))
    x = net.attn_pool.proj(torch.einsum("bht,bthd->bhd", matrix, v).flatten(1))
    logits = net.head(x + net.attn_pool.mlp(net.attn_pool.norm(x)))
    assert torch.allclose(logits, plain)
    (logits[0, 1] + logits[1, 3]).backward()
    total = torch.eye(6, dtype=torch.float64).repeat(2, 1, 1)
    for block in net.blocks:
        inner = block.attn.matrix
        total = total + (inner * inner.grad).clamp_min(0).mean(1).detach() @ total
    row = torch.einsum("bt,btk->bk", (matrix * matrix.grad).clamp_min(0).mean(1).detach(), total)
    assert np.allclose(found, row.detach().unflatten(1, (2, 3)).numpy(), rtol=1e-3, atol=1e-5)


def test_two_tokens_by_hand():
    """A class token and one patch, one block, one head, no norms: every number can be written down.

    The class token looks at the patch with share a = e^s / (1 + e^s), s = q0.k1 / sqrt(2); more of it raises the logit
    by w.v1, so the patch has relevance max(0, a w.v1), against another class max(0, a (w - w').v1).
    """
    net = VisionTransformer(
        ModelConfig(width=2, depth=1, mlp_dim=2, heads=1, patch=(1, 1), image_size=(1, 1), num_classes=2, channels=1)
    )
    for parameter in net.parameters():
        parameter.data.zero_()
    block = net.blocks[0]
    block.norm1 = block.norm2 = net.norm = nn.Identity()
    net.cls_token.data = torch.tensor([[[1.0, 0.0]]])
    net.patch_embed.proj.weight.data = torch.tensor([0.0, 1.0]).view(2, 1, 1, 1)  # a patch of value p is (0, p)
    query_, key, value = torch.eye(2), torch.tensor([[0.0, 1.0], [0.0, 0.0]]), torch.tensor([[0.0, 3.0], [0.0, 1.0]])
    block.attn.qkv.weight.data = torch.cat([query_, key, value])
    block.attn.proj.weight.data = torch.eye(2)
    net.head.weight.data = torch.tensor([[1.0, 0.5], [2.0, -1.0]])
    pixels = torch.full((1, 1, 1, 1), 2.0)  # k1 = (2, 0), v1 = (6, 2), s = 2 / sqrt(2)
    share = np.exp(2**0.5) / (1 + np.exp(2**0.5))
    assert relevance(net, pixels, [0]).item() == pytest.approx(share * 7)
    assert relevance(net, pixels, [1]).item() == pytest.approx(share * 10)
    assert relevance(net, pixels, [1], [0]).item() == pytest.approx(share * 3)
    assert relevance(net, pixels, [0], [1]).item() == 0
    assert rollout(net, pixels).item() == pytest.approx(share / 2)


@pytest.mark.parametrize("kind", KINDS)
def test_maps_of_blocks(kind):
    net = random_net(**KINDS[kind])
    found = attention_maps(net, noise(), [0, -1])
    assert found.shape == (2, 2, 3, *net.config.grid)
    last = net.trace(noise()).attention[net.config.blocks - 1][:, :, :, net.config.prefix :]
    row = last[:, :, 0] if net.config.pool == "token" else last[:, :, net.config.prefix :].mean(2)
    assert np.allclose(found[:, 1], row.unflatten(2, net.config.grid).numpy())


def test_the_network_is_unchanged_afterwards():
    """No hooks, no gradients, the same mode."""
    net = random_net(dropout=0.5).train().requires_grad_()
    pixels = noise()
    first, again = relevance(net, pixels, [0, 1]), relevance(net, pixels, [0, 1])
    assert np.array_equal(first, again)
    assert net.training and not any(block.attn.proj._forward_pre_hooks for block in net.blocks)
    assert all(parameter.grad is None for parameter in net.parameters())
    rollout(net, pixels)
    assert net.training and torch.is_grad_enabled()


def test_networks_without_classifier_or_attention_are_errors():
    with pytest.raises(UserError, match="no classifier"):
        relevance(random_net(num_classes=0), noise(), [0, 0])
    with pytest.raises(UserError, match="ResNet"):
        require_vit(build_model(ResNetConfig(kind="resnet", blocks=(1,), image_size=(32, 32), num_classes=5)))


def test_map_query_in_words():
    assert [map_query(random_net(**KINDS[kind]).config) for kind in ("token", "mean", "map")] == [
        "the class token",
        "the mean of the patch tokens",
        "the learned query of the attention pool",
    ]
