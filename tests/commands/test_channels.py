"""Networks for images of one, three or four channels, from the setting to the pixels."""

from __future__ import annotations

import pytest
import torch

from tests.data.images import MemorySource
from vitrail.config import AugmentConfig, ModelChoice, validate
from vitrail.data.loader.loader import training_loader
from vitrail.data.loader.reader import Reader
from vitrail.data.transforms import normalise, resolve_preprocess
from vitrail.errors import UserError
from vitrail.models.build import build_model
from vitrail.workflows.network import network_from_weights, new_network


@pytest.mark.parametrize("name", ["Ti/16", "R+Ti/16", pytest.param("R50x1", marks=pytest.mark.slow)])
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_a_network_takes_what_the_loader_makes(name: str, channels: int) -> None:
    choice = ModelChoice(name=name, image_size=(32, 32), channels=channels)
    model = new_network(choice, 5)
    assert model.channels == channels
    spec = resolve_preprocess(model.image_size, None, {}, model.channels)
    loader = training_loader(Reader(MemorySource.noise(4), spec, 10**6), 2, AugmentConfig(), 0, 0, torch.device("cpu"))
    pixels = normalise(next(loader.from_step(0, 1)).pixels, spec)
    assert pixels.shape == (2, channels, 32, 32)
    assert build_model(model)(pixels).shape == (2, 5)


def test_a_new_network_takes_rgb_by_default() -> None:
    assert new_network(ModelChoice(name="Ti/16"), 5).channels == 3


def test_the_channels_must_be_those_of_the_starting_weights() -> None:
    start = new_network(ModelChoice(name="Ti/16", channels=1), 5)
    assert network_from_weights(start, ModelChoice(), 7).channels == 1
    assert network_from_weights(start, ModelChoice(channels=1), 7).channels == 1
    with pytest.raises(UserError, match=r"model\.channels=3, .* 1 channels"):
        network_from_weights(start, ModelChoice(channels=3), 7)


def test_two_channels_are_refused() -> None:
    with pytest.raises(UserError, match="channels"):
        validate(ModelChoice, {"name": "Ti/16", "channels": 2}, "model")
