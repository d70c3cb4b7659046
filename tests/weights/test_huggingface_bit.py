"""transformers' BiT folders, written by transformers and by vitrail."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.weights.configs import card_of, random_state
from tests.weights.test_huggingface_layout import LABELS, assert_same, edit
from tests.weights.test_written_files import assert_same as assert_same_as_vitrail
from vitrail.config import ResNetConfig
from vitrail.errors import UserError
from vitrail.models.variants import config_from_name
from vitrail.weights.formats import huggingface
from vitrail.weights.read import read_weights

pytestmark = pytest.mark.slow  # networks of transformers are built

transformers = pytest.importorskip("transformers")

SMALL = {"embedding_size": 32, "hidden_sizes": [128, 256], "depths": [2, 1]}
TRANSFORMERS_CONSTANTS = {"norm_eps": 1e-5, "weight_eps": 1e-8, "weight_eps_in": "variance", "pool_padding": "zeros"}


def written(folder, randomise, kind="BitForImageClassification", size=(72, 72), **config):
    model = randomise(getattr(transformers, kind)(transformers.BitConfig(**{**SMALL, **LABELS, **config})))
    model.save_pretrained(folder)
    crop = {"height": size[0], "width": size[1]}
    transformers.BitImageProcessor(crop_size=crop, size={"shortest_edge": 80}).save_pretrained(folder)
    return model


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, {"blocks": (2, 1), "width": 32, "num_classes": 3, "image_size": (50, 72), **TRANSFORMERS_CONSTANTS}),
        ({"hidden_sizes": [128], "depths": [1]}, {"blocks": (1,)}),
        ({"hidden_sizes": [128, 256, 512, 1024, 2048], "depths": [1] * 5, "output_stride": 64}, {"blocks": (1,) * 5}),
        ({"num_channels": 1}, {"channels": 1}),
        ({"drop_path_rate": 0.5}, {"channels": 3}),
    ],
    ids=str,
)
def test_logits_are_those_of_transformers(tmp_path, randomise, logits, config, expected):
    """At a size that is not a multiple of the stride, where padding matters."""
    model = written(tmp_path, randomise, **config)
    if "num_channels" in config:
        edit(tmp_path / "preprocessor_config.json", image_mean=[0.5], image_std=[0.5])
    weights = read_weights(str(tmp_path), image_size=(50, 72))
    assert_same(model, weights, logits)
    assert {key: getattr(weights.card.model, key) for key in expected} == expected
    assert (weights.card.classes, weights.assumed) == (("chat", "chien", "zèbre"), "")


def test_constants_change_the_logits(tmp_path, randomise, logits):
    """The weights are so small that the epsilons matter."""
    model = written(tmp_path, randomise)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 4:
            parameter.data *= 1e-4
        elif "norm" in name:
            parameter.data *= 3
    model.save_pretrained(tmp_path)
    assert_same(model, read_weights(str(tmp_path)), logits)


def test_a_network_without_classifier_gives_its_pooled_map(tmp_path, randomise, logits):
    model = written(tmp_path, randomise, "BitModel")
    weights = read_weights(str(tmp_path))
    assert (weights.card.model.num_classes, weights.card.classes) == (0, ())
    assert_same(lambda pixels: {"features": model(pixels).pooler_output.flatten(1)}, weights, logits, "features")


def test_preprocessing_is_the_image_processors(tmp_path, randomise):
    written(tmp_path, randomise, size=(48, 48))
    spec = read_weights(str(tmp_path)).card.preprocess
    assert (spec.size, spec.resize, spec.crop_fraction) == ((48, 48), "short_side", 0.6)
    assert (spec.interpolation, spec.mean[0]) == ("bicubic", 0.48145466)
    other = read_weights(str(tmp_path), image_size=(96, 96)).card.preprocess
    assert (other.size, other.crop_fraction) == ((96, 96), 0.6)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "BitImageProcessor"}))
    assert read_weights(str(tmp_path)).card.preprocess.size == (224, 224)
    edit(tmp_path / "preprocessor_config.json", image_processor_type="ViTImageProcessor", size=32)
    spec = read_weights(str(tmp_path)).card.preprocess
    assert (spec.size, spec.resize, spec.interpolation, spec.mean[0]) == ((32, 32), "squash", "bilinear", 0.5)
    (tmp_path / "preprocessor_config.json").unlink()
    weights = read_weights(str(tmp_path))
    assert weights.card.preprocess.size == (224, 224) and "transformers' defaults for BiT" in weights.assumed


@pytest.mark.parametrize(
    ("file", "change", "pattern"),
    [
        ("config.json", {"layer_type": "bottleneck"}, "layer_type 'bottleneck'.* 'preact"),
        ("config.json", {"global_padding": "SAME"}, "global_padding 'SAME'.* None"),
        ("config.json", {"num_groups": 16}, "num_groups 16.* 32"),
        ("config.json", {"hidden_act": "gelu"}, "hidden_act 'gelu'.* 'relu'"),
        ("config.json", {"embedding_dynamic_padding": True}, "embedding_dynamic_padding True.* False"),
        ("config.json", {"output_stride": 4}, "output_stride 4"),
        ("config.json", {"output_stride": "8"}, "output_stride '8'"),
        ("preprocessor_config.json", {"crop_size": None, "do_center_crop": False}, "no fixed output size"),
        ("preprocessor_config.json", {"crop_size": {"height": 0, "width": 0}}, "no fixed output size"),
        ("preprocessor_config.json", {"size": {"shortest_edge": 8}}, "cannot reproduce .*8"),
        ("preprocessor_config.json", {"crop_size": {"height": 50, "width": 72}}, "crop to 50x72"),
    ],
    ids=str,
)
def test_unsupported_or_wrong_files_are_rejected(tmp_path, randomise, file, change, pattern):
    written(tmp_path, randomise)
    edit(tmp_path / file, **change)
    with pytest.raises(UserError, match=pattern):
        read_weights(str(tmp_path))


def test_a_width_factor_that_transformers_itself_cannot_run(tmp_path, randomise):
    """transformers ignores the factor in the last norm, which then does not fit the features."""
    written(tmp_path, randomise, width_factor=2)
    with pytest.raises(UserError, match=r"width_factor 2, .* 1|hidden_sizes"):
        read_weights(str(tmp_path))


def test_hybrid_is_rejected_with_a_hint(tmp_path):
    """transformers has removed this network, so the test writes the file itself."""
    save_file(
        {"vit.embeddings.patch_embeddings.projection.weight": torch.zeros(4, 4, 1, 1)}, tmp_path / "model.safetensors"
    )
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit-hybrid"}))
    assert "vit-hybrid" not in transformers.CONFIG_MAPPING
    with pytest.raises(UserError, match=r"'vit-hybrid' .* timm"):
        read_weights(str(tmp_path))


def resnet(**options) -> ResNetConfig:
    values = {
        "kind": "resnet",
        "blocks": (2, 1),
        "width": 32,
        "image_size": (50, 72),
        "num_classes": 3,
        **TRANSFORMERS_CONSTANTS,
    }
    return ResNetConfig(**{**values, **options})


@pytest.mark.parametrize(
    "model",
    [
        resnet(),
        resnet(width=96, channels=1),
        resnet(blocks=(1,)),
        resnet(blocks=(1, 1, 1, 1, 1)),
        resnet(num_classes=0),
        pytest.param(config_from_name("R50x1", 10, image_size=96, **TRANSFORMERS_CONSTANTS), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_transformers_loads(tmp_path, model):
    card, state = card_of(model, classes=tuple("abc") if model.num_classes == 3 else ()), random_state(model)
    assert huggingface.unsupported_reason(card) is None and huggingface.adopt_constants(card) == card
    huggingface.write(tmp_path, card, state)
    assert_same_as_vitrail(huggingface.reference_model(tmp_path, card, None), card, state)
    kind = json.loads((tmp_path / "config.json").read_text())["architectures"][0]
    _, report = getattr(transformers, kind).from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    back = read_weights(str(tmp_path))
    assert back.card.model == model and back.card.classes == card.classes
    assert back.card.preprocess == card.preprocess


@pytest.mark.full
def test_a_network_of_real_size(tmp_path, randomise, logits):
    model = written(tmp_path, randomise, size=(80, 80), **transformers.BitConfig(num_labels=1000).to_dict())
    weights = read_weights(str(tmp_path))
    assert sum(tensor.numel() for tensor in weights.state.values()) == 25_549_352
    assert_same(model, weights, logits)
    assert load_file(tmp_path / "model.safetensors").keys() == model.state_dict().keys()


def test_constants_that_transformers_fixes():
    model = resnet(weight_eps=1e-10, pool_padding="none", norm_eps=1e-6, weight_eps_in="deviation")
    assert huggingface.adopt_constants(card_of(model)).model == resnet()
    narrow = card_of(resnet()).preprocess.model_copy(update={"resize": "short_side"})
    card = card_of(resnet()).model_copy(update={"preprocess": narrow})
    assert "50x72 images" in huggingface.unsupported_reason(card)
