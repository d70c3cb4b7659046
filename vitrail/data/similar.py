"""Perceptual descriptors of images, and near-duplicate pairs and groups found without comparing all pairs (LSH)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

DESCRIPTOR_SIZE = 64
SIMILAR_COSINE = 0.94  # cosine of descriptors from which images are kept on one side of a split
CANDIDATE_COSINE = 0.87  # cosine from which two images are compared as thumbnails
MIN_SIDE = 16  # pixels; images with a shorter side get no descriptor

_FREQUENCIES = 8  # cosines along each axis
_SAMPLES = 48  # pixels read along each axis, up to twice as many: more change nothing
_TAPER = 0.25  # of each side fades out, so that borders and small crops hardly count
_NO_STRUCTURE = 0.5  # grey levels; below this a descriptor would be noise
_LUMINANCE = np.array([0.299, 0.587, 0.114], np.float32)
_MIRROR = np.tile(np.where(np.arange(_FREQUENCIES) % 2, -1, 1), _FREQUENCIES).astype(np.int8)  # signs under mirroring
# Weights that compensate the low power of high frequencies in photographs
_WHITENING = np.hypot(*np.mgrid[:_FREQUENCIES, :_FREQUENCIES]).ravel().astype(np.float32)

_PLANES = 256  # random hyperplanes of the locality-sensitive hash (LSH)
_TABLES, _KEY_BITS, _WINDOW = 32, 48, 8  # hash tables, planes per key, neighbours compared in sorted order
_ROWS = 65_536  # rows per batch


def descriptor(pixels: np.ndarray) -> np.ndarray:
    """Perceptual descriptor of decoded pixels (height, width, 3), int8 (64,); zeros for images without structure.

    The low frequencies of the luminance, scaled to length 127. It is almost invariant to re-encoding, resizing,
    brightness, contrast and colour, and changes little with borders and crops of a few per cent.
    """
    if min(pixels.shape[:2]) < MIN_SIDE:
        return np.zeros(DESCRIPTOR_SIZE, np.int8)
    subsampled = pixels[_evenly(pixels.shape[0]), _evenly(pixels.shape[1])]
    height, width, _ = subsampled.shape
    rgb = subsampled.reshape(height, 3 * width).astype(np.float32)
    spectrum = _cosine_basis(height) @ rgb @ _rgb_basis(width)
    flat = (spectrum - spectrum[0, 0] * _constant_spectrum(height, width)).ravel()
    if flat @ flat < _NO_STRUCTURE**2:
        return np.zeros(DESCRIPTOR_SIZE, np.int8)
    flat *= _WHITENING
    return np.rint(flat * (127 / math.sqrt(flat @ flat))).astype(np.int8)


def _evenly(side: int) -> slice:
    """Subsampling of a side, symmetric so that a mirror image gives the same pixels."""
    step = max(1, side // _SAMPLES)
    return slice((side - 1) % step // 2, None, step)


@lru_cache(maxsize=512)
def _cosine_basis(count: int) -> np.ndarray:
    """Tapered cosines over `count` pixels, (8, count)."""
    position = (np.arange(count) + 0.5) / count
    fade = np.sin(np.pi / 2 * np.clip(np.minimum(position, 1 - position) / _TAPER, 0, 1)) ** 2
    return (np.cos(np.pi * np.arange(_FREQUENCIES)[:, None] * position) * fade / count).astype(np.float32)


@lru_cache(maxsize=512)
def _rgb_basis(count: int) -> np.ndarray:
    """The same basis applied to the luminance of `count` RGB pixels, (3 count, 8)."""
    basis = _cosine_basis(count).T[:, None, :] * _LUMINANCE[:, None]
    return np.ascontiguousarray(basis.reshape(3 * count, _FREQUENCIES))


@lru_cache(maxsize=4096)
def _constant_spectrum(height: int, width: int) -> np.ndarray:
    """Spectrum of a constant image, relative to its first coefficient, (8, 8)."""
    spectrum = np.outer(_cosine_basis(height).sum(1), _cosine_basis(width).sum(1))
    return spectrum / spectrum[0, 0]


@dataclass(frozen=True)
class Pairs:
    """Pairs of similar images, `left` < `right`; `mirrored` where the mirror image of the right one matches."""

    left: np.ndarray  # int64 (m,)
    right: np.ndarray  # int64 (m,)
    mirrored: np.ndarray  # bool (m,)
    cosine: np.ndarray  # float32 (m,)

    def __len__(self) -> int:
        return len(self.left)

    def keep(self, rows: np.ndarray) -> Pairs:
        return Pairs(self.left[rows], self.right[rows], self.mirrored[rows], self.cosine[rows])


def similar_groups(descriptors: np.ndarray, threshold: float = SIMILAR_COSINE) -> np.ndarray:
    """Group index of each image, int64 (n,): images connected by similar pairs are in one group.

    A very large group may be a chain of slightly different images, so it is split at higher thresholds. Groups that
    stay large even then (frames of a video, say) are kept.
    """
    count = len(descriptors)
    max_size = max(50, count // 50)
    pairs = similar_pairs(descriptors, threshold)
    groups = connected_components(count, pairs.left, pairs.right)
    for higher in (0.97, 0.985, 0.995):
        sizes = np.bincount(groups, minlength=count)
        too_large = sizes[groups] > max_size
        if not too_large.any():
            break
        pairs = pairs.keep(~too_large[pairs.left] | (pairs.cosine >= higher))
        groups = connected_components(count, pairs.left, pairs.right)
    return groups


def connected_components(count: int, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Smallest node of the connected component of each of `count` nodes, int64 (count,). Edges: (left, right)."""
    parent = list(range(count))

    def root(node: int) -> int:
        while parent[node] != node:
            parent[node] = node = parent[parent[node]]
        return node

    for a, b in zip(left.tolist(), right.tolist(), strict=True):
        first, second = sorted((root(a), root(b)))
        parent[second] = first
    return np.array([root(node) for node in range(count)], np.int64)


def similar_pairs(descriptors: np.ndarray, threshold: float = CANDIDATE_COSINE) -> Pairs:
    """Pairs of images whose descriptors, or mirrored descriptors, have a cosine of at least `threshold`.

    Locality-sensitive hashing with random hyperplanes, linear in the number of images: in each table, descriptors are
    sorted by their hash, and each is compared with the next few.
    """
    count = len(descriptors)
    both = np.concatenate([descriptors, descriptors * _MIRROR])
    nonzero = np.flatnonzero(both.any(axis=1))
    if len(nonzero) < 2:
        none = np.zeros(0, np.int64)
        return Pairs(none, none, none.astype(bool), none.astype(np.float32))
    both = both[nonzero]
    rng = np.random.default_rng(0)
    sides = _sides(both, rng)
    lengths = np.linalg.norm(both.astype(np.float32), axis=1)
    candidates = []
    for _ in range(_TABLES):
        planes = rng.choice(_PLANES, _KEY_BITS, replace=False)
        order = np.argsort(_keys(sides, planes), kind="stable")
        for step in range(1, min(_WINDOW, len(order) - 1) + 1):
            for start in range(0, len(order) - step, _ROWS):
                left, right = order[start : min(start + _ROWS, len(order) - step)], order[start + step :][:_ROWS]
                close = _cosines(both, lengths, left, right) >= threshold
                candidates.append(np.stack([nonzero[left[close]], nonzero[right[close]]]))
    return _unique_pairs(np.concatenate(candidates, axis=1), descriptors, count)


def _sides(points: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Side of each hyperplane that the points are on, uint8 (planes, n). The planes pass through the median."""
    planes = rng.standard_normal((DESCRIPTOR_SIZE, _PLANES), dtype=np.float32)
    sample = points[:: max(1, len(points) // _ROWS)].astype(np.float32)
    middle = np.median(sample @ planes, axis=0)
    sides = np.empty((_PLANES, len(points)), np.uint8)
    for start in range(0, len(points), _ROWS):
        batch = points[start : start + _ROWS].astype(np.float32)
        sides[:, start : start + _ROWS] = (batch @ planes > middle).T
    return sides


def _keys(sides: np.ndarray, planes: np.ndarray) -> np.ndarray:
    """Hash of each point: its sides of the chosen planes as bits, first plane highest."""
    keys = np.zeros(sides.shape[1], np.uint64)
    for plane in planes:
        keys = (keys << np.uint64(1)) | sides[plane]
    return keys


def _cosines(points: np.ndarray, lengths: np.ndarray, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    dots = np.einsum("nd,nd->n", points[left].astype(np.float32), points[right].astype(np.float32))
    return dots / (lengths[left] * lengths[right])


def _unique_pairs(candidates: np.ndarray, descriptors: np.ndarray, count: int) -> Pairs:
    """Each pair of different images once, mirrored or not, whichever has the higher cosine."""
    low, high = (candidates % count).min(axis=0), (candidates % count).max(axis=0)
    codes = np.unique((low * count + high)[low < high])
    low, high = codes // count, codes % count
    left, right = descriptors[low].astype(np.float32), descriptors[high].astype(np.float32)
    scale = np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1)
    straight = np.einsum("nd,nd->n", left, right) / scale
    mirrored = np.einsum("nd,nd->n", left, right * _MIRROR) / scale
    return Pairs(low, high, mirrored > straight, np.maximum(straight, mirrored))
