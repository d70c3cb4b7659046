"""Google's .npz files in all variants, compared with outputs of the original code."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from vitrail.config import Preprocess, StemConfig
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


NAMES = [
    "google_vit_token", "google_vit_gap", "google_vit_representation", "google_hybrid_3stages",
    "google_hybrid_stem_only", "bigvision_token", "bigvision_gap_sincos", "bigvision_map", "bigvision_bit_resnet",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_the_originals(logits, name):
    pixels, expected = recorded(name)
    weights = read_weights(str(FIXTURES / f"{name}.npz"), image_size=tuple(pixels.shape[-2:]))
    np.testing.assert_allclose(logits(weights, pixels), expected, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("google_vit_representation", {"representation": 48, "pool": "token", "prefix_positions": True}),
        ("google_hybrid_3stages", {"stem": StemConfig(blocks=(2, 1, 1), width=32), "patch": (1, 1)}),
        ("google_hybrid_stem_only", {"stem": StemConfig(width=32), "patch": (8, 8), "image_size": (64, 64)}),
        ("bigvision_token", {"prefix_positions": False, "class_token": True, "image_size": (16, 16)}),
        ("bigvision_map", {"pool": "map", "class_token": False, "prefix_positions": False}),
        ("bigvision_bit_resnet", {"blocks": (1, 2), "width": 32, "image_size": (224, 224), "pool_padding": "none"}),
    ],
    ids=str,
)
def test_settings_read_from_a_file(name, expected):
    weights = read_weights(str(FIXTURES / f"{name}.npz"), image_size=(64, 96) if "3stages" in name else None)
    model = weights.card.model
    assert {key: getattr(model, key) for key in expected} == expected
    assert (model.num_classes, model.channels) == (5, 3)
    if model.kind == "vit":
        assert (model.width, model.depth, model.mlp_dim, model.heads) == (48, 2, 96, 3)
        assert (model.gelu, model.norm_eps) == ("tanh", 1e-6)
    size = model.image_size
    preprocess = Preprocess(size=size, resize="squash", interpolation="bilinear", antialias=False)
    assert weights.card.preprocess == preprocess
    assert preprocess.mean == preprocess.std == (0.5, 0.5, 0.5)  # pixels in [-1, 1]
    assert weights.card.source.startswith(f"fixtures/{name}.npz")
    assert ("224x224 images" in weights.assumed) == ("bit" in name)


def test_config_of_another_network_is_ignored(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "convnext"}')
    (tmp_path / "vit.npz").write_bytes((FIXTURES / "google_vit_gap.npz").read_bytes())
    assert read_weights(tmp_path / "vit.npz", image_size=(16, 16)).layout == "google"
    np.savez(tmp_path / "vit.npz", other=np.zeros(3, "f"))
    with pytest.raises(UserError, match="'convnext'"):
        read_weights(tmp_path / "vit.npz")


def test_sincos_positions_need_an_image_size():
    path = str(FIXTURES / "bigvision_gap_sincos.npz")
    with pytest.raises(UserError, match=r"no position embedding.*--image-size HxW .image_size="):
        read_weights(path)
    assert read_weights(path, image_size=(16, 24)).card.model.positions == "sincos"


def released_names() -> dict[str, np.ndarray]:
    """A ResNet with the tensor names of the released BiT files."""
    replacements = {"root_block/conv_root": "root_block/standardized_conv2d", "norm-pre-head": "group_norm"}
    replacements |= {"conv_proj": "a/proj/standardized_conv2d", "conv2/": "b/standardized_conv2d_1/"}
    replacements |= {f"conv{number}/": f"{letter}/standardized_conv2d/" for number, letter in ((1, "a"), (3, "c"))}
    replacements |= {f"gn{number}/": f"{letter}/group_norm/" for number, letter in ((1, "a"), (2, "b"), (3, "c"))}
    renamed = {}
    for name, array in parameters("bigvision_bit_resnet").items():
        old = next((part for part in replacements if part in name), "")
        name = name.replace(old, replacements.get(old, ""), 1) if old else name
        if name.startswith("head"):
            name = name.replace("head", "head/conv2d")
            array = array[None, None] if array.ndim == 2 else array
        elif array.shape[:3] == (1, 1, 1):
            array, name = array.ravel(), name.replace("/scale", "/gamma").replace("/bias", "/beta")
        renamed[f"resnet/{name}"] = array
    return renamed


def test_the_files_that_bit_released(tmp_path):
    np.savez(tmp_path / "bit.npz", **released_names(), global_step=np.array(7))
    weights = read_weights(str(tmp_path / "bit.npz"))
    other = read_weights(str(FIXTURES / "bigvision_bit_resnet.npz"))
    assert weights.card.model == other.card.model.model_copy(update={"pool_padding": "zeros"})
    assert all(torch.equal(tensor, other.state[name]) for name, tensor in weights.state.items())


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


def test_positions_without_the_class_token(tmp_path, logits):
    """big_vision adds positions before the class token. Adding its row to the token gives the same network."""
    arrays = parameters("google_vit_representation")
    positions = arrays.pop("Transformer/posembed_input/pos_embedding")
    arrays["pos_embedding"] = positions[:, 1:]
    arrays["cls"] = arrays["cls"] + positions[:, :1]
    np.savez(tmp_path / "vit.npz", **arrays)
    pixels, expected = recorded("google_vit_representation")
    np.testing.assert_allclose(logits(read_weights(str(tmp_path / "vit.npz")), pixels), expected, rtol=1e-5, atol=3e-6)


def test_network_without_head_returns_features(tmp_path, logits):
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


def test_non_square_image_size_is_required():
    path = str(FIXTURES / "google_vit_token.npz")
    with pytest.raises(UserError, match=r"24 patches.*--image-size.*image_size="):
        read_weights(path)
    with pytest.raises(UserError, match=r"24 patches of 4x4 .* 16x16"):
        read_weights(path, image_size=(16, 16))
    assert read_weights(path, image_size=(16, 24)).card.model.grid == (4, 6)


BLOCK = "Transformer/encoderblock_{}/MultiHeadDotProductAttention_0"


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        (
            {"MAPHead_0/probe": np.zeros((1, 1, 48), "f")},
            "'MAPHead_0/MultiHeadDotProductAttention_0/query/kernel' is missing",
        ),
        ({"conv_root/kernel": np.zeros((7, 7, 3, 64), "f")}, "stem|positions for 4 patches|gn_root"),
        ({"conv_root/kernel": np.zeros((7, 7, 3, 48), "f")}, "48 .* 32 groups"),
        ({"Transformer/posembed_input/pos_embedding": None}, "no position embedding"),
        ({"Transformer/posembed_input/pos_embedding": np.zeros((5, 48), "f")}, r"has shape \(5, 48\), not"),
        ({"Transformer/encoderblock_1/LayerNorm_0/bias": None}, r"'Transformer/encoderblock_1/LayerNorm_0/bias'"),
        ({f"{BLOCK.format(0)}/query/kernel": None}, "encoderblock_0/.*query/kernel' is missing"),
        ({f"{BLOCK.format(1)}/key/bias": None}, "no bias for query"),
        ({f"{BLOCK.format(1)}/query/kernel": np.zeros((48, 4, 12), "f")}, "different numbers of heads"),
        ({"embedding/kernel": np.zeros((48, 48), "f")}, r"'embedding/kernel' has shape \(48, 48\)"),
        ({"head/kernel": np.zeros((40, 5), "f")}, r"'head.weight' has shape \(5, 40\)"),
        ({"head/bias": np.zeros((), "f")}, r"'head/bias' has shape \(\)"),
        ({"head/bias": np.zeros(5, "i4")}, "int32 tensors"),
        ({"head/bias": np.array(["x"], dtype=object)}, "Python objects.* pickle"),
        ({"Transformer/encoderblock_999999999/LayerNorm_0/bias": np.zeros(48, "f")}, "is missing"),
    ],
    ids=str,
)
def test_unsupported_or_wrong_files_are_rejected(tmp_path, change, pattern):
    arrays = {**parameters("google_vit_representation"), **change}
    np.savez(tmp_path / "vit.npz", **{name: array for name, array in arrays.items() if array is not None})
    with pytest.raises(UserError, match=pattern) as caught:
        read_weights(str(tmp_path / "vit.npz"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_truncated_archive(tmp_path, share):
    content = (FIXTURES / "google_vit_gap.npz").read_bytes()
    (tmp_path / "vit.npz").write_bytes(content[: int(share * len(content))])
    with pytest.raises(UserError, match="truncated zip"):
        read_weights(str(tmp_path / "vit.npz"))
