"""Weights specs: `bundled` means the weights of the package, a path is a path."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import vitrail
from vitrail.errors import UserError
from vitrail.weights import names
from vitrail.weights.bundle import read_card, read_trained_on
from vitrail.weights.names import BUNDLED_FILE, absolute_spec, local_path, weights_spec
from vitrail.weights.read import read_weights


@pytest.fixture
def bundled(vitrail_file, monkeypatch) -> Path:
    file = vitrail_file("ti8-stand-in.safetensors")
    monkeypatch.setattr(names, "BUNDLED_FILE", file)
    return file


def test_the_name_is_read_from_the_package(bundled):
    weights = read_weights("bundled")
    assert weights.file == bundled and weights.origin == "bundled ti8-stand-in" and weights.card == read_card(bundled)
    assert vitrail.load("bundled").classes == tuple("abcde")


def test_file_named_bundled_needs_a_path(bundled, vitrail_file, tmp_path, monkeypatch):
    """`bundled` has the same meaning in every folder."""
    vitrail_file("bundled", num_classes=2)
    monkeypatch.chdir(tmp_path)
    assert read_weights("bundled").file == bundled
    for path in ("./bundled", str(tmp_path / "bundled"), Path("bundled")):
        assert read_weights(path).card.classes == ("a", "b")
    assert weights_spec(Path("bundled")) == "./bundled" and weights_spec(Path("a/bundled")) == "a/bundled"
    assert absolute_spec("bundled") == "bundled" and absolute_spec("./bundled") == str(tmp_path / "bundled")
    assert local_path("hf-hub:bundled/bundled") is None


def test_missing_bundled_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(names, "BUNDLED_FILE", tmp_path / "gone.safetensors")
    with pytest.raises(UserError, match=r"\(gone\.safetensors\).*reinstall vitrail"):
        read_weights("bundled")


def test_the_bundled_file_has_the_documented_facts():
    """The card describes Ti/8 at 64 px."""
    card = read_card(BUNDLED_FILE)
    assert BUNDLED_FILE.stat().st_size < 13e6 and card.stored == "float16"
    assert card.recipe["model"]["name"] == "Ti/8" and card.model.image_size == (64, 64)
    assert (card.model.pool, card.model.positions, card.model.num_classes) == ("gap", "sincos", 200)
    assert len(card.classes) == 200 and card.licence and card.data["name"]
    assert len(read_trained_on(BUNDLED_FILE)) > card.data["images"]["train"]  # by their pixels, and by their files
    assert 0 < card.metrics["top1"] < 1 and card.metrics["measured_on"]
    clf = vitrail.load("bundled")
    grey = torch.zeros(1, 3, 64, 64)
    assert torch.isfinite(clf.net(grey)).all()
