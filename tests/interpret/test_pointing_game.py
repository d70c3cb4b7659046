"""The pointing game on networks whose predictions are known in closed form."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.stats import binomtest
from torch import nn

from tests.interpret.nets import attending_net, brightness_net, dark_and_bright, patches_of
from vitrail.interpret.pointing_game import hit_rate, paste_images, pointing_game, quarters
from vitrail.interpret.relevance import relevance
from vitrail.interpret.rollout import rollout


class Rule(nn.Module):
    """A network with the second logit `rule(pixels)` and the first 0."""

    def __init__(self, grid, rule):
        super().__init__()
        self.config, self.rule = SimpleNamespace(grid=grid, cell=(2, 2)), rule

    def forward(self, pixels):
        value = self.rule(pixels[:, 0])
        return torch.stack([torch.zeros_like(value), value], dim=1)


@pytest.mark.parametrize("grid", [(4, 4), (5, 7), (14, 14), (3, 2), (1, 6), (1, 1)])
def test_constant_maps_score_at_chance(grid):
    """Even for a network that weighs the top left corner most, where most predictions change."""
    size = 2 * grid[0], 2 * grid[1]
    weight = torch.full(size, 0.15)
    weight[: max(2, grid[0] // 2 * 2), : max(2, grid[1] // 2 * 2)] = 0.55
    net = Rule(grid, lambda x: (x * weight).sum((1, 2)) / weight.sum())
    dark, bright = torch.full((16,), -0.3), torch.linspace(0.5, 6, 16)
    images = torch.cat([dark, bright])[:, None, None, None].expand(-1, 1, *size)
    found = paste_images(net, images, number=64)
    parts = len(quarters(grid))
    assert len(found.pixels) >= 12 and len(found.pixels) % parts == 0
    assert found.chance == pytest.approx(1 / parts, abs=1e-12)
    for row in range(grid[0]):
        for column in range(grid[1]):
            map_ = np.zeros((len(found.pixels), *grid))
            map_[:, row, column] = 1
            assert pointing_game(map_, found.inside)[0].mean() == pytest.approx(1 / parts, abs=1e-12)
    assert pointing_game(np.ones(found.inside.shape), found.inside)[0].mean() == pytest.approx(1 / parts, abs=1e-12)


def test_quarters_cover_every_patch_once():
    for grid in [(2, 2), (7, 7), (14, 24), (1, 5)]:
        covered = np.zeros(grid, int)
        for cell in quarters(grid):
            covered[cell] += 1
            sides = covered[cell].shape
            assert all(2 * side in (n - 1, n, n + 1) for side, n in zip(sides, grid, strict=True) if n > 1)
        assert (covered == 1).all()


def test_images_that_only_hide_evidence_against_them_are_excluded():
    """The second class is predicted without a bright spot: pasting anything over the spot gives that class."""
    net = Rule((4, 4), lambda x: 5 - x.amax((1, 2)))
    spot, plain = torch.zeros(6, 1, 8, 8), torch.zeros(6, 1, 8, 8)
    spot[:, :, :4, :4] = 10.0
    found = paste_images(net, torch.cat([spot, plain]), number=40)
    assert len(found.pixels) == 40 and found.hidden > 0 and found.changed - found.hidden >= 40
    assert (found.classes == 0).all() and (found.backgrounds == 1).all()  # the spot itself is pasted
    box = found.inside.repeat(2, axis=1).repeat(2, axis=2)
    assert all(image[inside].max() > 5 for image, inside in zip(found.pixels[:, 0].numpy(), box, strict=True))


def test_no_pair_is_used_twice():
    """Repeated pairs would make the interval too narrow."""
    net = brightness_net()
    images = torch.tensor([-1.0, -2.0, 9.0, 11.0])[:, None, None, None].expand(-1, 1, 8, 8)
    found = paste_images(net, images, number=1000)
    assert len(found.pixels) == 2 * 2 * 4 == len({image.numpy().tobytes() for image in found.pixels})


@pytest.mark.parametrize(("hits", "n"), [(0, 12), (5, 12), (48, 64), (64, 64)])
def test_the_interval_equals_scipy(hits, n):
    rate, *interval = hit_rate(np.arange(n) < hits)
    assert rate == hits / n
    assert interval == pytest.approx(tuple(binomtest(hits, n).proportion_ci(method="wilson")), abs=1e-6)


def test_pasted_images_change_the_prediction_and_nothing_outside_their_box():
    net = brightness_net()
    dark, bright = torch.full((4, 1, 8, 8), -1.0), torch.full((4, 1, 8, 8), 9.0)
    images = torch.cat([dark, bright]) + 0.1 * torch.rand(8, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    found = paste_images(net, images, number=20)
    assert len(found.pixels) == 20 and found.tried >= 20 and found.chance == pytest.approx(4 / 16)
    assert (found.classes == 1).all() and (found.backgrounds == 0).all()  # a dark quarter does not outweigh the rest
    pixels = found.inside.repeat(2, axis=1).repeat(2, axis=2)
    pasted = found.pixels[:, 0].numpy()
    assert (pasted[pixels] > 8).all() and (pasted[~pixels] < 0).all()
    hits, fraction = pointing_game(patches_of(found.pixels, net).reshape(-1, 4, 4).clip(0), found.inside)
    assert (hits == 1).all() and np.allclose(fraction, 1)


def test_maps_of_a_network_with_informative_attention_find_every_pasted_image():
    net = attending_net()
    found = paste_images(net, dark_and_bright(), number=20)
    assert len(found.pixels) == 20
    for maps in (relevance(net, found.pixels, found.classes, found.backgrounds), rollout(net, found.pixels)):
        assert (pointing_game(maps, found.inside)[0] == 1).all()


def test_maps_of_a_network_without_attention_score_at_chance():
    """The network only averages patches, so relevance is zero everywhere."""
    net = brightness_net()
    found = paste_images(net, dark_and_bright(), number=20)
    assert len(found.pixels) == 20
    maps = relevance(net, found.pixels, found.classes, found.backgrounds)
    assert maps.max() == 0 and np.allclose(pointing_game(maps, found.inside)[0], 1 / 4)


def test_images_of_one_class_cannot_be_pasted_into_each_other():
    found = paste_images(brightness_net(), torch.ones(4, 1, 8, 8), number=8)
    assert len(found.pixels) == found.tried == 0 and found.inside.shape == (0, 4, 4)


def test_a_constant_map_scores_at_chance():
    inside = np.zeros((2, 4, 4), bool)
    inside[:, :2, :2] = True
    for flat in (np.zeros((2, 4, 4)), np.ones((2, 4, 4))):
        hits, fraction = pointing_game(flat, inside)
        assert np.allclose(hits, 1 / 4) and np.allclose(fraction, 1 / 4)
