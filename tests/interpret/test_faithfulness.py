"""Deletion and insertion curves on networks whose logits are known in closed form."""

import numpy as np
import pytest
import torch

from tests.interpret.nets import brightness_net, noise, patches_of, random_net
from vitrail.config import Preprocess
from vitrail.inference.classifier import Classifier
from vitrail.interpret.faithfulness import deletion_insertion, paired_gain, random_maps
from vitrail.weights.bundle import Card, Postprocess


def card_of(net, multilabel, temperature):
    spec = Preprocess(size=net.config.image_size, mean=(0.5,), std=(0.5,))
    postprocess = Postprocess(temperature=temperature)
    return Card(
        model=net.config,
        preprocess=spec,
        created_with="a test",
        task="multilabel" if multilabel else "classification",
        postprocess=postprocess,
    )


@pytest.mark.parametrize("multilabel", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_curves_equal_those_computed_patch_by_patch(multilabel, temperature):
    net = brightness_net()
    pixels = 10 * torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    patches = patches_of(pixels, net)
    maps = patches.reshape(3, 4, 4)  # the true map: brighter patches are evidence for the second class
    to_probabilities = Classifier(net, card_of(net, multilabel, temperature)).probabilities
    found = deletion_insertion(net, pixels, maps, [1, 1, 1], to_probabilities=to_probabilities, steps=8)
    assert np.allclose(found.fractions, np.arange(9) / 8)
    for image in range(3):
        order, grey = np.argsort(-patches[image]), patches[image].mean()
        for point, count in enumerate(range(0, 17, 2)):
            deleted = patches[image].copy()
            deleted[order[:count]] = grey
            inserted = np.full(16, grey)
            inserted[order[:count]] = patches[image][order[:count]]
            for curve, values in ((found.deletion, deleted), (found.insertion, inserted)):
                assert curve[image, point] == pytest.approx(1 / (1 + np.exp(-values.mean() / temperature)), abs=1e-5)
    reversed_ = deletion_insertion(net, pixels, -maps, [1, 1, 1], to_probabilities=to_probabilities, steps=8)
    assert (found.deletion_area < reversed_.deletion_area).all()
    assert (found.insertion_area > reversed_.insertion_area).all()


def test_the_true_map_beats_a_random_one_and_its_opposite_loses():
    net = brightness_net()
    pixels = 10 * torch.randn(40, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    truth = patches_of(pixels, net).reshape(-1, 4, 4)
    classes = [1] * 40
    areas = {
        name: deletion_insertion(net, pixels, maps, classes).deletion_area
        for name, maps in {"truth": truth, "opposite": -truth, "random": random_maps(truth)}.items()
    }
    assert paired_gain(areas["random"], areas["truth"]).verdict == "better"
    assert paired_gain(areas["random"], areas["opposite"]).verdict == "worse"
    same = paired_gain(areas["random"], areas["random"])
    assert same.verdict == "no clear difference" and same.low == same.value == same.high == 0


def test_ties_are_broken_at_random():
    """A constant map scores at chance, not like deletion from the top."""
    net = brightness_net()
    pixels = torch.zeros(60, 1, 8, 8)
    pixels[:, :, :2] = 4.0  # only the first row of patches is bright
    found = deletion_insertion(net, pixels, np.ones((60, 4, 4)), [1] * 60)
    assert len({tuple(row) for row in found.deletion.round(6).tolist()}) > 5
    # Deleted patches get the mean colour: in a random order the mean logit stays 1.
    chance = 1 / (1 + np.exp(-1))
    assert np.allclose(found.deletion.mean(0), chance, atol=0.03)
    assert np.allclose(found.insertion.mean(0), chance, atol=0.03)
    for order in (range(16), range(15, -1, -1)):  # from the top, and from the bottom
        ordered = deletion_insertion(net, pixels, np.array([order] * 60).reshape(60, 4, 4), [1] * 60)
        assert abs(ordered.deletion.mean(0) - chance).max() > 0.1
    again = deletion_insertion(net, pixels, np.ones((60, 4, 4)), [1] * 60)
    assert np.array_equal(found.deletion, again.deletion) and np.array_equal(found.insertion, again.insertion)


def test_fewer_patches_than_steps_and_non_square_images():
    found = deletion_insertion(random_net(), noise(), np.ones((2, 2, 3)), [0, 1])
    assert found.deletion.shape == (2, 7) and np.allclose(found.deletion[:, 0], found.insertion[:, -1])
