"""Images that look alike: a short description of each, and pairs and groups found by it without comparing all pairs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

DESCRIPTOR_SIZE = 64  # numbers in a description
SIMILAR_COSINE = 0.94  # cosine of two descriptions from which images stay on one side of a split
CANDIDATE_COSINE = 0.87  # cosine from which two images are worth a closer comparison
MIN_SIDE = 16  # pixels: on a shorter side there is too little to see

_WAVES = 8  # cosines along each axis
_SAMPLES = 48  # pixels read along each axis, up to twice as many: more change nothing
_TAPER = 0.25  # of each side fades out, so that borders and small crops hardly count
_NO_STRUCTURE = 0.5  # grey levels: below this a description would be that of noise
_LUMINANCE = np.array([0.299, 0.587, 0.114], np.float32)
_MIRROR = np.tile(np.where(np.arange(_WAVES) % 2, -1, 1), _WAVES).astype(np.int8)  # waves that a mirror turns over
_SHARPNESS = np.hypot(*np.mgrid[:_WAVES, :_WAVES]).ravel().astype(np.float32)  # evens out what photographs have less of

_PLANES = 256  # hyperplanes that cut the space of descriptions
_TABLES, _KEY_BITS, _WINDOW = 32, 48, 8
_ROWS = 65_536  # handled at a time


def descriptor(pixels: np.ndarray) -> np.ndarray:
    """A description of decoded pixels (height, width, 3), int8 (64,); zeros when there is nothing to tell it by.

    It is the low frequencies of the brightness, of unit length (127): hardly changed by re-encoding, resizing,
    brightness, contrast and colour, and little by borders and crops of a few per cent.
    """
    if min(pixels.shape[:2]) < MIN_SIDE:
        return np.zeros(DESCRIPTOR_SIZE, np.int8)
    few = pixels[_evenly(pixels.shape[0]), _evenly(pixels.shape[1])]
    height, width, _ = few.shape
    waves = _waves(height) @ few.reshape(height, 3 * width).astype(np.float32) @ _colour_waves(width)
    flat = (waves - waves[0, 0] * _level(height, width)).ravel()
    if flat @ flat < _NO_STRUCTURE**2:
        return np.zeros(DESCRIPTOR_SIZE, np.int8)
    flat *= _SHARPNESS
    return np.rint(flat * (127 / math.sqrt(flat @ flat))).astype(np.int8)


def _evenly(side: int) -> slice:
    """Some of the pixels along a side, as far from either end, so that a mirror image shows the same ones."""
    step = max(1, side // _SAMPLES)
    return slice((side - 1) % step // 2, None, step)


@lru_cache(maxsize=512)
def _waves(count: int) -> np.ndarray:
    """Cosines over `count` pixels that fade out at both ends, (8, count)."""
    place = (np.arange(count) + 0.5) / count
    fade = np.sin(np.pi / 2 * np.clip(np.minimum(place, 1 - place) / _TAPER, 0, 1)) ** 2
    return (np.cos(np.pi * np.arange(_WAVES)[:, None] * place) * fade / count).astype(np.float32)


@lru_cache(maxsize=512)
def _colour_waves(count: int) -> np.ndarray:
    """The same for pixels of three colours, whose luminance it takes, (3 count, 8)."""
    return np.ascontiguousarray((_waves(count).T[:, None, :] * _LUMINANCE[:, None]).reshape(3 * count, _WAVES))


@lru_cache(maxsize=4096)
def _level(height: int, width: int) -> np.ndarray:
    """What a picture of one brightness gives, as multiples of its first wave, (8, 8)."""
    whole = np.outer(_waves(height).sum(1), _waves(width).sum(1))
    return whole / whole[0, 0]


@dataclass(frozen=True)
class Pairs:
    """Images `left` < `right` whose descriptions are close, the right one perhaps as its mirror image."""

    left: np.ndarray  # int64 (m,)
    right: np.ndarray  # int64 (m,)
    mirrored: np.ndarray  # bool (m,)
    cosine: np.ndarray  # float32 (m,)

    def __len__(self) -> int:
        return len(self.left)

    def keep(self, chosen: np.ndarray) -> Pairs:
        return Pairs(self.left[chosen], self.right[chosen], self.mirrored[chosen], self.cosine[chosen])


def similar_groups(looks: np.ndarray, least: float = SIMILAR_COSINE) -> np.ndarray:
    """A number for each image, int64 (n,): equal numbers look alike, directly or through others between them.

    A group that grows beyond all measure may be a chain of ever so slightly different images and not one scene: it is
    cut at a higher likeness. What stays together even then, as the frames of a clip do, is one.
    """
    count = len(looks)
    most = max(50, count // 50)
    pairs = similar_pairs(looks, least)
    groups = connected_components(count, pairs.left, pairs.right)
    for higher in (0.97, 0.985, 0.995):
        sizes = np.bincount(groups, minlength=count)
        too_large = sizes[groups] > most
        if not too_large.any():
            break
        pairs = pairs.keep(~too_large[pairs.left] | (pairs.cosine >= higher))
        groups = connected_components(count, pairs.left, pairs.right)
    return groups


def connected_components(count: int, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """The lowest member of what each of `count` is joined to by the pairs, int64 (count,)."""
    parent = list(range(count))

    def root(one: int) -> int:
        while parent[one] != one:
            parent[one] = one = parent[parent[one]]
        return one

    for one, other in zip(left.tolist(), right.tolist(), strict=True):
        first, second = sorted((root(one), root(other)))
        parent[second] = first
    return np.array([root(one) for one in range(count)], np.int64)


def similar_pairs(looks: np.ndarray, least: float = CANDIDATE_COSINE) -> Pairs:
    """Pairs of images with descriptions of at least this cosine, in time that grows with the number of images.

    Each description and its mirror image are cut by hyperplanes; ordered by the sides they lie on, once for each of
    several choices of planes, close ones come to stand beside each other.
    """
    count = len(looks)
    both = np.concatenate([looks, looks * _MIRROR])
    told = np.flatnonzero(both.any(axis=1))
    if len(told) < 2:
        none = np.zeros(0, np.int64)
        return Pairs(none, none, none.astype(bool), none.astype(np.float32))
    both = both[told]
    chance = np.random.default_rng(0)
    sides = _sides(both, chance)
    lengths = np.linalg.norm(both.astype(np.float32), axis=1)
    found = []
    for _ in range(_TABLES):
        chosen = chance.choice(_PLANES, _KEY_BITS, replace=False)
        order = np.argsort(_keys(sides, chosen), kind="stable")
        for step in range(1, min(_WINDOW, len(order) - 1) + 1):
            for start in range(0, len(order) - step, _ROWS):
                one, other = order[start : min(start + _ROWS, len(order) - step)], order[start + step :][:_ROWS]
                close = _cosines(both, lengths, one, other) >= least
                found.append(np.stack([told[one[close]], told[other[close]]]))
    return _distinct(np.concatenate(found, axis=1), looks, count)


def _sides(points: np.ndarray, chance: np.random.Generator) -> np.ndarray:
    """On which side of each hyperplane the points lie, uint8 (planes, n); half of them on either side."""
    planes = chance.standard_normal((DESCRIPTOR_SIZE, _PLANES), dtype=np.float32)
    sample = points[:: max(1, len(points) // _ROWS)].astype(np.float32)
    middle = np.median(sample @ planes, axis=0)
    sides = np.empty((_PLANES, len(points)), np.uint8)
    for start in range(0, len(points), _ROWS):
        part = points[start : start + _ROWS].astype(np.float32)
        sides[:, start : start + _ROWS] = (part @ planes > middle).T
    return sides


def _keys(sides: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """The sides of the chosen planes as one number for each point, the first plane counting most."""
    keys = np.zeros(sides.shape[1], np.uint64)
    for plane in chosen:
        keys = (keys << np.uint64(1)) | sides[plane]
    return keys


def _cosines(points: np.ndarray, lengths: np.ndarray, one: np.ndarray, other: np.ndarray) -> np.ndarray:
    dots = np.einsum("nd,nd->n", points[one].astype(np.float32), points[other].astype(np.float32))
    return dots / (lengths[one] * lengths[other])


def _distinct(found: np.ndarray, looks: np.ndarray, count: int) -> Pairs:
    """Each pair once, as itself or mirrored, whichever fits better; an image is no pair with itself."""
    low, high = (found % count).min(axis=0), (found % count).max(axis=0)
    codes = np.unique((low * count + high)[low < high])
    low, high = codes // count, codes % count
    one, other = looks[low].astype(np.float32), looks[high].astype(np.float32)
    scale = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    straight = np.einsum("nd,nd->n", one, other) / scale
    turned = np.einsum("nd,nd->n", one, other * _MIRROR) / scale
    return Pairs(low, high, turned > straight, np.maximum(straight, turned))
