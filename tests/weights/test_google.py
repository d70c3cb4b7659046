"""Google's .npz files, in every form they come in, against the original's own outputs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from vitrail.config import Preprocess
from vitrail.errors import UserError
from vitrail.weights.read import read_weights

FIXTURES = Path(__file__).parents[1] / "fixtures"
OLD_NUMBERS = {"MultiHeadDotProductAttention_0": "MultiHeadDotProductAttention_1", "MlpBlock_0": "MlpBlock_3"}
OLD_NUMBERS |= {"LayerNorm_1": "LayerNorm_2"}


def parameters(name: str) -> dict[str, np.ndarray]:
    file = np.load(FIXTURES / f"{name}.npz")
    return {key.removeprefix("params/"): file[key] for key in file.files if key.startswith("params/")}


def recorded(name: str) -> tuple[torch.Tensor, np.ndarray]:
    file = np.load(FIXTURES / f"{name}.npz")
    return torch.from_numpy(file["input"]).permute(0, 3, 1, 2), file["output/logits"]


def test_what_the_file_tells():
    card = read_weights(str(FIXTURES / "google_vit_representation.npz")).card
    assert card.model.model_dump() == {
        "width": 48, "depth": 2, "mlp_dim": 96, "heads": 3, "patch": (8, 8), "image_size": (16, 16), "num_classes": 5,
        "channels": 3, "class_token": True, "pool": "token", "norm": "before_pool", "representation": 48,
        "dropout": 0.0, "gelu": "tanh", "norm_eps": 1e-6, "head_bias": 0.0,
    }  # fmt: skip
    assert card.preprocess == Preprocess(size=(16, 16), resize="squash", interpolation="bilinear", antialias=False)
    assert card.preprocess.mean == card.preprocess.std == (0.5, 0.5, 0.5)  # pixels in [-1, 1]
    assert card.source == "fixtures/google_vit_representation.npz"


@pytest.mark.parametrize("prefix", ["", "opt/target/", "params/"])
@pytest.mark.parametrize("numbers", [{}, OLD_NUMBERS], ids=["new flax", "old flax"])
def test_every_naming_gives_the_recorded_logits(tmp_path, logits, prefix, numbers):
    renamed = {}
    for name, array in parameters("google_vit_representation").items():
        for new, old in numbers.items():
            name = name.replace(new, old)
        renamed[prefix + name] = array
    if prefix:
        renamed["step"] = np.array(7)  # what else training code keeps
    np.savez(tmp_path / "vit.npz", **renamed)
    pixels, expected = recorded("google_vit_representation")
    np.testing.assert_allclose(logits(read_weights(str(tmp_path / "vit.npz")), pixels), expected, rtol=1e-5, atol=3e-6)


def test_positions_that_leave_the_class_token_out(tmp_path, logits):
    """big_vision adds positions before the class token; moving its row into the token changes nothing."""
    arrays = parameters("google_vit_representation")
    positions = arrays.pop("Transformer/posembed_input/pos_embedding")
    arrays["pos_embedding"] = positions[:, 1:]
    arrays["cls"] = arrays["cls"] + positions[:, :1]
    np.savez(tmp_path / "vit.npz", **arrays)
    pixels, expected = recorded("google_vit_representation")
    np.testing.assert_allclose(logits(read_weights(str(tmp_path / "vit.npz")), pixels), expected, rtol=1e-5, atol=3e-6)


def test_without_head_the_features_come_out(tmp_path, logits):
    arrays = parameters("google_vit_representation")
    head = arrays.pop("head/kernel"), arrays.pop("head/bias")
    np.savez(tmp_path / "vit.npz", **arrays)
    weights = read_weights(str(tmp_path / "vit.npz"))
    pixels, expected = recorded("google_vit_representation")
    assert weights.card.model.num_classes == 0
    np.testing.assert_allclose(logits(weights, pixels).numpy() @ head[0] + head[1], expected, rtol=1e-5, atol=3e-6)


def test_bfloat16_which_numpy_cannot_name(tmp_path):
    arrays = parameters("google_vit_representation")
    kernel = torch.from_numpy(arrays["head/kernel"]).bfloat16()
    arrays["head/kernel"] = kernel.view(torch.int16).numpy().view("V2")
    np.savez(tmp_path / "vit.npz", **arrays)
    assert torch.equal(read_weights(str(tmp_path / "vit.npz")).state["head.weight"], kernel.float().T)


def test_a_size_that_is_not_square_must_be_given():
    path = str(FIXTURES / "google_vit_token.npz")
    with pytest.raises(UserError, match=r"positions for 24 patches, which is not a square: .*image_size="):
        read_weights(path)
    with pytest.raises(UserError, match="positions for 24 patches of 4x4, which is not an image of 16x16"):
        read_weights(path, image_size=(16, 16))
    assert read_weights(path, image_size=(16, 24)).card.model.grid == (4, 6)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"conv_root/kernel": np.zeros((7, 7, 3, 64), "f")}, r"a convolutional stem \(hybrid\)"),
        ({"MAPHead_0/probe": np.zeros((1, 1, 48), "f")}, "attention pooling"),
        ({"Transformer/posembed_input/pos_embedding": None}, "no learned positions"),
        ({"Transformer/encoderblock_1/LayerNorm_0/bias": None}, r"'Transformer.encoderblock_1.LayerNorm_0.bias'"),
        ({"Transformer/encoderblock_0/MultiHeadDotProductAttention_0/query/kernel": None}, "no Vision Transformer"),
        ({"Transformer/encoderblock_1/MultiHeadDotProductAttention_0/key/bias": None}, "without bias"),
        ({"embedding/kernel": np.zeros((48, 48), "f")}, "do not have the shape"),
        ({"head/kernel": np.zeros((40, 5), "f")}, r"'head.weight' has shape \(5, 40\)"),
        ({"head/bias": np.zeros(5, "i4")}, "int32 numbers"),
        ({"head/bias": np.array(["x"], dtype=object)}, "cannot read"),
    ],
)
def test_what_is_refused(tmp_path, change, words):
    arrays = {**parameters("google_vit_representation"), **change}
    np.savez(tmp_path / "vit.npz", **{name: array for name, array in arrays.items() if array is not None})
    with pytest.raises(UserError, match=words):
        read_weights(str(tmp_path / "vit.npz"))


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_an_archive_cut_short(tmp_path, share):
    content = (FIXTURES / "google_vit_gap.npz").read_bytes()
    (tmp_path / "vit.npz").write_bytes(content[: int(share * len(content))])
    with pytest.raises(UserError, match="cut short or damaged"):
        read_weights(str(tmp_path / "vit.npz"))
