import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vitrail.config import AugmentConfig
from vitrail.images.augment import flip, inception_crop, mixup

CONFIG = AugmentConfig()


@given(st.integers(1, 700), st.integers(1, 700), st.integers(0, 2**31))
def test_a_crop_lies_inside_the_image_and_within_the_asked_area_and_aspect(height, width, sample):
    top, left, h, w = inception_crop(height, width, CONFIG, 0, 0, sample)
    assert top >= 0 and top + h <= height and left >= 0 and left + w <= width
    whole = (top, left, h, w) == (0, 0, height, width)
    assert whole or 0.05 * height * width <= h * w <= height * width
    if not whole and min(h, w) > 20:
        assert 0.7 < w / h < 1.4


def test_the_height_is_uniform_as_in_the_reference_not_the_area():
    """With a fixed aspect of 1, TensorFlow draws the height evenly from sqrt(5 %) to all of it."""
    config = AugmentConfig(aspect=(1.0, 1.0))
    heights = np.array([inception_crop(1000, 1000, config, 0, 0, sample)[2] for sample in range(3000)])
    low = round((0.05 * 1000 * 1000) ** 0.5)
    assert heights.min() >= low and heights.max() <= 1000
    assert heights.mean() == pytest.approx((low + 1000) / 2, rel=0.03)
    share_of_area = (heights / 1000.0) ** 2
    assert share_of_area.mean() < 0.5  # an area drawn evenly would give 0.525


def test_an_image_no_crop_fits_is_taken_whole():
    assert inception_crop(2, 3000, CONFIG, 0, 0, 0) == (0, 0, 2, 3000)


def test_flip_mirrors_some_images_and_only_mirrors():
    pixels = torch.arange(64 * 3 * 4 * 5, dtype=torch.float32).reshape(64, 3, 4, 5)
    epoch, sample = torch.zeros(64, dtype=torch.int64), torch.arange(64)
    flipped = flip(pixels, 0, epoch, sample)
    mirrored = [bool((flipped[i] == pixels[i].flip(-1)).all()) for i in range(64)]
    same = [bool((flipped[i] == pixels[i]).all()) for i in range(64)]
    assert all(a != b for a, b in zip(mirrored, same, strict=True))
    assert 16 < sum(mirrored) < 48
    again = flip(pixels[10:20], 0, epoch[10:20], sample[10:20])
    assert torch.equal(again, flipped[10:20])


def test_mixup_mixes_pixels_and_targets_by_the_same_share():
    targets = torch.eye(4)
    mixed, soft = mixup(targets, targets, 0.4, 0, 3)
    assert torch.equal(mixed, soft)
    share = soft.diagonal()[0].item()
    assert 0.5 <= share <= 1
    assert torch.allclose(soft, share * torch.eye(4) + (1 - share) * torch.eye(4).roll(1, 0))
    assert torch.allclose(soft.sum(-1), torch.ones(4))


def test_mixup_shares_follow_the_folded_beta():
    one = torch.ones(1, 1)
    other = torch.cat([one, one * 0])
    shares = [mixup(other, other, 1.0, 0, step)[0][0, 0].item() for step in range(2000)]
    assert np.mean(shares) == pytest.approx(0.75, abs=0.015)  # max(a, 1-a) of a uniform a
