"""Thumbnail similarity: changed copies match, different images do not."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from PIL import Image, ImageOps

from bench.planted import CHANGES, generated
from vitrail.data.decode import decode
from vitrail.doctor.thumbnails import SAME_IMAGE, SIDE, thumbnail, thumbnail_similarity

pytestmark = pytest.mark.slow  # thousands of comparisons

PHOTOS = [np.array(photo) for photo in generated(40, (150, 200))]
THUMBNAILS = np.stack([thumbnail(photo) for photo in PHOTOS])


@pytest.mark.parametrize("change", CHANGES)
def test_changed_copies_match(change: str) -> None:
    copies = np.stack([thumbnail(decode(CHANGES[change](Image.fromarray(photo))[0])) for photo in PHOTOS])
    if change == "mirrored":
        copies = copies[:, :, ::-1]
    assert (thumbnail_similarity(THUMBNAILS, copies) >= SAME_IMAGE).mean() >= 0.95
    assert (thumbnail_similarity(copies, THUMBNAILS) >= SAME_IMAGE).mean() >= 0.95


def test_different_images_do_not_match() -> None:
    assert (thumbnail_similarity(THUMBNAILS, np.roll(THUMBNAILS, 1, axis=0)) < 0.8).all()
    assert thumbnail_similarity(THUMBNAILS, THUMBNAILS).dtype == np.float32
    assert (thumbnail_similarity(THUMBNAILS, THUMBNAILS[:, :, ::-1]) < 0.8).all()


def test_same_shapes_in_other_colours_do_not_match() -> None:
    shapes = Image.fromarray(PHOTOS[0]).convert("L")
    red, blue = (ImageOps.colorize(shapes, "black", colour).convert("RGB") for colour in ("#ff5050", "#7878ff"))
    pair = [np.stack([thumbnail(np.array(image))]) for image in (red, blue)]
    assert thumbnail_similarity(*pair) == [0]
    assert thumbnail_similarity(pair[0], pair[0]) > 0.999


COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 200, 30),
    "blue": (30, 30, 220),
    "yellow": (230, 230, 40),
    "orange": (240, 150, 20),
    "purple": (150, 40, 200),
    "brown": (120, 70, 30),
    "pink": (250, 170, 190),
    "black": (0, 0, 0),
    "white": (255, 255, 255),
}


def checkerboards(cell: int) -> list[np.ndarray]:
    """One checkerboard for each pair of colours."""
    index = np.arange(128) // cell
    first = ((index[:, None] + index) % 2 == 0)[..., None]
    return [np.where(first, a, b).astype(np.uint8) for a, b in combinations(COLOURS.values(), 2)]


@pytest.mark.parametrize("cell", [8, 16, 40])
def test_checkerboards_of_different_colours_do_not_match(cell: int) -> None:
    small = np.stack([thumbnail(image) for image in checkerboards(cell)])
    left, right = np.array(list(combinations(range(len(small)), 2))).T
    assert len(left) == 990
    assert (thumbnail_similarity(small[left], small[right]) < SAME_IMAGE).all()


@pytest.mark.parametrize("change", ["JPEG quality 50", "brighter", "less colour", "grey"])
def test_changed_copies_of_checkerboards_match(change: str) -> None:
    images = checkerboards(16)
    small = np.stack([thumbnail(image) for image in images])
    copies = np.stack([thumbnail(decode(CHANGES[change](Image.fromarray(image))[0])) for image in images])
    assert (thumbnail_similarity(small, copies) >= SAME_IMAGE).mean() >= 0.95


def test_an_image_has_similarity_one_with_itself() -> None:
    np.testing.assert_allclose(thumbnail_similarity(THUMBNAILS, THUMBNAILS), 1, atol=1e-4)


def test_uniform_images_never_match() -> None:
    flat = np.full((3, SIDE, SIDE, 3), [[[[10]]], [[[200]]], [[[10]]]], np.uint8)
    assert (thumbnail_similarity(flat, flat[::-1]) < SAME_IMAGE).all()


def test_no_pairs() -> None:
    assert len(thumbnail_similarity(THUMBNAILS[:0], THUMBNAILS[:0])) == 0


@pytest.mark.parametrize("shape", [(1, 1), (2, 30_000), (3000, 16), (64, 64)])
def test_thumbnails_of_extreme_shapes(shape: tuple[int, int]) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (*shape, 3), dtype=np.uint8)
    small = thumbnail(pixels)
    assert small.shape == (SIDE, SIDE, 3)
    assert small.dtype == np.uint8
    if shape == (64, 64):
        np.testing.assert_array_equal(small, pixels)
