"""Distortions bit-identical to Pillow, and the magnitudes of policies against big_vision and timm."""

from __future__ import annotations

import io
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats
from timm.data import auto_augment

from bench.augment import pillow, pillow_layers
from vitrail.config import AugmentConfig
from vitrail.data.augment.distort import distort
from vitrail.data.augment.policy import RANDAUGMENT, Layer, Op, layers_for
from vitrail.data.dataset import bundled_images

# Tested values, wider than policies draw: (low, high, integers only)
RANGES = {
    Op.AUTOCONTRAST: (0, 1, False),
    Op.EQUALIZE: (0, 1, False),
    Op.INVERT: (0, 1, False),
    Op.POSTERIZE: (1, 9, True),
    Op.SOLARIZE: (0, 257, True),
    Op.SOLARIZE_ADD: (0, 256, True),
    Op.BRIGHTNESS: (0, 3.7, False),
    Op.CONTRAST: (0, 3.7, False),
    Op.COLOR: (0, 3.7, False),
    Op.SHARPNESS: (0, 3.7, False),
    Op.BLUR: (0.1, 2.0, False),
    Op.ROTATE: (-90, 90, False),
    Op.SHEAR_X: (-0.9, 0.9, False),
    Op.SHEAR_Y: (-0.9, 0.9, False),
    Op.TRANSLATE_X: (-60, 60, False),
    Op.TRANSLATE_Y: (-60, 60, False),
}
GEOMETRIC = [op for op in RANGES if op >= Op.ROTATE]


def photographs(count: int) -> list[np.ndarray]:
    """uint8 (32, 32, 3) each."""
    with zipfile.ZipFile(bundled_images()) as archive:
        names = [name for name in archive.namelist() if name.endswith(".webp")][:: 3000 // count]
        return [np.asarray(Image.open(io.BytesIO(archive.read(name))).convert("RGB")) for name in names[:count]]


def drawings(height: int, width: int) -> list[np.ndarray]:
    """Synthetic images: noise, few levels, one level, two halves, a slope."""
    rng = np.random.default_rng(0)
    slope = np.mgrid[0:height, 0:width].sum(0) % 256
    halves = np.where(np.arange(width) < width // 2, 3, 250) + np.zeros((height, 1), int)
    levels = [rng.integers(0, 256, (height, width, 3)), rng.integers(100, 104, (height, width, 3))]
    return [image.astype(np.uint8) for image in (*levels, np.full((height, width, 3), 77), *_three(halves, slope))]


def _three(*planes: np.ndarray) -> list[np.ndarray]:
    return [np.repeat(plane[..., None], 3, axis=-1) for plane in planes]


def values(op: Op, count: int) -> np.ndarray:
    low, high, whole = RANGES[op]
    sampled = np.random.default_rng(int(op)).uniform(low, high, count)
    return np.floor(sampled) if whole else sampled


def planes(images: list[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous()


@pytest.mark.parametrize("op", RANGES)
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_operations_equal_pillow(op, mode):
    for images in (photographs(40), drawings(45, 38), drawings(3, 5), drawings(1, 1)):
        pixels = planes(images) if mode == "RGB" else planes(images)[:, 1:2].contiguous()
        strengths = values(op, len(images))
        references = [
            pillow(Image.fromarray(i if mode == "RGB" else i[..., 1]), op, v)
            for i, v in zip(images, strengths.tolist(), strict=True)
        ]
        expected = np.stack([np.asarray(image).reshape(*images[0].shape[:2], -1) for image in references])
        found = distort(pixels, [Layer(np.full(len(images), op), strengths)])
        assert found.dtype == torch.uint8
        assert np.array_equal(found.permute(0, 2, 3, 1).numpy(), expected)


@pytest.mark.parametrize("op", RANGES)
def test_a_fourth_channel_changes_only_by_geometric_operations(op):
    images = photographs(8)
    layer = [Layer(np.full(8, op), values(op, 8))]
    colours, alpha = planes(images), planes(images[::-1])[:, :1]
    found = distort(torch.cat([colours, alpha], 1), layer)
    assert torch.equal(found[:, :3], distort(colours, layer))
    assert torch.equal(found[:, 3:], distort(alpha, layer) if op in GEOMETRIC else alpha)


def test_large_images_equal_pillow():
    image = drawings(301, 517)[0]
    for op in (Op.ROTATE, Op.SHEAR_X, Op.SHEAR_Y, Op.BLUR):
        found = distort(planes([image]), [Layer(np.array([op]), values(op, 1))])
        expected = np.asarray(pillow(Image.fromarray(image), op, float(values(op, 1)[0])))
        assert np.array_equal(found[0].permute(1, 2, 0).numpy(), expected)


def test_cutout_fills_a_square_clipped_at_the_border():
    pixels = torch.zeros(3, 4, 20, 30, dtype=torch.uint8)
    centre = np.array([[0.5, 0.5], [0.0, 0.0], [0.99, 0.99]])
    found = distort(pixels, [Layer(np.full(3, Op.CUTOUT), np.array([4.0, 4.0, 4.0]), centre)])
    expected = torch.zeros_like(pixels)
    for row, (y, x) in enumerate([(10, 15), (0, 0), (19, 29)]):
        expected[row, :, max(0, y - 4) : y + 4, max(0, x - 4) : x + 4] = 128
    assert torch.equal(found, expected)


@pytest.mark.parametrize("turn", [-0.5, -0.2, 0.05, 0.33])
def test_hue_equals_torchvision_within_one_level(turn):
    from torchvision.transforms.functional import adjust_hue

    pixels = planes([*photographs(40)])
    found = distort(pixels, [Layer(np.full(40, Op.HUE), np.full(40, turn))])
    assert (found.int() - adjust_hue(pixels, turn).int()).abs().max() <= 1
    grey = pixels[:, :1]
    assert torch.equal(distort(grey, [Layer(np.full(40, Op.HUE), np.full(40, turn))]), grey)


@pytest.mark.parametrize(
    "config",
    [
        AugmentConfig(randaugment_layers=2),
        AugmentConfig(randaugment_layers=2, randaugment_magnitude=20),
        AugmentConfig(randaugment_layers=3, randaugment_magnitude=9, randaugment_std=0.5, randaugment_style="timm"),
        AugmentConfig(three_augment=True, color_jitter=0.3),
    ],
)
def test_policies_equal_pillow(config):
    images = photographs(200)
    layers = layers_for(config, 0, np.zeros(200, np.int64), np.arange(200), (32, 32))
    expected = pillow_layers([Image.fromarray(image) for image in images], layers)
    found = distort(planes(images), layers).permute(0, 2, 3, 1).numpy()
    assert np.array_equal(found, np.stack([np.asarray(image) for image in expected]))


def strengths(config: AugmentConfig, size: tuple[int, int] = (224, 192)) -> dict[Op, set[float]]:
    (layer,) = layers_for(config, 0, np.zeros(4000, np.int64), np.arange(4000), size)
    return {op: {round(v, 9) for v in layer.value[layer.op == op].tolist()} for op in map(Op, set(layer.op.tolist()))}


# level_to_arg of big_vision at each magnitude; two values where the sign is random.
BIG_VISION = {
    7: {
        **{op: {0.0} for op in (Op.AUTOCONTRAST, Op.EQUALIZE, Op.INVERT)},
        **{op: {1.36} for op in (Op.COLOR, Op.CONTRAST, Op.BRIGHTNESS, Op.SHARPNESS)},
        Op.ROTATE: {21.0, -21.0},
        Op.SHEAR_X: {0.21, -0.21},
        Op.SHEAR_Y: {0.21, -0.21},
        Op.TRANSLATE_X: {70.0, -70.0},
        Op.TRANSLATE_Y: {70.0, -70.0},
        Op.POSTERIZE: {2.0},
        Op.SOLARIZE: {179.0},
        Op.SOLARIZE_ADD: {77.0},
        Op.CUTOUT: {28.0},
    },
    20: {
        **{op: {0.0} for op in (Op.AUTOCONTRAST, Op.EQUALIZE, Op.INVERT)},
        **{op: {3.7} for op in (Op.COLOR, Op.CONTRAST, Op.BRIGHTNESS, Op.SHARPNESS)},
        Op.ROTATE: {60.0, -60.0},
        Op.SHEAR_X: {0.6, -0.6},
        Op.SHEAR_Y: {0.6, -0.6},
        Op.TRANSLATE_X: {200.0, -200.0},
        Op.TRANSLATE_Y: {200.0, -200.0},
        Op.POSTERIZE: {8.0},
        Op.SOLARIZE: {256.0},
        Op.SOLARIZE_ADD: {220.0},
        Op.CUTOUT: {80.0},
    },
}


@pytest.mark.parametrize("magnitude", BIG_VISION)
def test_magnitudes_equal_big_vision(magnitude):
    assert strengths(AugmentConfig(randaugment_layers=1, randaugment_magnitude=magnitude)) == BIG_VISION[magnitude]


TIMM = {
    Op.ROTATE: "Rotate",
    Op.POSTERIZE: "PosterizeIncreasing",
    Op.SOLARIZE: "SolarizeIncreasing",
    Op.SOLARIZE_ADD: "SolarizeAdd",
    Op.COLOR: "ColorIncreasing",
    Op.CONTRAST: "ContrastIncreasing",
    Op.BRIGHTNESS: "BrightnessIncreasing",
    Op.SHARPNESS: "SharpnessIncreasing",
    Op.SHEAR_X: "ShearX",
    Op.SHEAR_Y: "ShearY",
    Op.TRANSLATE_X: "TranslateXRel",
    Op.TRANSLATE_Y: "TranslateYRel",
}


@pytest.mark.parametrize("magnitude", [0, 5, 9])
def test_magnitudes_equal_timm(magnitude):
    config = AugmentConfig(randaugment_layers=1, randaugment_magnitude=magnitude, randaugment_style="timm")
    found = strengths(config)
    assert set(found) == {*RANDAUGMENT.tolist(), Op.IDENTITY} - {Op.CUTOUT}
    for op, name in TIMM.items():
        scale = {Op.TRANSLATE_X: 192, Op.TRANSLATE_Y: 224}.get(op, 1)
        expected = {round(auto_augment.LEVEL_TO_ARG[name](magnitude, {})[0] * scale, 9) for _ in range(60)}
        assert found[op] == expected, op


def test_magnitude_std_and_layer_probability():
    config = AugmentConfig(randaugment_layers=1, randaugment_magnitude=5, randaugment_std=0.5, randaugment_style="timm")
    (layer,) = layers_for(config, 0, np.zeros(40_000, np.int64), np.arange(40_000), (224, 224))
    assert (layer.op != Op.IDENTITY).mean() == pytest.approx(0.5, abs=0.01)
    turned = np.abs(layer.value[layer.op == Op.ROTATE]) / 3
    assert stats.kstest(turned, "norm", (5, 0.5)).pvalue > 1e-3


def test_operations_are_uniform_and_layers_independent():
    first, second = layers_for(
        AugmentConfig(randaugment_layers=2), 0, np.zeros(16_000, np.int64), np.arange(16_000), (9, 9)
    )
    pairs = np.zeros((19, 19))
    np.add.at(pairs, (first.op, second.op), 1)
    used = pairs[np.ix_(RANDAUGMENT, RANDAUGMENT)]
    assert used.sum() == 16_000
    assert stats.chisquare(used.ravel()).pvalue > 1e-3


def test_cutout_centres_are_uniform():
    layers = layers_for(AugmentConfig(randaugment_layers=2), 0, np.zeros(8000, np.int64), np.arange(8000), (9, 9))
    for layer in layers:
        down, across = layer.centre[layer.op == Op.CUTOUT].T
        assert len(down) > 400
        for centre in (down, across):
            assert centre.std() > 0.2
            assert stats.kstest(centre, "uniform").pvalue > 1e-3
        assert abs(np.corrcoef(down, across)[0, 1]) < 0.2
    both = np.logical_and(*(layer.op == Op.CUTOUT for layer in layers))
    assert not np.array_equal(layers[0].centre[both], layers[1].centre[both])


def test_three_augment_and_color_jitter_distributions():
    config = AugmentConfig(three_augment=True, color_jitter=0.3, hue=0.1)
    count = 6000
    three_augment, *jitter = layers_for(config, 0, np.zeros(count, np.int64), np.arange(count), (9, 9))
    ops, counts = np.unique(three_augment.op, return_counts=True)
    assert ops.tolist() == [Op.SOLARIZE, Op.COLOR, Op.BLUR]
    assert stats.chisquare(counts).pvalue > 1e-3
    assert stats.kstest(three_augment.value[three_augment.op == Op.BLUR], "uniform", (0.1, 1.9)).pvalue > 1e-3
    assert set(three_augment.value[three_augment.op == Op.COLOR]) == {0.0}
    assert set(three_augment.value[three_augment.op == Op.SOLARIZE]) == {128.0}
    orders, counts = np.unique(np.stack([layer.op for layer in jitter]), axis=1, return_counts=True)
    assert orders.shape == (4, 24)
    assert stats.chisquare(counts).pvalue > 1e-3
    for op, low, width in (
        (Op.BRIGHTNESS, 0.7, 0.6),
        (Op.CONTRAST, 0.7, 0.6),
        (Op.COLOR, 0.7, 0.6),
        (Op.HUE, -0.1, 0.2),
    ):
        drawn = np.concatenate([layer.value[layer.op == op] for layer in jitter])
        assert len(drawn) == count
        assert stats.kstest(drawn, "uniform", (low, width)).pvalue > 1e-3
