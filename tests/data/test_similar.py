"""Descriptions of images against PIL's own changes, and pairs and groups against a comparison of all with all."""

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

pytestmark = pytest.mark.slow  # all pairs of many pictures

PHOTOS = list(generated(30, (150, 200)))


def cosine(one: np.ndarray, other: np.ndarray) -> float:
    one, other = one.astype(float), other.astype(float)
    return float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))


def mirrored(description: np.ndarray) -> np.ndarray:
    """By definition: cosines that are odd along x change their sign."""
    waves = description.reshape(8, 8).copy()
    waves[:, 1::2] *= -1
    return waves.ravel()


def all_pairs(looks: np.ndarray, least: float) -> set[tuple[int, int]]:
    """The oracle: every image with every other, as it is and mirrored."""
    unit = looks.astype(float)
    told = np.flatnonzero(unit.any(axis=1))
    unit = unit[told] / np.linalg.norm(unit[told], axis=1, keepdims=True)
    other = np.stack([mirrored(one) for one in unit])
    best = np.maximum(unit @ unit.T, unit @ other.T)
    return {(int(told[i]), int(told[j])) for i, j in zip(*np.nonzero(best >= least), strict=True) if i < j}


@pytest.fixture(scope="module")
def crowd() -> np.ndarray:
    """Descriptions of 3,000 real images and of changed copies of 200 of them."""
    source = read_source(bundled_images(), [])
    pixels = [decode(source.files.read(entry.name)) for entry in source.entries]
    looks = [descriptor(one) for one in pixels]
    for index, one in enumerate(pixels[:200]):
        make = list(CHANGES.values())[index % len(CHANGES)]
        copy = Image.open(io.BytesIO(make(Image.fromarray(one).resize((128, 128)))[0]))
        looks.append(descriptor(np.array(copy.convert("RGB"))))
    return np.stack(looks)


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_copy_has_nearly_the_same_description(change: str) -> None:
    for photo in PHOTOS:
        copy = decode(CHANGES[change](photo)[0])
        description = descriptor(copy)
        likeness = cosine(descriptor(np.array(photo)), mirrored(description) if change == "mirrored" else description)
        assert likeness > (0.9 if "%" in change else 0.98), change


def test_other_pictures_have_other_descriptions() -> None:
    looks = [descriptor(np.array(photo)) for photo in PHOTOS]
    likeness = [abs(cosine(a, b)) for i, a in enumerate(looks) for b in looks[:i]]
    assert max(likeness) < CANDIDATE_COSINE


def test_the_description_is_of_unit_length_without_the_brightness() -> None:
    for photo in PHOTOS[:5]:
        description = descriptor(np.array(photo))
        assert description.dtype == np.int8
        assert description.shape == (64,)
        assert description[0] == 0
        assert abs(np.linalg.norm(description.astype(float)) - 127) < 3
        darker = descriptor(np.array(photo) // 2)
        assert cosine(description, darker) > 0.99


def test_the_mirror_image_needs_no_second_look() -> None:
    for photo in PHOTOS[:5]:
        turned = descriptor(np.array(ImageOps.mirror(photo)))
        assert cosine(turned, mirrored(descriptor(np.array(photo)))) > 0.99


@pytest.mark.parametrize(
    "pixels",
    [
        np.full((50, 60, 3), 77, np.uint8),
        np.zeros((1, 1, 3), np.uint8),
        np.random.default_rng(0).integers(0, 256, (15, 400, 3), dtype=np.uint8),
    ],
)
def test_one_colour_and_too_few_pixels_tell_nothing(pixels: np.ndarray) -> None:
    assert not descriptor(pixels).any()


def test_extreme_shapes_and_sizes() -> None:
    for shape in ((16, 5000), (5000, 16), (16, 16), (3001, 17)):
        pixels = np.random.default_rng(1).integers(0, 256, (*shape, 3), dtype=np.uint8)
        assert descriptor(pixels).shape == (64,)


@pytest.mark.slow
def test_close_pairs_are_those_of_a_comparison_of_all_with_all(crowd: np.ndarray) -> None:
    pairs = similar_pairs(crowd)
    found = set(zip(pairs.left.tolist(), pairs.right.tolist(), strict=True))
    assert len(found) == len(pairs)
    everything, sure = all_pairs(crowd, CANDIDATE_COSINE - 1e-6), all_pairs(crowd, SIMILAR_COSINE)
    assert found <= everything
    assert len(found & sure) == len(sure)
    assert len(found) >= 0.95 * len(everything)
    copies = {(index, 3000 + index) for index in range(200)}
    assert len(copies & found) >= 195


def test_groups_are_what_the_pairs_of_all_with_all_join(crowd: np.ndarray) -> None:
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


def test_what_tells_nothing_is_alone() -> None:
    looks = np.zeros((100, 64), np.int8)
    assert similar_groups(looks).tolist() == list(range(100))
    assert len(similar_pairs(looks)) == 0
    looks[3] = descriptor(np.array(PHOTOS[0]))
    assert similar_groups(looks).tolist() == list(range(100))
    assert similar_groups(looks[:0]).tolist() == []


def test_the_frames_of_a_long_clip_are_one_group() -> None:
    rng = np.random.default_rng(0)
    first, other = (descriptor(np.array(photo)).astype(float) for photo in PHOTOS[:2])
    clip = np.rint(first + rng.normal(0, 0.4, (120, 64))).clip(-127, 127).astype(np.int8)
    groups = similar_groups(np.concatenate([clip, other[None].astype(np.int8)]))
    assert len(set(groups[:120].tolist())) == 1 and groups[120] != groups[0]


def test_many_copies_of_one_picture_are_one_group_up_to_a_limit() -> None:
    others = np.stack([descriptor(np.array(photo)) for photo in generated(300, (60, 60))])
    copies = np.repeat(others[:1], 40, axis=0)
    groups = similar_groups(np.concatenate([others, copies]))
    assert len(set(groups[300:].tolist()) | {int(groups[0])}) == 1
    assert len(set(groups[:300].tolist())) == 300


def test_join() -> None:
    groups = connected_components(6, np.array([4, 1, 2]), np.array([5, 4, 0]))
    assert groups.tolist() == [0, 1, 0, 3, 1, 1]


def test_work_grows_with_the_number_of_images(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = np.random.default_rng(0).standard_normal((4000, 64))
    looks = np.rint(looks / np.linalg.norm(looks, axis=1, keepdims=True) * 127).astype(np.int8)
    compared = 0
    real = similar._cosines

    def counted(points: np.ndarray, lengths: np.ndarray, one: np.ndarray, other: np.ndarray) -> np.ndarray:
        nonlocal compared
        compared += len(one)
        return real(points, lengths, one, other)

    monkeypatch.setattr(similar, "_cosines", counted)
    counts = []
    for count in (1000, 4000):
        compared = 0
        similar_pairs(looks[:count])
        counts.append(compared)
    assert counts[1] < 4.1 * counts[0]  # all pairs would be 16 times
