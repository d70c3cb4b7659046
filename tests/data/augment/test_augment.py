"""Crops, flips and random erasing against torchvision and timm, and independence of the rest of the batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from scipy import stats
from timm.data.random_erasing import RandomErasing

from vitrail.config import AugmentConfig, RunConfig, validate
from vitrail.data.augment.batch import augment_batch, erase, erased_boxes
from vitrail.data.augment.crop import crop_box, crop_draws
from vitrail.errors import UserError

CONFIG = AugmentConfig()
RESIZED = AugmentConfig(crop="random_resized", scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3))


def boxes(height: int, width: int, config: AugmentConfig, count: int) -> np.ndarray:
    return np.array([crop_box(height, width, config, row) for row in crop_draws(0, 0, np.arange(count))])


@given(st.integers(1, 700), st.integers(1, 700), st.integers(0, 2**31))
def test_crops_are_inside_the_image_and_within_scale_and_ratio(height, width, sample):
    for config in (CONFIG, RESIZED, AugmentConfig(crop="resmall")):
        top, left, h, w = crop_box(height, width, config, crop_draws(0, 0, sample))
        assert top >= 0 and h > 0 and top + h <= height and left >= 0 and w > 0 and left + w <= width
        if config.crop == "inception":
            whole = (top, left, h, w) == (0, 0, height, width)
            assert whole or 0.05 * height * width <= h * w <= height * width
            if not whole and min(h, w) > 20:
                assert 0.7 < w / h < 1.4


def test_crops_are_those_of_earlier_versions():
    """A run resumed with a newer version sees the same crops."""
    found = [crop_box(375, 500, CONFIG, row) for row in crop_draws(5, [0, 0, 7], [0, 1, 10**6])]
    assert found == EARLIER


EARLIER = [(73, 125, 284, 213), (10, 119, 278, 251), (33, 34, 224, 293)]


def test_the_crop_height_is_uniform_as_in_tensorflow():
    """With a fixed ratio of 1, the height is uniform from sqrt(5 %) to 100 %."""
    heights = boxes(1000, 1000, AugmentConfig(ratio=(1.0, 1.0)), 3000)[:, 2]
    low = round((0.05 * 1000 * 1000) ** 0.5)
    assert heights.min() >= low and heights.max() <= 1000
    assert heights.mean() == pytest.approx((low + 1000) / 2, rel=0.03)
    area = (heights / 1000.0) ** 2
    assert area.mean() < 0.5  # a uniform area would give 0.525


def test_without_a_fitting_crop_the_whole_image_is_used():
    assert crop_box(2, 3000, CONFIG, crop_draws(0, 0, 0)) == (0, 0, 2, 3000)


def test_random_resized_crops_are_distributed_as_in_torchvision():
    from torchvision.transforms import RandomResizedCrop

    torch.manual_seed(0)
    image = torch.zeros(3, 375, 500)
    expected = np.array([RandomResizedCrop.get_params(image, [0.08, 1.0], [3 / 4, 4 / 3]) for _ in range(1500)])
    found = boxes(375, 500, RESIZED, 1500)
    for measure in (lambda b: b[:, 2] * b[:, 3], lambda b: b[:, 3] / b[:, 2], lambda b: b[:, 0], lambda b: b[:, 1]):
        assert stats.ks_2samp(measure(found), measure(expected)).pvalue > 1e-3


@pytest.mark.parametrize("size", [(4, 900), (900, 4), (10, 21)])
def test_random_resized_falls_back_to_the_centre_as_torchvision(size):
    from torchvision.transforms import RandomResizedCrop

    config = AugmentConfig(crop="random_resized", scale=(1.0, 1.0), ratio=(3 / 4, 4 / 3))  # never fits
    expected = RandomResizedCrop.get_params(torch.zeros(3, *size), [1.0, 1.0], [3 / 4, 4 / 3])
    assert crop_box(*size, config, crop_draws(0, 0, 0)) == expected


def test_resmall_crops_seven_eighths_of_the_short_side_at_random():
    found = boxes(256, 320, AugmentConfig(crop="resmall"), 2000)
    assert (found[:, 2:] == 224).all()
    for column, positions in ((0, 33), (1, 97)):
        counts = np.bincount(found[:, column], minlength=positions)
        assert len(counts) == positions
        assert stats.chisquare(counts).pvalue > 1e-3


def test_flips_mirror_about_half_of_the_images():
    pixels = torch.randint(0, 256, (64, 3, 4, 5), dtype=torch.uint8)
    epoch, sample = torch.zeros(64, dtype=torch.int64), torch.arange(64)
    for config, axis in ((CONFIG, -1), (AugmentConfig(flip=False, flip_vertical=True), -2)):
        flipped = augment_batch(pixels, config, 0, epoch, sample)
        mirrored = [torch.equal(flipped[i], pixels[i].flip(axis)) for i in range(64)]
        same = [torch.equal(flipped[i], pixels[i]) for i in range(64)]
        assert all(a != b for a, b in zip(mirrored, same, strict=True))
        assert 16 < sum(mirrored) < 48
    both = augment_batch(pixels, AugmentConfig(flip_vertical=True), 0, epoch, sample)
    assert any(torch.equal(both[i], pixels[i].flip(-1, -2)) for i in range(64))


def test_zoom_boxes_have_the_configured_scale_ratio_and_positions():
    """The box is recovered from the offsets and slopes of ramps down and across."""
    config, count = AugmentConfig(crop="zoom", scale=(0.25, 0.64), ratio=(3 / 4, 4 / 3), flip=False), 1500
    ramp = 8 * torch.arange(32, dtype=torch.uint8)
    pixels = torch.stack([ramp[:, None].expand(32, 32), ramp.expand(32, 32)]).expand(count, 2, 32, 32)
    zoomed = augment_batch(pixels, config, 0, torch.zeros(count, dtype=torch.int64), torch.arange(count)).double()
    assert (zoomed[:, 0, :, 0] == zoomed[:, 0, :, 9]).all() and (zoomed[:, 1, 0] == zoomed[:, 1, 9]).all()
    inner = slice(4, 28)  # without the border, where the ramps are clipped
    positions = np.arange(32)[inner] + 0.5
    (height, top), (width, left) = (
        np.polyfit(positions, line[:, inner].numpy().T / 8 + 0.5, 1) for line in (zoomed[:, 0, :, 0], zoomed[:, 1, 0])
    )
    assert stats.kstest(height * width, stats.uniform(0.25, 0.39).cdf).pvalue > 1e-3
    shape = np.log(width / height)
    assert stats.kstest(shape, stats.uniform(np.log(3 / 4), 2 * np.log(4 / 3)).cdf).pvalue > 1e-3
    for first, side in ((top, height), (left, width)):
        assert stats.kstest(first / (32 * (1 - side)), stats.uniform().cdf).pvalue > 1e-3


def test_zoom_resizes_as_pillow():
    image = np.random.default_rng(0).integers(0, 256, (24, 32, 3), dtype=np.uint8)
    ramps = (
        np.broadcast_to(8 * np.arange(32, dtype=np.uint8), (24, 32)),
        np.broadcast_to(8 * np.arange(24, dtype=np.uint8)[:, None], (24, 32)),
    )
    pixels = torch.from_numpy(np.concatenate([image, np.stack(ramps, -1)], -1)).permute(2, 0, 1)[None]
    config = AugmentConfig(crop="zoom", scale=(0.3, 0.5), flip=False)
    zoomed = augment_batch(pixels, config, 0, torch.zeros(1, dtype=torch.int64), torch.tensor([5]))[0].numpy()
    edges = []
    for line in (zoomed[3, 0], zoomed[4, :, 0]):
        inner = np.arange(len(line))[4:-4]
        slope, start = np.polyfit(inner + 0.5, line[inner] / 8 + 0.5, 1)
        edges.append((start, start + slope * len(line)))
    (left, right), (top, bottom) = edges
    expected = Image.fromarray(image).resize((32, 24), Image.Resampling.BILINEAR, box=(left, top, right, bottom))
    difference = np.abs(np.asarray(expected, int).transpose(2, 0, 1) - zoomed[:3])
    assert difference.mean() < 1.5 and difference.max() < 12  # the box is recovered from rounded values
    assert np.abs(image.transpose(2, 0, 1).astype(int) - zoomed[:3]).mean() > 50


def test_the_two_flips_are_independent():
    count = 2000
    pixels = torch.tensor([[0, 1], [2, 3]], dtype=torch.uint8).expand(count, 1, 2, 2)
    config = AugmentConfig(flip_vertical=True)
    corner = augment_batch(pixels, config, 0, torch.zeros(count, dtype=torch.int64), torch.arange(count))[:, 0, 0, 0]
    across, down = (corner % 2).numpy(), (corner // 2).numpy()
    assert across.mean() == pytest.approx(0.5, abs=0.05) and down.mean() == pytest.approx(0.5, abs=0.05)
    assert abs(np.corrcoef(across, down)[0, 1]) < 0.08  # 3.6 deviations of independent coins


def test_erased_boxes_are_distributed_as_in_timm():
    config, count, size = AugmentConfig(erasing=1.0), 1500, (64, 96)
    found = erased_boxes(config, 0, np.zeros(count, np.int64), np.arange(count), size)
    expected = []
    for image in RandomErasing(probability=1.0, mode="const", device="cpu")(torch.ones(count, 1, *size)):
        erased = (image[0] == 0).nonzero()
        top, left = erased.amin(0).tolist()
        bottom, right = erased.amax(0).tolist()
        expected.append((top, left, bottom - top + 1, right - left + 1))
    for column in range(4):
        assert stats.ks_2samp(found[:, column], np.array(expected)[:, column]).pvalue > 1e-3
    some = erased_boxes(AugmentConfig(erasing=0.25), 0, np.zeros(count, np.int64), np.arange(count), size)
    assert (some[:, 2] > 0).mean() == pytest.approx(0.25, abs=0.04)


@pytest.mark.parametrize("fill", ["noise", "mean"])
def test_erasing_changes_only_its_boxes(fill):
    config = AugmentConfig(erasing=0.5, erasing_fill=fill)
    epoch, sample = torch.full((40,), 3), torch.arange(40)
    before = torch.full((40, 3, 48, 48), 9.0)
    after = erase(before.clone(), config, 1, epoch, sample)
    filled = []
    for image, (top, left, h, w) in zip(
        after, erased_boxes(config, 1, epoch.numpy(), sample.numpy(), (48, 48)), strict=True
    ):
        inside = torch.zeros(48, 48, dtype=torch.bool)
        inside[top : top + h, left : left + w] = True
        assert (image[:, ~inside] == 9).all()
        filled.append(image[:, inside].flatten())
    values = torch.cat(filled)
    assert len(values) > 3000
    if fill == "mean":
        assert (values == 0).all()
    else:
        assert stats.kstest(values.numpy(), "norm").pvalue > 1e-3
        first, second = [v for v in filled if len(v)][:2]
        assert not torch.equal(first[:9], second[:9])


EVERYTHING = [
    AugmentConfig(flip_vertical=True, randaugment_layers=3, color_jitter=0.4, hue=0.1, erasing=0.5),
    AugmentConfig(three_augment=True, color_jitter=0.3, erasing=0.5, erasing_fill="mean"),
    AugmentConfig(randaugment_layers=2, randaugment_magnitude=9, randaugment_std=0.5, randaugment_style="timm"),
]


@pytest.mark.parametrize("config", EVERYTHING)
def test_a_sample_does_not_depend_on_the_batch(config):
    """The whole batch, halves, single images and a shuffled batch are bit-identical."""
    pixels = torch.randint(0, 256, (16, 3, 40, 33), dtype=torch.uint8)
    epoch, sample = torch.arange(16) // 9, torch.arange(16) * 7919

    def augmented(rows: torch.Tensor) -> torch.Tensor:
        out = augment_batch(pixels[rows], config, 4, epoch[rows], sample[rows])
        return erase(out.to(torch.float32) / 255, config, 4, epoch[rows], sample[rows])

    untouched, every = pixels.clone(), torch.arange(16)
    whole = augmented(every)
    assert torch.equal(pixels, untouched)  # the input is not modified
    for parts in (every.split(8), every.split(1)):
        assert torch.equal(torch.cat([augmented(part) for part in parts]), whole)
    shuffled = torch.randperm(16)
    assert torch.equal(augmented(shuffled), whole[shuffled])
    assert not torch.equal(
        augment_batch(pixels, config, 5, epoch, sample), augment_batch(pixels, config, 4, epoch, sample)
    )


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"three_augment": True, "randaugment_layers": 2}, "three_augment and randaugment_layers"),
        (
            {"randaugment_style": "timm", "randaugment_magnitude": 15},
            "randaugment_magnitude is at most 10 with randaugment_style=timm, not 15",
        ),
        ({"hue": 0.6}, "less than or equal to 0.5"),
        ({"erasing": 25}, "less than or equal to 1"),
        ({"color_jitter": -0.1}, "greater than or equal to 0"),
        ({"mix_per": "pair"}, "'batch' or 'sample'"),
    ],
)
def test_invalid_settings_are_errors(keys, message):
    with pytest.raises(UserError, match=message):
        validate(RunConfig, {"augment": keys}, "recipe")
