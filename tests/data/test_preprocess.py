"""Evaluation and training transforms against Pillow, timm and the plain formula."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from vitrail.config import Preprocess
from vitrail.data.transforms import crop_resize, eval_transform, normalise, resolve_preprocess
from vitrail.errors import UserError

PILLOW = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


def noise(height: int, width: int, channels: int = 3) -> np.ndarray:
    return np.random.default_rng(height * width).integers(0, 256, (height, width, channels), dtype=np.uint8)


def waves(height: int, width: int) -> np.ndarray:
    y, x = np.mgrid[0:height, 0:width]
    return np.stack([127 + 120 * np.sin(x / 9 + y / 23), 127 + 120 * np.cos(x / 31), (x * 3 + y * 5) % 256], -1).astype(
        np.uint8
    )


def pillow_resize(image: np.ndarray, size: tuple[int, int], interpolation: str) -> np.ndarray:
    """Rows first, then columns: newer versions of Pillow choose the order by cost, which moves clipped pixels."""
    rows = Image.fromarray(image).resize((size[1], image.shape[0]), PILLOW[interpolation])
    return np.array(rows.resize((size[1], size[0]), PILLOW[interpolation]))


def assert_close(found: torch.Tensor, expected: np.ndarray) -> None:
    """Within one grey level, and 2 for one pixel in thousands: torch has 16-bit weights, Pillow 22-bit ones.

    test_golden checks that evaluation is bit-identical to Pillow."""
    difference = np.abs(found.permute(1, 2, 0).numpy().astype(int) - expected)
    assert difference.max() <= 2
    assert (difference > 1).mean() < 1e-3
    error = float((difference**2).mean())
    assert error == 0 or 10 * math.log10(255**2 / error) > 60


@pytest.mark.parametrize("make", [noise, waves])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize(
    ("source", "size"),
    [((375, 500), (224, 224)), ((900, 1200), (224, 224)), ((100, 80), (224, 224)), ((33, 700), (224, 48))],
)
def test_antialiased_resize_equals_pillow(make, interpolation, source, size) -> None:  # type: ignore[no-untyped-def]
    image = make(*source)
    spec = Preprocess(size=size, interpolation=interpolation)
    expected = pillow_resize(image, size, interpolation)
    found = eval_transform(image, spec)
    assert found.dtype == torch.uint8
    assert found.shape == (3, *size)
    assert found.is_contiguous()
    assert_close(found, expected)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_resize_without_antialias_equals_torch(interpolation: str) -> None:
    image = noise(90, 130)
    spec = Preprocess(size=(32, 48), interpolation=interpolation, antialias=False)
    floats = torch.from_numpy(image).permute(2, 0, 1)[None].float()
    plain = F.interpolate(floats, (32, 48), mode=interpolation, align_corners=False)[0]
    assert torch.equal(eval_transform(image, spec), plain.round().clamp(0, 255).to(torch.uint8))


def test_plain_bilinear_by_hand() -> None:
    """Half the size without antialias: each pixel is the mean of the four around it, at half-pixel centres."""
    image = noise(8, 12)
    found = eval_transform(image, Preprocess(size=(4, 6), antialias=False)).permute(1, 2, 0).numpy()
    mean = image.reshape(4, 2, 6, 2, 3).mean(axis=(1, 3))
    np.testing.assert_allclose(found, mean, atol=0.5)


def test_no_resize_changes_nothing() -> None:
    image = noise(32, 48)
    for values in ({}, {"antialias": False}, {"resize": "short_side"}, {"interpolation": "bicubic"}):
        found = eval_transform(image, Preprocess(size=(32, 48), **values))
        np.testing.assert_array_equal(found.permute(1, 2, 0).numpy(), image)


@pytest.mark.slow
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("crop_fraction", [1.0, 0.95, 0.9, 0.875])
@pytest.mark.parametrize("source", [(375, 500), (500, 333), (224, 224), (64, 65), (50, 301)])
def test_centre_crop_equals_timm(interpolation, crop_fraction, source) -> None:  # type: ignore[no-untyped-def]
    from timm.data.transforms_factory import transforms_imagenet_eval

    image = noise(*source)
    oracle = transforms_imagenet_eval(
        img_size=224, crop_pct=crop_fraction, crop_mode="center", interpolation=interpolation, normalize=False
    )
    spec = Preprocess(size=(224, 224), resize="short_side", crop_fraction=crop_fraction, interpolation=interpolation)
    expected = oracle(Image.fromarray(image)).permute(1, 2, 0).numpy()
    assert_close(eval_transform(image, spec), expected)


@pytest.mark.parametrize(("size", "source"), [((64, 128), (300, 300)), ((128, 64), (100, 700)), ((32, 96), (10, 30))])
def test_centre_crop_of_any_shape_keeps_the_aspect(size: tuple[int, int], source: tuple[int, int]) -> None:
    """A disc at the centre stays a disc."""
    y, x = np.mgrid[0 : source[0], 0 : source[1]]
    radius = min(source) / 4
    disc = np.hypot(y + 0.5 - source[0] / 2, x + 0.5 - source[1] / 2) < radius
    image = np.repeat((disc * 255).astype(np.uint8)[:, :, None], 3, axis=2)
    spec = Preprocess(size=size, resize="short_side", crop_fraction=0.875)
    found = eval_transform(image, spec)[0].float() / 255
    scale = max(math.floor(size[0] / 0.875) / source[0], math.floor(size[1] / 0.875) / source[1])
    if radius * scale * 2 < min(size):
        assert float(found.sum()) == pytest.approx(disc.sum() * scale**2, rel=0.05)
    rows, columns = found.sum(1), found.sum(0)
    for line in (rows, columns):
        centre = float((line * (torch.arange(len(line)) + 0.5)).sum() / line.sum())
        assert centre == pytest.approx(len(line) / 2, abs=0.6)


def test_training_crop_is_the_resized_box() -> None:
    image = noise(120, 200)
    spec = Preprocess(size=(48, 64), resize="short_side", crop_fraction=0.5)
    found = crop_resize(image, (10, 30, 77, 91), spec)
    assert_close(found, pillow_resize(image[10:87, 30:121], (48, 64), "bilinear"))
    whole = crop_resize(image, (0, 0, 120, 200), spec)
    evaluated = eval_transform(image, spec.model_copy(update={"resize": "squash"}))
    assert (whole.int() - evaluated.int()).abs().max() <= 1
    for values in ({"antialias": False}, {"mean": (0.5,) * 4, "std": (0.5,) * 4}):
        exact = spec.model_copy(update={**values, "resize": "squash"})
        image = noise(120, 200, exact.channels)
        assert torch.equal(crop_resize(image, (0, 0, 120, 200), exact), eval_transform(image, exact))


@pytest.mark.parametrize("source", [(1, 1), (30000, 2), (2, 30000), (1, 100000), (3, 1)])
@pytest.mark.parametrize("values", [{}, {"resize": "short_side", "crop_fraction": 0.875}, {"antialias": False}])
def test_extreme_shapes(source: tuple[int, int], values: dict[str, object]) -> None:
    image = np.full((*source, 3), 77, np.uint8)
    found = eval_transform(image, Preprocess(size=(224, 224), **values))
    assert found.shape == (3, 224, 224)
    assert (found == 77).all()


def test_trimming_a_very_long_image_keeps_its_centre() -> None:
    ramp = np.linspace(0, 255, 4001).astype(np.uint8)
    image = np.repeat(np.repeat(ramp[:, None, None], 20, axis=1), 3, axis=2)
    found = eval_transform(image, Preprocess(size=(32, 32), resize="short_side"))
    height = int(32 * 4001 / 20)
    whole = np.array(Image.fromarray(image).resize((32, height), Image.Resampling.BILINEAR))
    top = round((height - 32) / 2)
    assert np.abs(found.permute(1, 2, 0).numpy().astype(int) - whole[top : top + 32]).max() <= 1


@settings(max_examples=60, deadline=None)
@given(
    height=st.integers(1, 90),
    width=st.integers(1, 90),
    size=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    fraction=st.floats(0.3, 1),
    channels=st.sampled_from([1, 2, 3]),
    resize=st.sampled_from(["squash", "short_side"]),
)
def test_any_image_fits_any_spec(height, width, size, fraction, channels, resize) -> None:  # type: ignore[no-untyped-def]
    image = noise(height, width, channels)
    grey = (0.5,) * channels
    spec = Preprocess(size=size, resize=resize, crop_fraction=fraction, mean=grey, std=grey)
    found = eval_transform(image, spec)
    assert found.shape == (channels, *size)
    assert found.min() >= image.min()
    assert found.max() <= image.max()


def test_read_only_and_strided_arrays_are_accepted_and_unchanged() -> None:
    image = noise(40, 50)
    expected = eval_transform(image.copy(), Preprocess(size=(16, 16)))
    image.flags.writeable = False
    before = image.copy()
    assert torch.equal(eval_transform(image, Preprocess(size=(16, 16))), expected)
    mirrored = eval_transform(image[:, ::-1], Preprocess(size=(16, 16)))
    assert (mirrored.flip(-1).int() - expected.int()).abs().max() <= 1
    np.testing.assert_array_equal(image, before)


def test_normalise_equals_the_formula() -> None:
    spec = Preprocess(size=(4, 4), mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    pixels = torch.randint(0, 256, (2, 3, 4, 4), dtype=torch.uint8)
    found = normalise(pixels, spec)
    assert found.dtype == torch.float32
    expected = (pixels.double().numpy() / 255 - np.reshape(spec.mean, (3, 1, 1))) / np.reshape(spec.std, (3, 1, 1))
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-6)


def test_normalise_covers_minus_one_to_one_by_default() -> None:
    pixels = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1).expand(2, 3, 2, 2)
    found = normalise(pixels, Preprocess(size=(2, 2)))
    assert found[0].unique().tolist() == [-1.0]
    assert found[1].unique().tolist() == [1.0]


def test_normalising_twice_is_an_error() -> None:
    spec = Preprocess(size=(2, 2))
    once = normalise(torch.zeros(1, 3, 2, 2, dtype=torch.uint8), spec)
    with pytest.raises(TypeError, match=r"uint8.*float32"):
        normalise(once, spec)


def test_default_mean_and_std_have_one_value_per_channel() -> None:
    for channels in (1, 3, 4):
        spec = resolve_preprocess((32, 32), None, {}, channels)
        assert spec.channels == channels
        assert (spec.mean, spec.std) == ((0.5,) * channels, (0.5,) * channels)
    base = Preprocess(size=(8, 8), mean=(0.1,), std=(0.2,))
    assert resolve_preprocess((8, 8), base, {}, 1) == base


def test_overrides_replace_values_of_the_base() -> None:
    base = Preprocess(size=(224, 224), resize="short_side", crop_fraction=0.9, mean=(0.1, 0.2, 0.3))
    spec = resolve_preprocess((96, 64), base, {"crop_fraction": 0.95})
    assert spec == base.model_copy(update={"size": (96, 64), "crop_fraction": 0.95})
    assert resolve_preprocess((32, 32), None, {}) == Preprocess(size=(32, 32))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"interpolaton": "bicubic"}, "unknown key 'interpolaton'; did you mean 'interpolation'"),
        ({"crop_fraction": 1.5}, "'crop_fraction'"),
        ({"resize": "stretch"}, "'resize'"),
    ],
)
def test_a_wrong_override_is_named(overrides: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        resolve_preprocess((32, 32), None, overrides)
