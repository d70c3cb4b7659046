"""transformers' ViT folders, written by transformers."""

from __future__ import annotations

import json

import pytest
import torch

from vitrail.errors import UserError
from vitrail.weights.read import read_weights

transformers = pytest.importorskip("transformers")

SMALL = {
    "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 96,
    "image_size": 32, "patch_size": 8,
}  # fmt: skip
LABELS = {"id2label": {0: "chat", 1: "chien", 2: "zèbre"}, "label2id": {"chat": 0, "chien": 1, "zèbre": 2}}


def written(folder, randomise, kind="ViTForImageClassification", save=None, **config):
    values = {**SMALL, **LABELS, **config}
    model = randomise(getattr(transformers, kind)(transformers.ViTConfig(**values)))
    model.save_pretrained(folder, **(save or {}))
    return model


@torch.inference_mode()
def assert_same(model, weights, logits, field="logits"):
    pixels = torch.randn(
        2, weights.card.model.channels, *weights.card.model.image_size, generator=torch.Generator().manual_seed(1)
    )
    expected = model(pixels)[field]
    assert expected.std() > 0.1
    torch.testing.assert_close(logits(weights, pixels), expected, rtol=1e-5, atol=1e-5)


def edit(path, **changes):
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, {"gelu": "erf", "norm_eps": 1e-12, "num_classes": 3, "representation": 0}),
        ({"layer_norm_eps": 1e-2}, {"norm_eps": 1e-2}),
        ({"hidden_act": "gelu_new"}, {"gelu": "tanh"}),
        ({"hidden_act": "gelu_pytorch_tanh"}, {"gelu": "tanh"}),
        ({"image_size": [16, 40]}, {"image_size": (16, 40)}),
        ({"patch_size": [4, 8], "image_size": [16, 24]}, {"patch": (4, 8)}),
        ({"num_channels": 1}, {"channels": 1}),
        ({"hidden_dropout_prob": 0.1}, {"dropout": 0.0}),
    ],
    ids=str,
)
def test_logits_are_those_of_transformers(tmp_path, randomise, logits, config, expected):
    model = written(tmp_path, randomise, **config)
    weights = read_weights(str(tmp_path))
    assert_same(model, weights, logits)
    assert {key: getattr(weights.card.model, key) for key in expected} == expected
    assert weights.card.classes == ("chat", "chien", "zèbre")


def test_a_model_without_classifier_ends_in_its_tanh_layer(tmp_path, randomise, logits):
    model = written(tmp_path, randomise, "ViTModel", pooler_output_size=40)
    weights = read_weights(str(tmp_path))
    assert (weights.card.model.representation, weights.card.model.num_classes) == (40, 0)
    assert weights.card.classes == ()
    assert_same(model, weights, logits, "pooler_output")


def test_shards(tmp_path, randomise, logits):
    model = written(tmp_path, randomise, save={"max_shard_size": "50KB"})
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_same(model, read_weights(str(tmp_path)), logits)
    next(tmp_path.glob("model-00002*")).unlink()
    with pytest.raises(UserError, match=r"cannot read .*model-00002"):
        read_weights(str(tmp_path))


def test_an_index_may_not_point_out_of_its_folder(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../b.safetensors"}}))
    with pytest.raises(UserError, match="index of safetensors"):
        read_weights(str(tmp_path))


@pytest.mark.parametrize("kind", ["ViTForImageClassification", "ViTModel"])
def test_the_new_names_of_transformers_5(tmp_path, randomise, logits, kind):
    model = written(tmp_path, randomise, kind, save={"save_original_format": False})
    weights = read_weights(str(tmp_path))
    assert_same(model, weights, logits, "logits" if kind != "ViTModel" else "pooler_output")


def test_half_precision(tmp_path, randomise, logits):
    model = randomise(transformers.ViTForImageClassification(transformers.ViTConfig(**SMALL, **LABELS))).half()
    model.save_pretrained(tmp_path)
    assert_same(model.float(), read_weights(str(tmp_path)), logits)


def test_preprocessing_is_the_image_processors(tmp_path, randomise):
    written(tmp_path, randomise)
    assert "no preprocessor_config.json" in read_weights(str(tmp_path)).card.source
    processor = transformers.ViTImageProcessor(
        size={"height": 32, "width": 32}, image_mean=[0.4, 0.5, 0.6], image_std=[0.2, 0.3, 0.4], resample=3
    )
    processor.save_pretrained(tmp_path)
    card = read_weights(str(tmp_path)).card
    assert card.preprocess.model_dump(exclude={"background"}) == {
        "size": (32, 32), "resize": "squash", "crop_fraction": 1.0, "interpolation": "bicubic", "antialias": True,
        "mean": (0.4, 0.5, 0.6), "std": (0.2, 0.3, 0.4),
    }  # fmt: skip
    assert "(" not in card.source


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"size": 32}, {"resize": "squash"}),  # as older versions wrote it
        ({"do_normalize": False}, {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}),
        (
            {"size": {"shortest_edge": 40}, "do_center_crop": True, "crop_size": {"height": 32, "width": 32}},
            {"resize": "short_side", "crop_fraction": 0.8, "size": (32, 32)},
        ),
    ],
    ids=str,
)
def test_supported_processor_settings(tmp_path, randomise, change, expected):
    written(tmp_path, randomise)
    transformers.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path)
    edit(tmp_path / "preprocessor_config.json", **change)
    preprocess = read_weights(str(tmp_path)).card.preprocess
    assert {key: getattr(preprocess, key) for key in expected} == expected


@pytest.mark.parametrize(
    ("file", "change", "pattern"),
    [
        ("config.json", {"model_type": "deit"}, "'deit'.* vit, dinov2"),
        ("config.json", {"hidden_act": "quick_gelu"}, "activation 'quick_gelu'"),
        ("config.json", {"num_attention_heads": 5}, "48 .* 5 heads"),
        ("config.json", {"image_size": "big"}, "'big' .*image size"),
        ("preprocessor_config.json", {"rescale_factor": 1 / 127.5}, "rescale .*1/255"),
        ("preprocessor_config.json", {"do_rescale": False}, "rescale .*1/255"),
        ("preprocessor_config.json", {"resample": 1}, "resampling '1'"),
        ("preprocessor_config.json", {"size": {"height": 40, "width": 40}, "do_center_crop": True}, "cannot reproduce"),
        ("preprocessor_config.json", {"size": {"shortest_edge": 40}}, "cannot reproduce"),
        ("preprocessor_config.json", {"image_mean": "grey"}, "per channel, not 'grey'"),
    ],
    ids=str,
)
def test_unsupported_or_wrong_files_are_rejected(tmp_path, randomise, file, change, pattern):
    written(tmp_path, randomise)
    transformers.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path)
    edit(tmp_path / file, **change)
    with pytest.raises(UserError, match=pattern):
        read_weights(str(tmp_path))


@pytest.mark.parametrize(
    ("kind", "config", "pattern"),
    [
        ("ViTForImageClassification", {"qkv_bias": False}, "no bias for query"),
        ("ViTModel", {"pooler_act": "relu"}, "pooler_act 'relu'"),
        ("ViTForMaskedImageModeling", {}, "mask token|decoder"),
    ],
)
def test_unsupported_networks(tmp_path, randomise, kind, config, pattern):
    written(tmp_path, randomise, kind, **config)
    with pytest.raises(UserError, match=pattern):
        read_weights(str(tmp_path))


def test_weights_file_without_config(tmp_path, randomise):
    written(tmp_path, randomise)
    (tmp_path / "config.json").unlink()
    with pytest.raises(UserError, match=r"config\.json .*same folder"):
        read_weights(str(tmp_path / "model.safetensors"))


TINY = {key: value for key, value in SMALL.items() if key != "intermediate_size"}


def written_dinov2(folder, randomise, kind="Dinov2Model", save=None, **config):
    family = kind.removesuffix("Model").removesuffix("ForImageClassification")
    settings = getattr(transformers, f"{family}Config")(**{**TINY, "mlp_ratio": 2, **config})
    model = randomise(getattr(transformers, kind)(settings))
    model.save_pretrained(folder, **(save or {}))
    return model


@pytest.mark.parametrize("names", [{}, {"save_original_format": False}], ids=["old names", "new names"])
@pytest.mark.parametrize(
    ("kind", "config", "expected"),
    [
        ("Dinov2Model", {}, {"registers": 0, "layer_scale": 1.0, "norm_eps": 1e-6, "mlp_dim": 96}),
        ("Dinov2Model", {"use_mask_token": False, "hidden_act": "gelu_new"}, {"gelu": "tanh"}),
        ("Dinov2WithRegistersModel", {}, {"registers": 4, "prefix_positions": True}),
        ("Dinov2WithRegistersModel", {"num_register_tokens": 2, "layerscale_value": 0.5}, {"registers": 2}),
    ],
    ids=str,
)
def test_features_of_dinov2(tmp_path, randomise, logits, kind, config, expected, names):
    model = written_dinov2(tmp_path, randomise, kind, names, **config)
    weights = read_weights(str(tmp_path))
    assert_same(model, weights, logits, "pooler_output")
    assert {key: getattr(weights.card.model, key) for key in expected} == expected
    assert (weights.card.model.num_classes, weights.card.model.pool) == (0, "token")


@pytest.mark.parametrize(
    ("kind", "config", "pattern"),
    [
        ("Dinov2ForImageClassification", {}, "DINOv2 classifier"),
        ("Dinov2WithRegistersForImageClassification", {}, "DINOv2 classifier"),
        ("Dinov2Model", {"use_swiglu_ffn": True}, "gated MLP"),
        ("Dinov2Model", {"qkv_bias": False}, "no bias for query"),
    ],
)
def test_unsupported_dinov2(tmp_path, randomise, kind, config, pattern):
    written_dinov2(tmp_path, randomise, kind, **config)
    with pytest.raises(UserError, match=pattern):
        read_weights(str(tmp_path))
