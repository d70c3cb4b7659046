"""Files written by timm: the same logits and preprocessing, and no unreported assumptions."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from vitrail.errors import UserError
from vitrail.weights.formats import timm as layout
from vitrail.weights.read import read_weights
from vitrail.weights.tensors import make_source

timm = pytest.importorskip("timm")
from timm.models import save_for_hf  # noqa: E402
from timm.models._hub import save_config_for_hf  # noqa: E402

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 5}


def written(folder, randomise, name="vit_tiny_patch16_224", model_config=None, **args):
    """Create a timm network and save it to a folder as for the Hub."""
    model = randomise(timm.create_model(name, **args))
    save_for_hf(model, folder, model_config=model_config, model_args=args, safe_serialization=True)
    return model


@torch.inference_mode()
def assert_same_logits(model, weights, logits, tolerance=1e-5):
    size = weights.card.model.image_size
    pixels = torch.randn(2, weights.card.model.channels, *size, generator=torch.Generator().manual_seed(1))
    expected = model(pixels)
    assert expected.std() > 0.1
    torch.testing.assert_close(logits(weights, pixels), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({}, {"pool": "token", "norm": "before_pool", "gelu": "erf", "class_token": True}),
        ({"act_layer": "gelu_tanh"}, {"gelu": "tanh"}),
        ({"global_pool": "avg"}, {"pool": "gap", "norm": "after_pool", "class_token": True}),
        ({"global_pool": "avg", "fc_norm": False}, {"pool": "gap", "norm": "before_pool", "class_token": True}),
        ({"global_pool": "avg", "class_token": False}, {"pool": "gap", "norm": "after_pool", "class_token": False}),
        ({"fc_norm": True}, {"pool": "token", "norm": "after_pool"}),
        ({"no_embed_class": True}, {"class_token": True, "prefix_positions": False}),
        ({"img_size": [16, 40]}, {"image_size": (16, 40)}),
        ({"img_size": [16, 40], "no_embed_class": True}, {"image_size": (16, 40)}),
        ({"patch_size": [4, 8], "img_size": [16, 24]}, {"patch": (4, 8), "image_size": (16, 24)}),
        ({"num_classes": 0}, {"num_classes": 0}),
        ({"in_chans": 1}, {"channels": 1}),
        ({"mlp_ratio": 2.5}, {"mlp_dim": 120}),
        ({"init_values": 1e-5}, {"layer_scale": 1e-5}),
        ({"reg_tokens": 4}, {"registers": 4, "prefix_positions": True}),
        ({"reg_tokens": 4, "no_embed_class": True, "init_values": 0.1}, {"registers": 4, "prefix_positions": False}),
        ({"reg_tokens": 4, "class_token": False, "global_pool": "avg"}, {"registers": 4, "class_token": False}),
        ({"class_token": False, "global_pool": "map"}, {"pool": "map", "norm": "before_pool"}),
        ({"global_pool": "map", "pool_include_prefix": True, "act_layer": "gelu_tanh"}, {"pool": "map"}),
        ({"pos_embed": "none"}, {"positions": "none"}),
    ],
    ids=str,
)
def test_logits_are_timms(tmp_path, randomise, logits, args, expected):
    model = written(tmp_path, randomise, **{**SMALL, **args})
    weights = read_weights(str(tmp_path))
    assert_same_logits(model, weights, logits)
    assert {key: getattr(weights.card.model, key) for key in expected} == expected
    assert weights.card.model.norm_eps == 1e-6


@pytest.mark.full
def test_a_network_of_real_size(tmp_path, randomise, logits):
    """Ti/16 at 224 px, created by its name in timm."""
    model = randomise(timm.create_model("vit_tiny_patch16_224"))
    save_for_hf(model, tmp_path, safe_serialization=True)
    weights = read_weights(str(tmp_path))
    assert sum(tensor.numel() for tensor in weights.state.values()) == 5_717_416
    assert_same_logits(model, weights, logits)


def test_preprocessing_and_classes_are_timms(tmp_path, randomise):
    names = ["a", "b", "c", "d", "e"]
    model = written(tmp_path, randomise, "vit_small_patch16_224", {"label_names": names}, depth=1, num_classes=5)
    card = read_weights(str(tmp_path)).card
    expected = timm.data.resolve_data_config({}, model=model)
    assert card.preprocess.resize == {"center": "short_side", "squash": "squash"}[expected["crop_mode"]]
    assert card.preprocess.crop_fraction == expected["crop_pct"]
    assert card.preprocess.interpolation == expected["interpolation"]
    assert (card.preprocess.mean, card.preprocess.std) == (expected["mean"], expected["std"])
    assert card.preprocess.size == expected["input_size"][1:]
    assert card.classes == tuple(names)
    assert card.licence == model.pretrained_cfg["license"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"crop_mode": "squash", "crop_pct": 1.0}, {"resize": "squash", "crop_fraction": 1.0}),
        ({"mean": None, "std": None}, {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}),
        ({"crop_pct": None, "interpolation": "bilinear"}, {"crop_fraction": 0.875, "interpolation": "bilinear"}),
    ],
    ids=str,
)
def test_supported_preprocessing_settings(tmp_path, randomise, change, expected):
    written(tmp_path, randomise, **SMALL)
    edit(tmp_path, "pretrained_cfg", change)
    preprocess = read_weights(str(tmp_path)).card.preprocess
    assert {key: getattr(preprocess, key) for key in expected} == expected


def edit(folder, section, change):
    config = json.loads((folder / "config.json").read_text())
    part = config.setdefault(section, {}) if section else config
    part.update(change)
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def test_label_names_by_index(tmp_path, randomise):
    names = {0: "a", 1: "b", 2: "c", 3: "d", 4: "e"}
    written(tmp_path, randomise, model_config={"label_names": names}, **SMALL)
    assert read_weights(str(tmp_path)).card.classes == ("a", "b", "c", "d", "e")


def test_image_size_missing_in_the_config(tmp_path, randomise, logits):
    """timm's config keeps 224 for networks of other sizes; the size follows from the position embedding."""
    model = written(tmp_path, randomise, **SMALL)
    edit(tmp_path, "model_args", {"img_size": None})
    assert_same_logits(model, read_weights(str(tmp_path)), logits)


def test_a_file_without_config(tmp_path, randomise, logits):
    model = randomise(timm.create_model("vit_small_patch16_224", depth=1, num_classes=4))
    save_file(model.state_dict(), tmp_path / "any name")
    weights = read_weights(str(tmp_path / "any name"))
    assert_same_logits(model, weights, logits)
    assert weights.card.model.heads == 6
    assert "no config.json" in weights.card.source
    expected = timm.data.resolve_data_config({}, model=model)
    assert (weights.card.preprocess.mean, weights.card.preprocess.crop_fraction) == (expected["mean"], 0.9)


def test_unknown_number_of_heads(tmp_path, randomise):
    save_file(randomise(timm.create_model("test_vit")).state_dict(), tmp_path / "vit.safetensors")
    with pytest.raises(UserError, match=r"attention heads.*model_args\.num_heads"):
        read_weights(str(tmp_path / "vit.safetensors"))


def test_a_non_square_file_without_config(tmp_path, randomise, logits):
    model = randomise(timm.create_model("vit_tiny_patch16_224", depth=1, img_size=(32, 96)))
    save_file(model.state_dict(), tmp_path / "vit.safetensors")
    with pytest.raises(UserError, match="image_size="):
        read_weights(str(tmp_path / "vit.safetensors"))
    assert_same_logits(model, read_weights(str(tmp_path / "vit.safetensors"), image_size=(32, 96)), logits)


@pytest.mark.parametrize(
    ("args", "pattern"),
    [
        ({"qk_norm": True}, "query and key normalization"),
        ({"qkv_bias": False}, "no bias for query"),
        ({"pre_norm": True}, "norm before the encoder"),
        ({"global_pool": "map"}, "attention pooling without class token"),
        ({"global_pool": "avg", "pool_include_prefix": True}, "pool_include_prefix with global_pool=avg"),
        ({"global_pool": "max"}, "pooling 'max'.* token, avg"),
        ({"act_layer": "quick_gelu"}, "activation 'quick_gelu'.* gelu, gelu_tanh"),
        ({"norm_layer": "rmsnorm"}, "norm_layer 'rmsnorm'"),
        ({"final_norm": False}, "model_args.final_norm False, .* True"),
    ],
    ids=str,
)
def test_unsupported_timm_settings(tmp_path, randomise, args, pattern):
    written(tmp_path, randomise, **{**SMALL, **args})
    with pytest.raises(UserError, match=pattern):
        read_weights(str(tmp_path))


@pytest.mark.parametrize(
    ("section", "change", "pattern"),
    [
        ("pretrained_cfg", {"crop_mode": "border"}, "crop_mode 'border'"),
        ("pretrained_cfg", {"crop_mode": "squash", "crop_pct": 0.9}, "crop_mode 'squash' with crop_pct 0.9"),
        ("pretrained_cfg", {"interpolation": "lanczos"}, "preprocessing: 'interpolation'"),
        ("pretrained_cfg", {"mean": 3}, "per channel, not 3"),
        ("pretrained_cfg", {"mean": [0.1, 0.2]}, "2 channels.* 3"),
        ("model_args", {"img_size": "large"}, "'large' .*image size"),
        ("model_args", {"num_heads": 5}, "48 .* 5 heads"),
        ("", {"model_args": 3}, "timm's format"),
        ("", {"architecture": "vit_new", "model_args": {"num_heads": 3}}, "timm's 'vit_new'"),
    ],
    ids=str,
)
def test_invalid_configs(tmp_path, randomise, section, change, pattern):
    written(tmp_path, randomise, **SMALL)
    edit(tmp_path, section, change)
    with pytest.raises(UserError, match=pattern):
        read_weights(str(tmp_path))


def test_a_gated_mlp(tmp_path, randomise):
    model = randomise(timm.create_model("vit_tiny_patch16_224", depth=1, mlp_layer=timm.layers.SwiGLUPacked))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="gated MLP"):
        read_weights(str(tmp_path))


def as_source(tensors, folder, where="'model'"):
    """A TensorSource of tensors in memory, with the configs in `folder`."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return make_source(where, folder, shapes, dict.fromkeys(shapes, "F32"), lambda names: tensors)


def names_of_family() -> list[str]:
    families = ("vision_transformer", "vision_transformer_hybrid", "deit", "resnetv2")
    modules = {f"timm.models.{family}" for family in families}
    return [name for name in timm.list_models() if timm.models.model_entrypoint(name).__module__ in modules]


def built(name):
    """The network on the meta device, where the stem of a hybrid also runs while it is built."""
    small = {} if "resnetv2" in timm.models.model_entrypoint(name).__module__ else {"depth": 1}
    with torch.device("meta"):
        return timm.create_model(name, **small)


@pytest.mark.slow
def test_no_architecture_of_timm_is_read_wrongly(tmp_path):
    """Some settings of an architecture do not show in the tensors. What is read must agree with timm's network; all
    other architectures must be rejected."""
    read = []
    for name in names_of_family():
        model = built(name)
        save_config_for_hf(model, tmp_path / "config.json")
        try:
            foreign = layout.read(as_source(model.state_dict(), tmp_path))
        except UserError:
            continue
        read.append(name)
        assert_same_settings(name, model, foreign.card.model)
    sizes = ("tiny_patch16", "small_patch16", "base_patch16", "base_patch32", "large_patch16", "huge_patch14")
    others = {"deit_base_patch16_384", "deit3_base_patch16_224", "flexivit_base", "test_vit", "resnetv2_50x1_bit"}
    others |= {"vit_base_patch14_reg4_dinov2", "vit_base_patch16_reg4_gap_256", "vit_small_r26_s32_224"}
    assert {f"vit_{size}_224" for size in sizes} | others <= set(read)
    assert len(read) > 60


def assert_same_settings(name, model, config):
    if config.kind == "resnet":
        block = model.stages[0].blocks[0]
        settings = (config.norm_eps, config.weight_eps, config.pool_padding)
        assert settings == (block.norm1.eps, block.conv1.eps, "zeros" if hasattr(model.stem, "pad") else "none"), name
        return
    block = model.blocks[0]
    settings = (config.heads, config.norm_eps, config.gelu, config.pool, config.image_size)
    gelu = {"GELU": "erf", "GELUTanh": "tanh"}[type(block.mlp.act).__name__]
    pool = {"token": "token", "avg": "gap", "map": "map"}[model.global_pool]
    assert settings == (block.attn.num_heads, block.norm1.eps, gelu, pool, model.patch_embed.img_size), name
    has_prefix_positions = not model.no_embed_class or not model.num_prefix_tokens
    assert (config.prefix_positions or not config.prefix) == has_prefix_positions, name
    assert not model.pool_include_prefix, name
    assert type(block).__name__ == "Block" and type(block.attn).__name__ == "Attention", name
    if config.stem:
        conv = model.patch_embed.backbone.conv if not config.stem.blocks else model.patch_embed.backbone.stem.conv
        assert conv.eps == config.stem.weight_eps, name
