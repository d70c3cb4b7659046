"""`vitrail convert`: any layout into any other, with the libraries' own networks beside, or nothing at all."""

from __future__ import annotations

import errno
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from tests.weights.configs import card_of, random_state
from vitrail.cli import main
from vitrail.config import ModelConfig, StemConfig
from vitrail.errors import UserError
from vitrail.runs.convert import parse_size
from vitrail.weights.bundle import write_bundle
from vitrail.weights.layout import Layout
from vitrail.weights.read import read_weights

pytest.importorskip("timm")
pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:Cyclopts application invoked")

FIXTURES = Path(__file__).parents[1] / "fixtures"
SMALL = {"width": 48, "depth": 2, "mlp_dim": 96, "heads": 3, "patch": (8, 8), "image_size": (32, 32), "num_classes": 5}
PLACES = {"vitrail": "{}.safetensors", "google": "{}.npz", "timm": "{}", "huggingface": "{}"}


def differences(said: str) -> list[float]:
    return [float(text) for text in re.findall(r"outputs differ by at most (\S+),", said)]


@pytest.mark.parametrize("pair", list(itertools.permutations(PLACES, 2)), ids="-to-".join)
def test_every_pair_of_layouts(tmp_path, convert, ours, pair):
    """From ours to the first and on to the second: each time the other library's network answers the same."""
    source, target = (tmp_path / PLACES[layout].format(f"{index}-{layout}") for index, layout in enumerate(pair))
    if pair[0] == "vitrail":
        source = ours()
    else:
        assert convert(ours(), source, "--to", pair[0])[0] == 0
    code, said, error = convert(source, target, "--to", pair[1], "--adopt-constants")
    assert (code, error) == (0, ""), error
    found = differences(said)
    assert len(found) == sum(layout != "vitrail" for layout in pair) and max(found) < 1e-5
    state = random_state(ModelConfig(**SMALL))
    back = read_weights(str(target))
    assert all(torch.equal(tensor, state[name]) for name, tensor in back.state.items())
    names = tuple(f"LABEL_{index}" for index in range(5)) if pair[1] == "huggingface" else ()  # it always has some
    assert back.card.classes == (names if "google" in pair else tuple("abcde"))
    assert (back.card.licence == "CC0") == ("google" not in pair)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_what_it_says(tmp_path, convert, ours):
    code, said, _ = convert(ours(), tmp_path / "vit.npz", "--to", "google")
    assert code == 0
    assert "vitrail weights: Vision Transformer: width 48, depth 2, 3 heads, MLP 96, patches of 8x8" in said
    assert "read back: every tensor is the same, bit for bit" in said
    assert "left behind, for want of a place: preprocessing, class names, the licence, the record of training" in said
    assert f"wrote {tmp_path / 'vit.npz'}" in said


def test_constants_that_differ_are_taken_only_when_asked(tmp_path, convert, ours):
    source = ours(gelu="erf", norm_eps=1e-2, stem=StemConfig(weight_eps=1e-2), image_size=(64, 64))
    code, _, error = convert(source, tmp_path / "vit.npz", "--to", "google")
    assert code == 2 and not (tmp_path / "vit.npz").exists()
    assert "model.stem.weight_eps 0.01 -> 1e-05; model.gelu erf -> tanh; model.norm_eps 0.01 -> 1e-06" in error
    assert "--adopt-constants" in error
    code, said, _ = convert(source, tmp_path / "vit.npz", "--to", "google", "--adopt-constants")
    assert code == 0 and "constants of Google's code: " in said
    assert float(re.search(r"cost of these constants: outputs differ by up to (\S+) ", said)[1]) > 1e-4
    assert "(timm has other constants than Google's code)" in said


def test_preprocessing_that_the_target_cannot_do(tmp_path, convert):
    source = FIXTURES / "google_vit_token.npz"
    code, _, error = convert(source, tmp_path / "t", "--to", "timm", "--image-size", "16x24")
    assert code == 2 and "preprocess.antialias False -> True" in error
    code, said, _ = convert(source, tmp_path / "t", "--to", "timm", "--image-size", "16x24", "--adopt-constants")
    assert code == 0 and "images alone can show" in said and "cost" not in said


def test_a_hybrid_from_google_to_timm(tmp_path, convert):
    """Named stems alone: the fixture's is refused, with what timm has."""
    source = FIXTURES / "google_hybrid_stem_only.npz"
    code, _, error = convert(source, tmp_path / "t", "--to", "timm", "--adopt-constants")
    assert code == 2 and "timm cannot express this network: it has stems of 64 channels" in error
    assert not list(tmp_path.iterdir())


def test_a_pickle(tmp_path, convert, ours):
    assert convert(ours(), tmp_path / "timm", "--to", "timm")[0] == 0
    (tmp_path / "old").mkdir()
    values = {"state_dict": load_file(tmp_path / "timm" / "model.safetensors")}
    torch.save(values, tmp_path / "old" / "pytorch_model.bin")
    (tmp_path / "timm" / "config.json").rename(tmp_path / "old" / "config.json")
    code, _, error = convert(tmp_path / "old", tmp_path / "new.safetensors", "--to", "vitrail")
    assert code == 2 and "--allow-pickle" in error
    code, said, error = convert(tmp_path / "old", tmp_path / "new.safetensors", "--to", "vitrail", "--allow-pickle")
    assert code == 0 and differences(said)[0] < 1e-5


@pytest.mark.parametrize("to", ["timm", "google"])
def test_overwrite(tmp_path, convert, ours, to):
    target = tmp_path / PLACES[to].format("target")
    assert convert(ours(), target, "--to", to)[0] == 0
    other = ours("other.safetensors", depth=1)
    assert convert(other, target, "--to", to)[0] == 2
    assert read_weights(str(target)).card.model.depth == 2
    assert convert(other, target, "--to", to, "--overwrite")[0] == 0
    assert read_weights(str(target)).card.model.depth == 1
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("to", ["timm", "huggingface", "google"])
def test_a_network_that_answers_otherwise_is_not_kept(tmp_path, convert, ours, monkeypatch, to):
    """The check is real: with two tensors exchanged on the way, nothing is written."""
    write = Layout.write

    def wrong(self, state, heads):
        first, second = "encoder.blocks.0.norm1.weight", "encoder.blocks.0.norm2.weight"
        return write(self, {**state, first: state[second], second: state[first]}, heads)

    monkeypatch.setattr(Layout, "write", wrong)
    source = ours()
    code, _, error = convert(source, tmp_path / PLACES[to].format("target"), "--to", to)
    assert code == 2 and "answer otherwise" in error
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.parametrize("to", ["timm", "huggingface", "google"])
def test_without_the_other_library(tmp_path, convert, ours, monkeypatch, to):
    for name in ("timm", "transformers"):
        monkeypatch.setitem(sys.modules, name, None)
    code, said, _ = convert(ours(), tmp_path / PLACES[to].format("target"), "--to", to)
    library = "transformers" if to == "huggingface" else "timm"
    assert code == 0 and f": {library} is not installed" in said and not differences(said)
