"""Checksums: damage anywhere is detected, NaN weights are rejected, older files still load."""

from __future__ import annotations

import json
import random
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, safe_open, save_file

import vitrail
from tests.weights.configs import SMALL, card_of, random_state
from vitrail.config import ModelConfig
from vitrail.errors import Note, UserError
from vitrail.weights.bundle import (
    FORMAT,
    TRAINED_ON,
    digest_tensor,
    read_bundle,
    read_card,
    read_trained_on,
    replace_card,
    write_bundle,
)
from vitrail.weights.checksum import tensors_checksum
from vitrail.weights.formats import format_named
from vitrail.weights.names import BUNDLED_FILE
from vitrail.weights.read import read_weights

DIGESTS = np.random.default_rng(0).integers(0, 2**64, 300, np.uint64)


@pytest.fixture
def file(tmp_path) -> Path:
    path, model = tmp_path / "model.safetensors", ModelConfig(**SMALL)
    card = card_of(model, classes=("a", "b", "c", "é", "/e"), metrics={"loss": 1e-05, "top1": 0.25})
    write_bundle(path, {**random_state(model), TRAINED_ON: digest_tensor(DIGESTS)}, card)
    return path


def first_format(path: Path) -> Path:
    """Rewrite the file in its first format, without checksums."""
    with safe_open(path, "pt") as file:
        document = json.loads(file.metadata()["vitrail"])
    del document["checksums"]
    weights = {name: tensor.clone() for name, tensor in load_file(path).items() if name != TRAINED_ON}
    save_file(weights, path, metadata={"vitrail": json.dumps(document | {"format": 1})})
    return path


@pytest.mark.slow
def test_flipped_bits_are_detected(file):
    content = file.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    digests_start = len(content) - DIGESTS.nbytes  # digests of training images, which only `evaluate` reads
    rng = random.Random(1)
    bits = [rng.randrange(8 * len(content)) for _ in range(200)]
    bits += [rng.randrange(8 * header) for _ in range(100)] + [rng.randrange(8 * digests_start, 8 * len(content))]
    for bit in bits:
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        with pytest.raises(UserError):
            (read_bundle if bit < 8 * digests_start else read_trained_on)(file)
        if bit < 8 * header:
            with pytest.raises(UserError):
                read_card(file)


def test_replacing_the_card_does_not_hide_damage(file):
    card, before = read_card(file), load_file(file)
    replace_card(file, card.model_copy(update={"licence": "CC0"}))
    assert read_bundle(file)[0].licence == "CC0" and (read_trained_on(file) == np.sort(DIGESTS)).all()
    assert all(torch.equal(tensor, before[name]) for name, tensor in load_file(file).items())
    content = bytearray(file.read_bytes())
    content[-DIGESTS.nbytes - 100] ^= 4
    file.write_bytes(content)
    replace_card(file, card)
    with pytest.raises(UserError):
        read_bundle(file)


def test_missing_or_invalid_checksums_are_rejected(file):
    weights = {name: tensor.clone() for name, tensor in load_file(file).items()}
    with safe_open(file, "pt") as opened:
        document = json.loads(opened.metadata()["vitrail"])
    for change in ({}, {"weights": 3}, {"weights": "G" * 32}, [], None, {"header": ""}):
        sums = {**document["checksums"], **change} if isinstance(change, dict) and change else change
        save_file(weights, file, metadata={"vitrail": json.dumps(document | {"checksums": sums})})
        with pytest.raises(UserError):
            read_card(file)


def test_file_of_the_first_format_gets_checksums_with_a_new_card(file):
    first_format(file)
    with pytest.warns(Note, match="without checksums"):
        card, state = read_bundle(file)
    assert read_trained_on(file).shape == (0,) and card.format == 1
    replace_card(file, card)
    with warnings.catch_warnings(action="error"):
        again, same = read_bundle(file)
    assert again.format == FORMAT and all(torch.equal(same[name], tensor) for name, tensor in state.items())


def test_missing_checksums_are_reported_once(file, convert, tmp_path):
    first_format(file)
    code, _, error = convert(file, tmp_path / "new.safetensors", "--to", "vitrail")
    assert code == 0 and error.count("without checksums") == 1 and ".py:" not in error
    assert convert(tmp_path / "new.safetensors", tmp_path / "again.safetensors", "--to", "vitrail")[2] == ""


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("layout", ["vitrail", "timm", "huggingface", "google"])
def test_non_finite_weights_are_rejected_in_every_layout(tmp_path, layout, value):
    model = ModelConfig(**{**SMALL, "gelu": "erf", "norm_eps": 1e-6})
    card, state = card_of(model, classes=tuple("abcde")), random_state(model)
    if layout == "huggingface":
        card = format_named("huggingface").adopt_constants(card)
    state["blocks.1.mlp.fc1.weight"][3, 4] = value
    path = tmp_path / {"vitrail": "a.safetensors", "google": "a.npz"}.get(layout, "a")
    if format_named(layout).folder:
        path.mkdir()
    format_named(layout).write(path, card, state)
    with pytest.raises(UserError, match=r"NaN|infinite"):
        read_weights(path)
    with pytest.raises(UserError, match=r"NaN|infinite"):
        vitrail.load(path)


def test_large_weights_that_are_finite_are_read(tmp_path):
    model = ModelConfig(**SMALL)
    state = random_state(model)
    state["head.weight"][:] = 3e38  # their sum overflows
    write_bundle(tmp_path / "a.safetensors", state, card_of(model))
    assert (read_weights(tmp_path / "a.safetensors").state["head.weight"] == 3e38).all()


def test_digests_of_training_images_are_a_tensor_in_vitrails_layout_only(file, convert, tmp_path):
    digests = load_file(file)[TRAINED_ON]
    assert digests.shape == (300, 8) and digests.dtype == torch.uint8
    assert TRAINED_ON not in read_weights(file).state
    assert (read_trained_on(file) == np.sort(DIGESTS)).all()
    assert convert(file, tmp_path / "half.safetensors", "--to", "vitrail", "--half")[0] == 0
    assert (read_trained_on(tmp_path / "half.safetensors") == np.sort(DIGESTS)).all()
    card, state = read_bundle(file)
    for layout in ("timm", "google"):
        path = tmp_path / {"google": "a.npz"}.get(layout, layout)
        if format_named(layout).folder:
            path.mkdir()
        format_named(layout).write(path, format_named(layout).adopt_constants(card), state)
    assert TRAINED_ON not in load_file(tmp_path / "timm" / "model.safetensors")
    assert TRAINED_ON not in np.load(tmp_path / "a.npz")


def test_the_bundled_weights_have_checksums_and_are_unchanged():
    with warnings.catch_warnings(action="error"):
        read_bundle(BUNDLED_FILE)
    weights = {name: tensor for name, tensor in load_file(BUNDLED_FILE).items() if name != TRAINED_ON}
    assert tensors_checksum(weights) == "0621a2296f01d500df51de3ba89b3158"


def test_the_checksum_covers_every_byte():
    tensors = {"a": torch.arange(2_500_000, dtype=torch.float32), "b": torch.zeros(0), "c": torch.tensor(1.5)}
    assert tensors_checksum(tensors) == tensors_checksum({name: tensors[name].clone() for name in reversed(tensors)})
    for index in (0, 1_048_575, 1_048_576, 2_499_999):
        changed = tensors["a"].clone()
        changed[index] += 1
        assert tensors_checksum(tensors | {"a": changed}) != tensors_checksum(tensors)
