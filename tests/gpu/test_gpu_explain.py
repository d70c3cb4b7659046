"""Explanations on CUDA are equal to those on the CPU, with any attention kernel."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.interpret.nets import KINDS, noise, random_net
from vitrail.interpret.distance import attention_distances
from vitrail.interpret.faithfulness import deletion_insertion
from vitrail.interpret.pointing_game import paste_images
from vitrail.interpret.position_similarity import position_similarity
from vitrail.interpret.relevance import relevance
from vitrail.interpret.rollout import rollout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; run with `make gpu`"),
]


@pytest.mark.parametrize("kind", KINDS)
def test_maps_and_distances(kind):
    results = []
    for device in ("cpu", "cuda"):
        net, pixels = random_net(**KINDS[kind]).to(device), noise().to(device)
        maps = rollout(net, pixels)
        distances = attention_distances(net, [pixels])
        curves = deletion_insertion(net, pixels, maps, [0, 1])
        results.append([maps, relevance(net, pixels, [1, 3], [0, 0]), distances.pixels, curves.deletion])
    for here, there in zip(*results, strict=True):
        assert np.allclose(here, there, rtol=1e-3, atol=1e-4)


def test_positions_and_pasted_pictures():
    net = random_net().to("cuda")
    assert np.allclose(position_similarity(net), position_similarity(random_net()), atol=1e-5)
    assert paste_images(net, noise(8).to("cuda"), number=4).pixels.device.type == "cuda"
