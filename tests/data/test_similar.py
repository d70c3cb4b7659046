"""Descriptors of changed copies, and similar pairs and groups against a comparison of all pairs."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image, ImageOps

from bench.planted import CHANGES, generated
from vitrail.data import similar
from vitrail.data.dataset import bundled_images
from vitrail.data.decode import decode
from vitrail.data.similar import (
    CANDIDATE_COSINE,
    SIMILAR_COSINE,
    connected_components,
    descriptor,
    similar_groups,
    similar_pairs,
)
from vitrail.data.sources.read import read_source

pytestmark = pytest.mark.slow  # compares all pairs of many images

PHOTOS = list(generated(30, (150, 200)))


def cosine(left: np.ndarray, right: np.ndarray) -> float:
    left, right = left.astype(float), right.astype(float)
    return float(left @ right / np.linalg.norm(left) / np.linalg.norm(right))


def mirrored(values: np.ndarray) -> np.ndarray:
    """The descriptor of the mirror image: cosines that are odd along x change their sign."""
    spectrum = values.reshape(8, 8).copy()
    spectrum[:, 1::2] *= -1
    return spectrum.ravel()


def all_pairs(descriptors: np.ndarray, threshold: float) -> set[tuple[int, int]]:
    """Reference: every image with every other, as it is and mirrored."""
    unit = descriptors.astype(float)
    rows = np.flatnonzero(unit.any(axis=1))
    unit = unit[rows] / np.linalg.norm(unit[rows], axis=1, keepdims=True)
    flipped = np.stack([mirrored(values) for values in unit])
    best = np.maximum(unit @ unit.T, unit @ flipped.T)
    return {(int(rows[i]), int(rows[j])) for i, j in zip(*np.nonzero(best >= threshold), strict=True) if i < j}


@pytest.fixture(scope="module")
def crowd() -> np.ndarray:
    """Descriptors of 3,000 real images and of changed copies of 200 of them."""
    source = read_source(bundled_images(), [])
    pixels = [decode(source.files.read(entry.name)) for entry in source.entries]
    descriptors = [descriptor(image) for image in pixels]
    for index, image in enumerate(pixels[:200]):
        change = list(CHANGES.values())[index % len(CHANGES)]
        copy = Image.open(io.BytesIO(change(Image.fromarray(image).resize((128, 128)))[0]))
        descriptors.append(descriptor(np.array(copy.convert("RGB"))))
    return np.stack(descriptors)


@pytest.mark.parametrize("change", CHANGES)
def test_changed_copies_have_similar_descriptors(change: str) -> None:
    for photo in PHOTOS:
        copy = decode(CHANGES[change](photo)[0])
        copied = descriptor(copy)
        similarity = cosine(descriptor(np.array(photo)), mirrored(copied) if change == "mirrored" else copied)
        assert similarity > (0.9 if "%" in change else 0.98), change


def test_different_images_have_different_descriptors() -> None:
    descriptors = [descriptor(np.array(photo)) for photo in PHOTOS]
    similarities = [abs(cosine(a, b)) for i, a in enumerate(descriptors) for b in descriptors[:i]]
    assert max(similarities) < CANDIDATE_COSINE


def test_descriptors_have_unit_length_and_no_brightness() -> None:
    for photo in PHOTOS[:5]:
        original = descriptor(np.array(photo))
        assert original.dtype == np.int8
        assert original.shape == (64,)
        assert original[0] == 0
        assert abs(np.linalg.norm(original.astype(float)) - 127) < 3
        darker = descriptor(np.array(photo) // 2)
        assert cosine(original, darker) > 0.99


def test_the_mirrored_descriptor_is_that_of_the_mirror_image() -> None:
    for photo in PHOTOS[:5]:
        flipped = descriptor(np.array(ImageOps.mirror(photo)))
        assert cosine(flipped, mirrored(descriptor(np.array(photo)))) > 0.99


@pytest.mark.parametrize(
    "pixels",
    [
        np.full((50, 60, 3), 77, np.uint8),
        np.zeros((1, 1, 3), np.uint8),
        np.random.default_rng(0).integers(0, 256, (15, 400, 3), dtype=np.uint8),
    ],
)
def test_uniform_and_tiny_images_have_a_zero_descriptor(pixels: np.ndarray) -> None:
    assert not descriptor(pixels).any()


def test_extreme_shapes_and_sizes() -> None:
    for shape in ((16, 5000), (5000, 16), (16, 16), (3001, 17)):
        pixels = np.random.default_rng(1).integers(0, 256, (*shape, 3), dtype=np.uint8)
        assert descriptor(pixels).shape == (64,)


@pytest.mark.slow
def test_similar_pairs_equal_a_comparison_of_all_pairs(crowd: np.ndarray) -> None:
    pairs = similar_pairs(crowd)
    found = set(zip(pairs.left.tolist(), pairs.right.tolist(), strict=True))
    assert len(found) == len(pairs)
    candidates, similar_ones = all_pairs(crowd, CANDIDATE_COSINE - 1e-6), all_pairs(crowd, SIMILAR_COSINE)
    assert found <= candidates
    assert len(found & similar_ones) == len(similar_ones)
    assert len(found) >= 0.95 * len(candidates)
    copies = {(index, 3000 + index) for index in range(200)}
    assert len(copies & found) >= 195


def test_groups_equal_the_components_of_all_pairs(crowd: np.ndarray) -> None:
    groups = similar_groups(crowd)
    oracle = list(range(len(crowd)))
    for left, right in sorted(all_pairs(crowd, SIMILAR_COSINE)):
        old, new = oracle[right], oracle[left]
        oracle = [new if group == old else group for group in oracle]
    assert len(set(oracle)) == len(set(groups.tolist()))
    assert len(set(zip(oracle, groups.tolist(), strict=True))) == len(set(oracle))


def test_groups_do_not_depend_on_the_order(crowd: np.ndarray) -> None:
    order = np.random.default_rng(1).permutation(len(crowd))
    groups = similar_groups(crowd[order])
    again = similar_groups(crowd)[order]
    assert len(set(zip(groups.tolist(), again.tolist(), strict=True))) == len(set(groups.tolist()))


def test_zero_descriptors_are_in_no_group() -> None:
    descriptors = np.zeros((100, 64), np.int8)
    assert similar_groups(descriptors).tolist() == list(range(100))
    assert len(similar_pairs(descriptors)) == 0
    descriptors[3] = descriptor(np.array(PHOTOS[0]))
    assert similar_groups(descriptors).tolist() == list(range(100))
    assert similar_groups(descriptors[:0]).tolist() == []


def test_frames_of_a_long_video_are_one_group() -> None:
    rng = np.random.default_rng(0)
    first, other = (descriptor(np.array(photo)).astype(float) for photo in PHOTOS[:2])
    clip = np.rint(first + rng.normal(0, 0.4, (120, 64))).clip(-127, 127).astype(np.int8)
    groups = similar_groups(np.concatenate([clip, other[None].astype(np.int8)]))
    assert len(set(groups[:120].tolist())) == 1 and groups[120] != groups[0]


def test_many_copies_of_one_image_are_one_group() -> None:
    others = np.stack([descriptor(np.array(photo)) for photo in generated(300, (60, 60))])
    copies = np.repeat(others[:1], 40, axis=0)
    groups = similar_groups(np.concatenate([others, copies]))
    assert len(set(groups[300:].tolist()) | {int(groups[0])}) == 1
    assert len(set(groups[:300].tolist())) == 300


def test_connected_components() -> None:
    groups = connected_components(6, np.array([4, 1, 2]), np.array([5, 4, 0]))
    assert groups.tolist() == [0, 1, 0, 3, 1, 1]


def test_comparisons_grow_linearly_with_the_number_of_images(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = np.random.default_rng(0).standard_normal((4000, 64))
    descriptors = np.rint(noise / np.linalg.norm(noise, axis=1, keepdims=True) * 127).astype(np.int8)
    compared = 0
    real = similar._cosines

    def counted(points: np.ndarray, lengths: np.ndarray, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        nonlocal compared
        compared += len(left)
        return real(points, lengths, left, right)

    monkeypatch.setattr(similar, "_cosines", counted)
    counts = []
    for count in (1000, 4000):
        compared = 0
        similar_pairs(descriptors[:count])
        counts.append(compared)
    assert counts[1] < 4.1 * counts[0]  # all pairs would be 16 times
