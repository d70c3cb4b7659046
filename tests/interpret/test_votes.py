"""Votes of patches: they add up to the logits; networks without mean pooling have none."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.interpret.nets import KINDS, brightness_net, dark_and_bright, noise, patches_of, random_net
from vitrail.errors import UserError
from vitrail.interpret.relevance import relevance
from vitrail.interpret.votes import can_vote, class_map, votes

VOTING = ("mean", "mean with class token", "axial")


@pytest.mark.parametrize("kind", KINDS)
def test_votes_add_up_to_the_logits(kind):
    net, pixels = random_net(**KINDS[kind]), noise()
    assert can_vote(net) == (kind in VOTING)
    if kind not in VOTING:
        with pytest.raises(UserError, match="relevance"):
            votes(net, pixels, [1, 2])
        assert np.array_equal(class_map(net, pixels, [1, 2]), relevance(net, pixels, [1, 2]))
        return
    logits, bias = net(pixels), net.head.bias
    for against in ([4, 0], None):
        found = votes(net, pixels, [1, 2], against)
        assert found.shape == (2, *net.config.grid)
        plain = logits - bias
        reference = plain.mean(1) if against is None else plain[[0, 1], against]
        torch.testing.assert_close(
            torch.from_numpy(found.mean((1, 2))), plain[[0, 1], [1, 2]] - reference, atol=1e-5, rtol=0
        )
        assert np.array_equal(class_map(net, pixels, [1, 2], against), found.clip(0))


def test_votes_equal_brightness_where_patches_are_independent():
    net, pixels = brightness_net(), dark_and_bright(2)
    found = votes(net, pixels, [1] * 4, [0] * 4).reshape(4, -1)
    assert np.allclose(found, patches_of(pixels, net), atol=1e-6)


def test_votes_of_a_network_with_one_class():
    net, pixels = random_net(num_classes=1, **KINDS["mean"]), noise()
    found = torch.from_numpy(votes(net, pixels, [0, 0]).mean((1, 2)))
    torch.testing.assert_close(found, (net(pixels) - net.head.bias)[:, 0], atol=1e-5, rtol=0)
