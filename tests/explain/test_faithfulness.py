"""Deletion, insertion and pointing on networks whose answer can be computed without them."""

import numpy as np
import pytest
import torch

from tests.explain.nets import attending_net, brightness_net, dark_and_bright, noise, random_net
from vitrail.config import Preprocess
from vitrail.explain.faithfulness import faithfulness, gain, random_maps
from vitrail.explain.pointing import paste, pointing
from vitrail.explain.relevance import relevance
from vitrail.explain.rollout import rollout
from vitrail.infer.predict import Classifier
from vitrail.weights.bundle import Answering, Card


def patches_of(pixels, net):
    """The mean of each patch, (B, h*w)."""
    (rows, columns), (height, width) = net.config.grid, net.config.cell
    return pixels[:, 0].reshape(-1, rows, height, columns, width).mean((2, 4)).flatten(1).numpy()


def card_of(net, several, temperature):
    spec = Preprocess(size=net.config.image_size, mean=(0.5,), std=(0.5,))
    answering = Answering(temperature=temperature)
    return Card(model=net.config, preprocess=spec, created_with="a test", several=several, answering=answering)


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_curves_are_those_computed_patch_by_patch(several, temperature):
    net = brightness_net()
    pixels = 10 * torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    patches = patches_of(pixels, net)
    maps = patches.reshape(3, 4, 4)  # the truth: brighter patches speak for the second class
    chances = Classifier(net, card_of(net, several, temperature)).chances
    found = faithfulness(net, pixels, maps, [1, 1, 1], chances=chances, steps=8)
    assert np.allclose(found.shares, np.arange(9) / 8)
    for image in range(3):
        order, grey = np.argsort(-patches[image]), patches[image].mean()
        for point, count in enumerate(range(0, 17, 2)):
            gone = patches[image].copy()
            gone[order[:count]] = grey
            shown = np.full(16, grey)
            shown[order[:count]] = patches[image][order[:count]]
            for curve, values in ((found.deletion, gone), (found.insertion, shown)):
                assert curve[image, point] == pytest.approx(1 / (1 + np.exp(-values.mean() / temperature)), abs=1e-5)
    reversed_ = faithfulness(net, pixels, -maps, [1, 1, 1], chances=chances, steps=8)
    assert (found.deletion_area < reversed_.deletion_area).all()
    assert (found.insertion_area > reversed_.insertion_area).all()


def test_the_truth_beats_a_random_order_and_its_opposite_loses():
    net = brightness_net()
    pixels = 10 * torch.randn(40, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    truth = patches_of(pixels, net).reshape(-1, 4, 4)
    classes = [1] * 40
    areas = {
        name: faithfulness(net, pixels, maps, classes).deletion_area
        for name, maps in {"truth": truth, "opposite": -truth, "random": random_maps(truth)}.items()
    }
    assert gain(areas["random"], areas["truth"]).verdict == "better"
    assert gain(areas["random"], areas["opposite"]).verdict == "worse"
    same = gain(areas["random"], areas["random"])
    assert same.verdict == "no clear difference" and same.low == same.value == same.high == 0


def test_a_map_without_order_is_not_the_order_of_reading():
    """Equal patches go in random order: a constant map scores like chance, not like "from the top"."""
    net = brightness_net()
    pixels = torch.zeros(60, 1, 8, 8)
    pixels[:, :, :2] = 4.0  # all there is stands in the first row
    found = faithfulness(net, pixels, np.ones((60, 4, 4)), [1] * 60)
    assert len({tuple(row) for row in found.deletion.round(6).tolist()}) > 5


def test_fewer_patches_than_steps_and_images_that_are_not_square():
    found = faithfulness(random_net(), noise(), np.ones((2, 2, 3)), [0, 1])
    assert found.deletion.shape == (2, 7) and np.allclose(found.deletion[:, 0], found.insertion[:, -1])


def test_pasted_pictures_change_the_answer_and_nothing_outside_their_box():
    net = brightness_net()
    dark, bright = torch.full((4, 1, 8, 8), -1.0), torch.full((4, 1, 8, 8), 9.0)
    images = torch.cat([dark, bright]) + 0.1 * torch.rand(8, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    found = paste(net, images, wanted=20)
    assert len(found.pixels) == 20 and found.tried >= 20 and found.chance == pytest.approx(4 / 16)
    assert (found.classes == 1).all() and (found.backgrounds == 0).all()  # a dark quarter does not outweigh the rest
    pixels = found.inside.repeat(2, axis=1).repeat(2, axis=2)
    made = found.pixels[:, 0].numpy()
    assert (made[pixels] > 8).all() and (made[~pixels] < 0).all()
    hits, share = pointing(patches_of(found.pixels, net).reshape(-1, 4, 4).clip(0), found.inside)
    assert (hits == 1).all() and np.allclose(share, 1)


def test_maps_of_a_network_that_goes_by_its_attention_find_every_pasted_picture():
    net = attending_net()
    found = paste(net, dark_and_bright(), wanted=20)
    assert len(found.pixels) == 20
    for maps in (relevance(net, found.pixels, found.classes, found.backgrounds), rollout(net, found.pixels)):
        assert (pointing(maps, found.inside)[0] == 1).all()


def test_maps_of_a_network_without_attention_find_none():
    """A network that only averages has no attention to explain it: relevance is empty, and scores like chance."""
    net = brightness_net()
    found = paste(net, dark_and_bright(), wanted=20)
    assert len(found.pixels) == 20
    maps = relevance(net, found.pixels, found.classes, found.backgrounds)
    assert maps.max() == 0 and np.allclose(pointing(maps, found.inside)[0], 1 / 4)


def test_images_of_one_class_cannot_be_pasted_into_each_other():
    found = paste(brightness_net(), torch.ones(4, 1, 8, 8), wanted=8)
    assert len(found.pixels) == found.tried == 0 and found.inside.shape == (0, 4, 4)


def test_pointing_of_a_flat_map_is_chance():
    inside = np.zeros((2, 4, 4), bool)
    inside[:, :2, :2] = True
    for flat in (np.zeros((2, 4, 4)), np.ones((2, 4, 4))):
        hits, share = pointing(flat, inside)
        assert np.allclose(hits, 1 / 4) and np.allclose(share, 1 / 4)
