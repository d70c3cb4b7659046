"""Mimetic initialization: products of weight matrices, and attention distances."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vitrail.models.build import create
from vitrail.models.mimetic import mimetic_


def small() -> torch.nn.Module:
    torch.manual_seed(0)
    return create("Ti/4", 10, 32, pool="gap", positions="sincos")


def test_products_are_the_identities_of_the_paper_with_noise() -> None:
    net = small()
    mimetic_(net)
    attn = net.blocks[3].attn
    width, heads = 192, attn.heads
    queries, keys, values = attn.qkv.weight.detach().chunk(3)
    product = attn.proj.weight.detach() @ values
    assert product.diagonal().mean() == pytest.approx(-0.4, abs=0.02)
    assert (product + 0.4 * torch.eye(width)).std() == pytest.approx(0.4 / width**0.5, rel=0.02)
    for head in range(heads):
        rows = slice(head * 64, (head + 1) * 64)
        agreement = queries[rows].mT @ keys[rows]
        assert torch.linalg.matrix_rank(agreement) == 64
        drawn = 0.7 * (np.eye(width) + np.random.default_rng(head).normal(size=(width, width)) / width**0.5)
        largest = np.linalg.svd(drawn, compute_uv=False)[:64].mean()  # of a random matrix of the same distribution
        assert torch.linalg.svdvals(agreement)[:64].mean() == pytest.approx(largest, rel=0.03)
        assert agreement.trace() > 0.5 * 64 * largest
    assert len({float(queries[head * 64, 0]) for head in range(heads)}) == heads


def test_tokens_attend_to_their_neighbours_from_the_start() -> None:
    """Mean attention distance in patches, with sincos positions."""
    row, column = torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij")
    places = torch.stack([row.flatten(), column.flatten()], 1)
    apart = torch.cdist(places, places)
    pixels = 0.1 * torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    distances = []
    for start in (lambda net: None, mimetic_):
        net = small().eval()
        start(net)
        with torch.no_grad():
            shares = net.trace(pixels, layers=[0]).attention[0]
        distances.append(float((shares * apart).sum(-1).mean()))
    usual, mimetic = distances
    assert usual > 3.5  # of 4.2 for uniform attention
    assert mimetic < usual - 0.5
