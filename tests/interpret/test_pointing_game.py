"""Pasted pictures and who finds them, on networks whose answer can be computed without them."""

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
    """A network of any rule: the second class where it is above 0."""

    def __init__(self, grid, rule):
        super().__init__()
        self.config, self.rule = SimpleNamespace(grid=grid, cell=(2, 2)), rule

    def forward(self, pixels):
        value = self.rule(pixels[:, 0])
        return torch.stack([torch.zeros_like(value), value], dim=1)


@pytest.mark.parametrize("grid", [(4, 4), (5, 7), (14, 14), (3, 2), (1, 6), (1, 1)])
def test_no_constant_map_beats_chance_though_the_network_prefers_a_quarter(grid):
    """It weighs the top left corner most, so that most answers are changed there."""
    size = 2 * grid[0], 2 * grid[1]
    weight = torch.full(size, 0.15)
    weight[: max(2, grid[0] // 2 * 2), : max(2, grid[1] // 2 * 2)] = 0.55
    net = Rule(grid, lambda x: (x * weight).sum((1, 2)) / weight.sum())
    dark, bright = torch.full((16,), -0.3), torch.linspace(0.5, 6, 16)
    images = torch.cat([dark, bright])[:, None, None, None].expand(-1, 1, *size)
    found = paste_images(net, images, wanted=64)
    parts = len(quarters(grid))
    assert len(found.pixels) >= 12 and len(found.pixels) % parts == 0
    assert found.chance == pytest.approx(1 / parts, abs=1e-12)
    for row in range(grid[0]):
        for column in range(grid[1]):
            map_ = np.zeros((len(found.pixels), *grid))
            map_[:, row, column] = 1
            assert pointing_game(map_, found.inside)[0].mean() == pytest.approx(1 / parts, abs=1e-12)
    assert pointing_game(np.ones(found.inside.shape), found.inside)[0].mean() == pytest.approx(1 / parts, abs=1e-12)


def test_quarters_are_a_partition_in_the_middle():
    for grid in [(2, 2), (7, 7), (14, 24), (1, 5)]:
        covered = np.zeros(grid, int)
        for cell in quarters(grid):
            covered[cell] += 1
            sides = covered[cell].shape
            assert all(2 * side in (n - 1, n, n + 1) for side, n in zip(sides, grid, strict=True) if n > 1)
        assert (covered == 1).all()


def test_pictures_that_only_hide_what_stood_against_them_are_left_out():
    """The first class needs a bright spot. To paste over it, with anything at all, gives the second."""
    net = Rule((4, 4), lambda x: 5 - x.amax((1, 2)))
    spot, plain = torch.zeros(6, 1, 8, 8), torch.zeros(6, 1, 8, 8)
    spot[:, :, :4, :4] = 10.0
    found = paste_images(net, torch.cat([spot, plain]), wanted=40)
    assert len(found.pixels) == 40 and found.hidden > 0 and found.changed - found.hidden >= 40
    assert (found.classes == 0).all() and (found.backgrounds == 1).all()  # the spot itself is pasted
    box = found.inside.repeat(2, axis=1).repeat(2, axis=2)
    assert all(one[inside].max() > 5 for one, inside in zip(found.pixels[:, 0].numpy(), box, strict=True))


def test_no_pasting_is_used_twice():
    """Few images give few pairs: repeated ones would make an interval too sure."""
    net = brightness_net()
    images = torch.tensor([-1.0, -2.0, 9.0, 11.0])[:, None, None, None].expand(-1, 1, 8, 8)
    found = paste_images(net, images, wanted=1000)
    assert len(found.pixels) == 2 * 2 * 4 == len({one.numpy().tobytes() for one in found.pixels})


@pytest.mark.parametrize(("hits", "n"), [(0, 12), (5, 12), (48, 64), (64, 64)])
def test_the_interval_is_that_of_scipy(hits, n):
    share, *interval = hit_rate(np.arange(n) < hits)
    assert share == hits / n
    assert interval == pytest.approx(tuple(binomtest(hits, n).proportion_ci(method="wilson")), abs=1e-6)


def test_pasted_pictures_change_the_answer_and_nothing_outside_their_box():
    net = brightness_net()
    dark, bright = torch.full((4, 1, 8, 8), -1.0), torch.full((4, 1, 8, 8), 9.0)
    images = torch.cat([dark, bright]) + 0.1 * torch.rand(8, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    found = paste_images(net, images, wanted=20)
    assert len(found.pixels) == 20 and found.tried >= 20 and found.chance == pytest.approx(4 / 16)
    assert (found.classes == 1).all() and (found.backgrounds == 0).all()  # a dark quarter does not outweigh the rest
    pixels = found.inside.repeat(2, axis=1).repeat(2, axis=2)
    made = found.pixels[:, 0].numpy()
    assert (made[pixels] > 8).all() and (made[~pixels] < 0).all()
    hits, share = pointing_game(patches_of(found.pixels, net).reshape(-1, 4, 4).clip(0), found.inside)
    assert (hits == 1).all() and np.allclose(share, 1)


def test_maps_of_a_network_that_goes_by_its_attention_find_every_pasted_picture():
    net = attending_net()
    found = paste_images(net, dark_and_bright(), wanted=20)
    assert len(found.pixels) == 20
    for maps in (relevance(net, found.pixels, found.classes, found.backgrounds), rollout(net, found.pixels)):
        assert (pointing_game(maps, found.inside)[0] == 1).all()


def test_maps_of_a_network_without_attention_find_none():
    """A network that only averages has no attention to explain it: relevance is empty, and scores like chance."""
    net = brightness_net()
    found = paste_images(net, dark_and_bright(), wanted=20)
    assert len(found.pixels) == 20
    maps = relevance(net, found.pixels, found.classes, found.backgrounds)
    assert maps.max() == 0 and np.allclose(pointing_game(maps, found.inside)[0], 1 / 4)


def test_images_of_one_class_cannot_be_pasted_into_each_other():
    found = paste_images(brightness_net(), torch.ones(4, 1, 8, 8), wanted=8)
    assert len(found.pixels) == found.tried == 0 and found.inside.shape == (0, 4, 4)


def test_pointing_of_a_flat_map_is_chance():
    inside = np.zeros((2, 4, 4), bool)
    inside[:, :2, :2] = True
    for flat in (np.zeros((2, 4, 4)), np.ones((2, 4, 4))):
        hits, share = pointing_game(flat, inside)
        assert np.allclose(hits, 1 / 4) and np.allclose(share, 1 / 4)
