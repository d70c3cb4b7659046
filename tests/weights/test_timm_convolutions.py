"""timm's hybrids and BiT ResNets, and full-size networks: the same logits, with timm's constants."""

from __future__ import annotations

import json
from functools import partial

import pytest
from safetensors.torch import save_file

from vitrail.errors import UserError
from vitrail.weights.read import read_weights

timm = pytest.importorskip("timm")
from timm.layers import HybridEmbed, StdConv2d  # noqa: E402
from timm.models import ResNetV2, VisionTransformer, save_for_hf  # noqa: E402
from timm.models.vision_transformer_hybrid import _resnetv2  # noqa: E402

from tests.weights.test_timm_layout import assert_same_logits  # noqa: E402


@pytest.mark.parametrize("layers", [(), (1,), (2, 1, 1)], ids=str)
def test_hybrids(tmp_path, randomise, logits, layers):
    """Stems that timm has no name for; its epsilons differ from those of the original code."""
    size, patch = (64, 96), 8 if not layers else 1
    embed = partial(HybridEmbed, backbone=_resnetv2(layers))
    args = {"img_size": size, "patch_size": patch, "embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 5}
    model = randomise(VisionTransformer(embed_layer=embed, **args))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(
        json.dumps({"architecture": "vit_base_r50_s16_224", "model_args": {"num_heads": 3, "img_size": size}})
    )
    weights = read_weights(str(tmp_path))
    assert_same_logits(model, weights, logits)
    stem = weights.card.model.stem
    assert (stem.blocks, stem.norm_eps, stem.weight_eps, stem.weight_eps_in) == (layers, 1e-5, 1e-8, "variance")


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "count", "size"),
    [
        ("vit_small_patch16_224", 22_050_664, 224),
        ("vit_small_r26_s32_224", 36_431_912, 224),
        ("resnetv2_50x1_bit", 25_549_352, 96),
    ],
)
def test_networks_of_real_size(tmp_path, randomise, logits, name, count, size):
    model = randomise(timm.create_model(name))
    save_for_hf(model, tmp_path, safe_serialization=True)
    weights = read_weights(str(tmp_path), image_size=(size, size))
    assert sum(tensor.numel() for tensor in weights.state.values()) == count
    assert_same_logits(model, weights, logits)
    assert weights.card.preprocess.interpolation == timm.data.resolve_data_config({}, model=model)["interpolation"]


def small_resnet() -> ResNetV2:
    return ResNetV2((1, 2), (128, 256), 5, stem_chs=32, stem_type="fixed", conv_layer=partial(StdConv2d, eps=1e-8))


def test_a_resnet_of_any_size(tmp_path, randomise, logits):
    model = randomise(small_resnet())
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    weights = read_weights(str(tmp_path), image_size=(48, 64))
    assert "timm's BiT" in weights.assumed
    assert (weights.card.model.blocks, weights.card.model.width) == ((1, 2), 32)
    assert_same_logits(model, weights, logits)
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "resnetv2_50"}))
    with pytest.raises(UserError, match=r"'resnetv2_50'.* BiT"):
        read_weights(str(tmp_path))


def test_a_resnet_with_batch_norms(tmp_path):
    save_file(timm.create_model("resnetv2_50").state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="batch normalization"):
        read_weights(str(tmp_path))
