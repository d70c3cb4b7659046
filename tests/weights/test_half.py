"""`vitrail convert --half`: half the size, the same card, nearly the same predictions."""

from __future__ import annotations

import pytest
import torch

from tests.weights.configs import SMALL, card_of, outputs, pixels_for, random_state
from vitrail.config import ModelConfig
from vitrail.report.provenance import provenance
from vitrail.weights.bundle import read_bundle, read_card, write_bundle
from vitrail.weights.read import read_weights
from vitrail.weights.safetensors_file import read_header

pytestmark = pytest.mark.filterwarnings("ignore:Cyclopts application invoked")


def test_half_size_same_card_and_similar_outputs(tmp_path, convert, vitrail_file):
    source, target = vitrail_file(), tmp_path / "half.safetensors"
    code, output, error = convert(source, target, "--to", "vitrail", "--half")
    assert (code, error) == (0, "") and "effect of float16" in output
    assert set(read_header(target).dtypes.values()) == {"F16"}
    numbers = sum(tensor.numel() for tensor in read_weights(source).state.values())
    assert source.stat().st_size - target.stat().st_size == pytest.approx(2 * numbers, abs=100)
    before, after = read_card(source), read_card(target)
    assert (before.stored, after.stored) == ("float32", "float16")
    assert after.model_copy(update={"stored": "float32"}) == before
    assert ("weights dtype", "float16") in provenance(after)
    model = ModelConfig(**SMALL)
    pixels, state = pixels_for(model), read_weights(target).state
    assert all(tensor.dtype == torch.float32 for tensor in state.values())
    assert (outputs(model, state, pixels) - outputs(model, random_state(model), pixels)).abs().max() < 1e-2


def test_half_precision_input_is_written_as_float32(tmp_path, convert, vitrail_file):
    half, whole = tmp_path / "half.safetensors", tmp_path / "whole.safetensors"
    convert(vitrail_file(), half, "--to", "vitrail", "--half")
    assert convert(half, whole, "--to", "vitrail")[0] == 0
    assert read_card(whole).stored == "float32"
    assert all(torch.equal(tensor, read_bundle(half)[1][name]) for name, tensor in read_bundle(whole)[1].items())


def test_other_layouts_and_numbers_that_do_not_fit_are_refused(tmp_path, convert, vitrail_file):
    error = convert(vitrail_file(), tmp_path / "vit.npz", "--to", "google", "--half")[2]
    assert "--half" in error and "--to vitrail" in error
    model = ModelConfig(**SMALL)
    state = random_state(model)
    state["head.bias"][0] = 1e6
    write_bundle(tmp_path / "large.safetensors", state, card_of(model))
    target = tmp_path / "half.safetensors"
    code, _, error = convert(tmp_path / "large.safetensors", target, "--to", "vitrail", "--half")
    assert code == 2 and "'head.bias'" in error and "float16" in error and not target.exists()


def test_a_licence_can_be_stated(tmp_path, convert, vitrail_file):
    target = tmp_path / "licence.safetensors"
    assert convert(vitrail_file(), target, "--to", "vitrail", "--licence", "research only")[0] == 0
    assert read_card(target).licence == "research only"
