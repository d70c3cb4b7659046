"""Attention distance against closed forms."""

import numpy as np
import pytest
import torch

from tests.interpret.nets import KINDS, noise, random_net
from vitrail.interpret.distance import attention_distances, grid_distances, head_distances


@pytest.mark.parametrize(
    ("grid", "patch", "pixels"), [(14, 16, 116.49), (7, 32, 115.50), (24, 16, 200.05), (8, 4, 16.55)]
)
def test_uniform_attention(grid, patch, pixels):
    apart = torch.from_numpy(grid_distances((grid, grid), (patch, patch)))
    uniform = torch.full((1, 1, grid**2, grid**2), 1 / grid**2, dtype=torch.float64)
    plain, renormalised, elsewhere = (value.item() for value in head_distances(uniform, apart))
    assert plain == pytest.approx(renormalised) == pytest.approx(pixels, abs=0.005)
    assert elsewhere == pytest.approx(0)


def test_uniform_attention_with_a_class_token():
    """It counts as distance 0, and is excluded after renormalisation."""
    apart = torch.from_numpy(grid_distances((14, 14), (16, 16)))
    uniform = torch.full((2, 3, 197, 197), 1 / 197, dtype=torch.float64)
    plain, renormalised, elsewhere = head_distances(uniform, apart)
    assert plain.shape == (2, 3)
    assert plain[0, 0].item() == pytest.approx(116.49 * 196 / 197, abs=0.005)
    assert renormalised[1, 2].item() == pytest.approx(116.49, abs=0.005)
    assert elsewhere[0, 1].item() == pytest.approx(1 / 197)


def test_attention_to_itself_has_distance_zero():
    apart = torch.from_numpy(grid_distances((14, 14), (16, 16)))
    assert all(value.abs().max() == 0 for value in head_distances(torch.eye(196).expand(1, 2, -1, -1), apart))


def test_attention_to_the_class_token_only_has_distance_zero():
    attention = torch.zeros(1, 1, 5, 5)
    attention[..., 0] = 1
    plain, renormalised, elsewhere = head_distances(attention, torch.ones(4, 4))
    assert plain == renormalised == 0 and elsewhere == 1


def test_cells_that_are_not_square():
    apart = grid_distances((2, 3), (8, 4))
    assert apart[0].tolist() == [0, 4, 8, 8, pytest.approx(80**0.5), pytest.approx(128**0.5)]


@pytest.mark.parametrize("kind", KINDS)
def test_heads_of_every_kind_of_network(kind):
    """Against float64 sums over pairs of the traced attention. Batches of different sizes are weighted by images."""
    net = random_net(**KINDS[kind])
    pixels = noise(5)
    found = attention_distances(net, [pixels[:4], pixels[4:]])
    prefix, (height, width), cell = net.config.prefix, net.config.grid, net.config.cell
    trace = net.trace(pixels)
    for layer in range(net.config.blocks):
        attention = trace.attention[layer].double().numpy()[:, :, prefix:, prefix:]
        expected = np.zeros((5, 3))
        renormalised = np.zeros((5, 3))
        for q in range(height * width):
            for k in range(height * width):
                dy, dx = (q // width - k // width) * cell[0], (q % width - k % width) * cell[1]
                reach = attention[:, :, q, k] * (dy**2 + dx**2) ** 0.5
                expected += reach
                renormalised += reach / attention[:, :, q].sum(-1)
        assert np.allclose(found.pixels[layer], expected.mean(0) / (height * width), rtol=1e-5)
        assert np.allclose(found.renormalised[layer], renormalised.mean(0) / (height * width), rtol=1e-5)
    assert found.images == 5
    if not prefix:
        assert np.allclose(found.elsewhere, 0, atol=1e-6)
