"""Round trips through other layouts, and errors for networks that a layout cannot represent."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.weights.configs import card_of, outputs, pixels_for, random_state, resnets, vits
from vitrail.config import ModelConfig
from vitrail.errors import UserError
from vitrail.weights.bundle import Card
from vitrail.weights.formats import format_named
from vitrail.weights.read import Weights, read_weights

pytestmark = pytest.mark.slow  # many networks, each written and read
FILES = {"vitrail": "model.safetensors", "google": "model.npz"}
NOT_STORED = {"dropout", "drop_path", "head_bias"}  # settings of training, which only vitrail's layout stores


def back(card: Card, state: dict[str, torch.Tensor], to: str) -> Weights:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / FILES.get(to, "")
        format_named(to).write(path, format_named(to).adopt_constants(card), state)
        return read_weights(str(path), image_size=card.model.image_size)


def keeps_its_tensors(model: ModelConfig, to: str) -> bool:
    """Whether the layout stores the tensors unchanged; otherwise positions are converted."""
    if to == "vitrail":
        return True
    if to == "google":
        return model.positions == "sincos" or (model.positions == "1d" and (model.prefix_positions or not model.stem))
    if to == "huggingface":
        return model.positions == "1d" and model.prefix_positions and not model.registers
    return model.positions in ("1d", "none")


def settings_of(model: ModelConfig, to: str) -> dict[str, object]:
    values = model.model_dump(exclude=NOT_STORED)
    if not model.prefix or model.positions != "1d":
        values.pop("prefix_positions")  # has no effect then
    if to == "google" and values["pool"] == "map":
        values.pop("prefix_positions", None)
    return values


GOOGLE = {"norm": "before_pool", "registers": 0, "layer_scale": None}
VIT = {"pool": "token", "norm": "before_pool", "stem": None, "registers": 0, "layer_scale": None, "representation": 0}
DINOV2 = {**VIT, "registers": 2, "layer_scale": 0.5, "num_classes": 0, "patch": (2, 2), "image_size": (6, 6)}
# Random networks, many of which the layout supports.
LIKELY = {
    "vitrail": vits(),
    "timm": vits(representation=0) | vits(),
    "huggingface": vits(**VIT) | vits(**{**VIT, "num_classes": 0, "representation": 6}) | vits(**DINOV2) | vits(),
    "google": vits(**GOOGLE) | vits(**GOOGLE, pool="gap", class_token=False) | vits(**GOOGLE, pool="map", stem=None),
}


@pytest.mark.parametrize("to", ["vitrail", "timm", "huggingface", "google"])
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_vision_transformers(to, data):
    model, seed = data.draw(LIKELY[to]), data.draw(st.integers(0, 9))
    card = card_of(model, classes=tuple(f"c{index}" for index in range(model.num_classes)))
    try:
        format_named(to).check_expressible(card, adopt=True)
    except UserError as error:
        assert "cannot represent this network" in str(error) and "\n" not in str(error)
        return
    state = random_state(model, seed)
    weights = back(card, state, to)
    adopted = format_named(to).adopt_constants(card)
    if keeps_its_tensors(model, to):
        assert weights.state.keys() == state.keys()
        assert all(torch.equal(weights.state[name], tensor) for name, tensor in state.items())
        assert settings_of(weights.card.model, to) == settings_of(adopted.model, to)
    pixels = pixels_for(model)
    expected = outputs(adopted.model, state, pixels)
    torch.testing.assert_close(outputs(weights.card.model, weights.state, pixels), expected, rtol=1e-5, atol=1e-5)
    if to != "google":
        assert weights.card.classes == card.classes
        assert weights.card.preprocess == adopted.preprocess


@pytest.mark.parametrize("to", ["vitrail", "google", "huggingface"])
@settings(max_examples=20, deadline=None)
@given(model=resnets())
def test_resnets(to, model):
    state, card = random_state(model), card_of(model)
    assert to == "huggingface" or format_named(to).adopt_constants(card).model == model
    weights = back(card, state, to)
    assert weights.card.model == format_named(to).adopt_constants(card).model
    assert weights.card.classes == ()
    assert weights.state.keys() == state.keys()
    assert all(torch.equal(weights.state[name], tensor) for name, tensor in state.items())


@given(fraction=st.floats(0.5, 1), resize=st.sampled_from(["squash", "short_side"]), bicubic=st.booleans())
@settings(max_examples=30, deadline=None)
@pytest.mark.parametrize("to", ["timm", "huggingface"])
def test_preprocessing(to, fraction, resize, bicubic):
    """transformers stores the resized side in whole pixels, so only that is compared."""
    model = ModelConfig(width=4, depth=1, mlp_dim=4, heads=1, patch=(8, 8), image_size=(32, 32), num_classes=0)
    spec = {"resize": resize, "crop_fraction": 1.0 if resize == "squash" else fraction, "mean": (0.1, 0.2, 0.3)}
    spec |= {"interpolation": "bicubic" if bicubic else "bilinear", "std": (0.4, 0.5, 0.6)}
    card = card_of(model)
    card = card.model_copy(update={"preprocess": card.preprocess.model_copy(update=spec), "licence": "CC0"})
    restored = back(card, random_state(model), to).card
    exact = restored.preprocess.model_copy(update={"crop_fraction": card.preprocess.crop_fraction})
    assert exact == card.preprocess
    assert int(32 / restored.preprocess.crop_fraction + 1e-6) == int(32 / card.preprocess.crop_fraction + 1e-6)
    assert restored.licence == "CC0"


@pytest.mark.slow
def test_reading_does_not_import_a_compiler(tmp_path):
    """Importing torch's compiler takes a second, and some operations on meta tensors would import it."""
    model = ModelConfig(width=4, depth=1, mlp_dim=4, heads=1, patch=(8, 8), image_size=(16, 16), num_classes=0)
    dinov2 = model.model_copy(update={"registers": 2, "layer_scale": 0.5})
    for to, network in (("timm", dinov2), ("huggingface", dinov2), ("google", model)):
        (tmp_path / to).mkdir()
        format_named(to).write(tmp_path / to / FILES.get(to, ""), card_of(network), random_state(network))
    specs = [str(tmp_path / to) for to in ("timm", "huggingface", "google")]
    code = (
        "import sys; from vitrail.weights.read import read_weights\n"
        f"for spec in {specs}: read_weights(spec)\n"
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2]).returncode == 0
