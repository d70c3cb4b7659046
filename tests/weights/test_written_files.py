"""Converted files, loaded by the other libraries: the same outputs as vitrail's."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image

from tests.weights.configs import card_of, outputs, pixels_for, random_state
from vitrail.config import ModelConfig, ResNetConfig, StemConfig
from vitrail.data.transforms import eval_transform, normalise
from vitrail.models.variants import config_from_name
from vitrail.weights.formats import google, huggingface
from vitrail.weights.formats import timm as timm_format

timm = pytest.importorskip("timm")
transformers = pytest.importorskip("transformers")

SMALL = {"width": 48, "depth": 2, "mlp_dim": 100, "heads": 3, "patch": (8, 8), "image_size": (32, 32), "num_classes": 5}
TIMM_STEM = {"norm_eps": 1e-5, "weight_eps": 1e-8, "weight_eps_in": "variance"}


def small(**options) -> ModelConfig:
    return ModelConfig(**{**SMALL, **options})


def assert_same(reference, card, state):
    pixels = pixels_for(card.model)
    with torch.inference_mode():
        actual = reference.run(pixels)
    expected = outputs(card.model, state, pixels)
    assert expected.std() > 0.1
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gelu": "erf", "mlp_dim": 101},
        {"image_size": (16, 40), "patch": (4, 8), "channels": 2},
        {"pool": "gap", "class_token": False, "norm": "after_pool"},
        {"pool": "gap", "norm": "before_pool", "registers": 3},
        {"norm": "after_pool"},
        {"registers": 4, "layer_scale": 0.1, "prefix_positions": False},
        {"registers": 4, "layer_scale": 0.1},
        {"pool": "map", "class_token": False},
        {"pool": "map", "registers": 2},
        {"positions": "sincos"},
        {"positions": "2d", "image_size": (16, 40)},
        {"positions": "none"},
        {"num_classes": 0, "prefix_positions": False},
        {"stem": StemConfig(**TIMM_STEM), "image_size": (64, 96)},
        {"stem": StemConfig(**TIMM_STEM), "image_size": (64, 64), "channels": 1},
    ],
    ids=str,
)
def test_timm_loads_vision_transformers(tmp_path, options):
    card = card_of(small(**options), classes=() if options.get("num_classes") == 0 else tuple("abcde"), licence="MIT")
    assert timm_format.unsupported_reason(card) is None and timm_format.adopt_constants(card) == card
    state = random_state(card.model)
    timm_format.write(tmp_path, card, state)
    assert_same(timm_format.reference_model(tmp_path, card, None), card, state)
    model = timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    data = timm.data.resolve_data_config({}, model=model)
    assert tuple(data["input_size"][1:]) == card.model.image_size and data["crop_mode"] == "squash"
    assert (tuple(data["mean"]), data["crop_pct"]) == (card.preprocess.mean, 1.0)
    assert model.pretrained_cfg["license"] == "MIT"
    assert model.pretrained_cfg.get("label_names", []) == list(card.classes)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("S/16", {}),
        ("R26+S/32", {"stem": StemConfig(blocks=(2, 2, 2, 2), **TIMM_STEM)}),
        ("R50x1", {**TIMM_STEM, "image_size": 96}),
    ],
)
def test_timm_loads_networks_of_real_size(tmp_path, name, options):
    model = config_from_name(name, 10, **options)
    card, state = card_of(model), random_state(model)
    assert timm_format.unsupported_reason(card) is None and timm_format.adopt_constants(card) == card
    timm_format.write(tmp_path, card, state)
    assert_same(timm_format.reference_model(tmp_path, card, None), card, state)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (small(representation=7), "a representation layer"),
        (small(positions="relative"), "relative position embeddings"),
        (
            small(positions_at="shared"),
            "position embeddings at every layer",
        ),
        (small(stem=StemConfig(blocks=(1, 1)), patch=(1, 1)), "a stem of 64 channels with blocks (1, 1)"),
        (
            config_from_name("R50x2", 5),
            "blocks (3, 4, 6, 3) from 128 channels",
        ),
        (
            config_from_name("Axial-B/32", 5),
            "axial attention",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_networks_that_timm_cannot_represent(model, expected):
    assert expected in timm_format.unsupported_reason(card_of(model))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gelu": "erf", "norm_eps": 1e-12, "channels": 1},
        {"image_size": (16, 40), "patch": (4, 8)},
        {"prefix_positions": False},
        {"positions": "sincos"},
        {"positions": "2d", "image_size": (16, 40)},
        {"num_classes": 0},
        {"num_classes": 0, "representation": 40},
        {"num_classes": 0, "layer_scale": 0.5, "mlp_dim": 96},
        {"num_classes": 0, "layer_scale": 0.5, "mlp_dim": 96, "registers": 2},
        {"num_classes": 0, "layer_scale": 0.5, "mlp_dim": 96, "registers": 2, "prefix_positions": False},
    ],
    ids=str,
)
def test_transformers_loads(tmp_path, options):
    model = small(**options)
    card = card_of(model, classes=tuple("abcde")[: model.num_classes])
    assert huggingface.unsupported_reason(card) is None and huggingface.adopt_constants(card) == card
    state = random_state(model)
    huggingface.write(tmp_path, card, state)
    assert_same(huggingface.reference_model(tmp_path, card, None), card, state)
    kind = json.loads((tmp_path / "config.json").read_text())["architectures"][0]
    _, report = getattr(transformers, kind).from_pretrained(tmp_path, output_loading_info=True)
    invented = set(report["missing_keys"]) | set(report["unexpected_keys"])
    plain = not (model.num_classes or model.representation or model.layer_scale)
    assert all(name.startswith("pooler") for name in invented) if plain else not invented


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (small(stem=StemConfig(), image_size=(64, 64)), "a convolutional stem"),
        (small(pool="gap"), "mean of the patches"),
        (small(pool="map"), "pools by attention pooling"),
        (small(norm="after_pool"), "a norm after pooling"),
        (small(positions="none"), "no position embedding"),
        (small(positions="relative"), "relative position embeddings"),
        (small(positions_at="layers"), "position embeddings at every layer"),
        (config_from_name("Axial-B/32", 5), "axial attention"),
        (small(representation=7), "a representation layer before the classifier"),
        (small(layer_scale=0.1), "LayerScale with a classifier"),
        (small(registers=1, num_classes=0), "register tokens without LayerScale"),
        (small(layer_scale=0.1, num_classes=0), "a multiple of the width"),
        (small(layer_scale=0.1, num_classes=0, mlp_dim=96, image_size=(32, 64)), "square"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_networks_that_transformers_cannot_represent(model, expected):
    assert expected in huggingface.unsupported_reason(card_of(model))


@pytest.mark.parametrize(
    "model",
    [
        small(),
        small(image_size=(16, 40)),
        small(prefix_positions=False),
        small(pool="gap", class_token=False),
        small(pool="map", class_token=False),
        small(num_classes=0),
        small(positions="2d"),
    ],
    ids=lambda model: str(model.model_dump(exclude_defaults=True, exclude=set(SMALL))),
)
def test_timm_reads_the_written_npz(tmp_path, model):
    card, state = card_of(model), random_state(model)
    assert google.unsupported_reason(card) is None and google.adopt_constants(card).model == model
    google.write(tmp_path / "vit.npz", card, state)
    form = google.with_supported_positions(model, state)[0]
    assert_same(
        google.reference_model(tmp_path / "vit.npz", card.model_copy(update={"model": form}), None), card, state
    )


@pytest.mark.parametrize(
    "model",
    [
        small(stem=StemConfig(), image_size=(64, 64)),
        pytest.param(config_from_name("R26+S/32", 5, depth=1, image_size=64), marks=pytest.mark.slow),
        pytest.param(config_from_name("R50x1", 5, image_size=64), marks=pytest.mark.full),
    ],
    ids=["stem", "hybrid", "resnet"],
)
def test_timm_reads_the_written_convolutions(tmp_path, model):
    """timm has other epsilons, so vitrail's network is compared with those of timm."""
    card, state = card_of(model), random_state(model)
    google.write(tmp_path / "x.npz", card, state)
    assert_same(google.reference_model(tmp_path / "x.npz", card, None), timm_format.adopt_constants(card), state)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (small(registers=1), "register tokens"),
        (small(layer_scale=0.1), "LayerScale"),
        (small(norm="after_pool"), "a norm after pooling"),
        (small(pool="gap"), "a class token together with pooling of the patches"),
        (small(positions="none"), "no position embedding"),
        (small(positions="relative"), "relative position embeddings"),
        (config_from_name("Axial-B/32", 5), "axial attention"),
        (
            small(stem=StemConfig(), image_size=(64, 64), positions="sincos"),
            "sincos positions with a convolutional",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_networks_that_google_cannot_represent(model, expected):
    assert expected in google.unsupported_reason(card_of(model))


def test_constants_are_named():
    card = card_of(small(gelu="erf", norm_eps=1e-12))
    assert google.adopt_constants(card).model == small()
    hybrid = card_of(small(stem=StemConfig(**TIMM_STEM), image_size=(64, 64)))
    assert google.adopt_constants(hybrid).model.stem == StemConfig()
    resnet = ResNetConfig(kind="resnet", blocks=(1,), image_size=(32, 32), num_classes=2, pool_padding="none")
    assert timm_format.adopt_constants(card_of(resnet)).model == resnet.model_copy(
        update={**TIMM_STEM, "pool_padding": "zeros"}
    )


@pytest.mark.parametrize(
    "options",
    [{}, {"interpolation": "bicubic", "mean": (0.1, 0.2, 0.3)}, {"resize": "short_side", "crop_fraction": 0.875}],
    ids=str,
)
def test_transformers_makes_the_same_pixels(tmp_path, options):
    card = card_of(small(num_classes=0))
    card = card.model_copy(update={"preprocess": card.preprocess.model_copy(update=options)})
    huggingface.write(tmp_path, card, random_state(card.model))
    image = np.random.default_rng(0).integers(0, 256, (50, 75, 3), dtype=np.uint8)
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    pixels = processor(images=Image.fromarray(image), return_tensors="pt")["pixel_values"]
    expected = normalise(eval_transform(image, card.preprocess)[None], card.preprocess)
    torch.testing.assert_close(pixels, expected, rtol=0, atol=1e-5)
