"""Whether two thumbnails show the same picture: laid over each other, with the shift and zoom that fits best."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from PIL import Image

SIDE = 64  # pixels of a thumbnail
SAME = 0.95  # correlation from which two thumbnails are one picture
SAME_WITHOUT_COLOUR = 0.985  # the same for a colour picture and a grey one, which colour cannot tell apart
SAME_COLOURS = 0.8  # correlation of the colours of one picture
_HALF = SIDE // 2
_PERHAPS = 0.8  # correlation from which it is worth to lay the left picture over the right one too
_ROUGHLY = 0.9  # correlation of halved thumbnails below which the full ones are not compared
_GREY = 5.0  # colour differences of a grey picture, in levels
_MOST = 0.16  # of half a side: the largest shift or zoom
_STEP = 0.06
_LUMINANCE = np.array([0.299, 0.587, 0.114], np.float32)


def thumbnail(pixels: np.ndarray) -> np.ndarray:
    """Decoded pixels as uint8 (64, 64, 3); the aspect is not kept, so that a squeezed copy is found too."""
    step = [max(1, side // (8 * SIDE)) for side in pixels.shape[:2]]
    few = np.ascontiguousarray(pixels[:: step[0], :: step[1]])
    return np.asarray(Image.fromarray(few).resize((SIDE, SIDE), Image.Resampling.BOX))


def same_picture(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """How well pairs of thumbnails (n, 64, 64, 3) agree, float32 (n,): with SAME or more they are one picture.

    Allowed are a zoom and shift of a few per cent along each axis, and other brightness, contrast and saturation.
    """
    left, right = left.astype(np.float32), right.astype(np.float32)
    result = _laid_over(left, right)
    again = np.flatnonzero((result >= _PERHAPS) & (result < SAME))  # what has a border fits into the other one only
    result[again] = np.maximum(result[again], _laid_over(right[again], left[again]))
    return result


def _laid_over(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """The correlation of the inside of the left pictures with the right ones; 0 when their colours differ."""
    greys = [image @ _LUMINANCE for image in (left, right)]
    small = [_details(_halved(grey), 1.0, 4.0) for grey in greys]
    fit = _align(small[0], small[1], np.zeros((len(left), 4), np.float32), rounds=4)
    result = _correlation(small[0], _warp(small[1], fit))
    maybe = np.flatnonzero(result >= _ROUGHLY)
    result = np.minimum(result, _ROUGHLY)
    fine = [_details(grey[maybe], 1.0, 5.0) for grey in greys]
    fit = _align(fine[0], fine[1], fit[maybe], rounds=3)
    score = _correlation(fine[0], _warp(fine[1], fit))
    result[maybe] = np.where(_same_colours(left[maybe], right[maybe], fit, score), score, 0)
    return result


def _align(left: np.ndarray, right: np.ndarray, fit: np.ndarray, rounds: int) -> np.ndarray:
    """Zoom and shift along x and y, (n, 4), that lay the right pictures over the left: a few Gauss-Newton steps."""
    side = left.shape[1]
    place = np.linspace(-1, 1, side, dtype=np.float32)
    weight = _inside(side)
    wanted = _normal(left)
    for _ in range(rounds):
        moved = _normal(_warp(right, fit))
        along_y, along_x = np.gradient(moved, 2 / (side - 1), axis=(1, 2))
        slopes = np.stack([along_x * place, along_x, along_y * place[:, None], along_y], axis=1)
        slopes = slopes.reshape(len(left), 4, side * side)
        weighted = slopes * weight.ravel()
        curvature = weighted @ slopes.transpose(0, 2, 1) + 0.01 * side * np.eye(4, dtype=np.float32)
        pull = weighted @ (wanted - moved).reshape(len(left), side * side, 1)
        step = np.linalg.solve(curvature, pull)[:, :, 0]
        fit = np.clip(fit + np.clip(step, -_STEP, _STEP), -_MOST, _MOST)
    return fit


def _warp(images: np.ndarray, fit: np.ndarray) -> np.ndarray:
    """Each picture (n, s, s) zoomed and shifted, between pixels by linear interpolation."""
    one = np.arange(len(images))[:, None]
    for zoom, shift in ((fit[:, 2:3], fit[:, 3:4]), (fit[:, 0:1], fit[:, 1:2])):  # the rows, then the columns as rows
        last = images.shape[1] - 1
        place = np.linspace(-1, 1, last + 1, dtype=np.float32)
        at = np.clip((place * (1 + zoom) + shift + 1) / 2 * last, 0, last - 0.001)
        low = at.astype(np.int64)
        share = (at - low).astype(np.float32)[:, :, None]
        images = (images[one, low] * (1 - share) + images[one, low + 1] * share).transpose(0, 2, 1)
    return images


def _same_colours(left: np.ndarray, right: np.ndarray, fit: np.ndarray, fits: np.ndarray) -> np.ndarray:
    """Differences of red and blue from the brightness agree up to their strength; or there are none to compare."""
    product = left_power = right_power = np.zeros(len(left), np.float32)
    weight = _inside(_HALF) / _inside(_HALF).sum()
    for channel in (0, 2):
        ours, theirs = (_halved(image[..., channel] - image @ _LUMINANCE) for image in (left, right))
        theirs = _warp(theirs, fit)
        product = product + (ours * theirs * weight).sum(axis=(1, 2))
        left_power = left_power + (ours**2 * weight).sum(axis=(1, 2))
        right_power = right_power + (theirs**2 * weight).sum(axis=(1, 2))
    weak, strong = np.minimum(left_power, right_power) < _GREY**2, np.maximum(left_power, right_power) >= _GREY**2
    agree = product >= SAME_COLOURS * np.sqrt(left_power * right_power)
    return np.where(weak & strong, fits >= SAME_WITHOUT_COLOUR, weak | agree)


def _details(images: np.ndarray, fine: float, coarse: float) -> np.ndarray:
    """What is larger than single pixels and smaller than the whole scene: outlines, not light."""
    side = images.shape[1]
    sharp, soft = _blur(side, fine), _blur(side, coarse)
    return sharp @ images @ sharp.T - soft @ images @ soft.T


@lru_cache(maxsize=8)
def _blur(side: int, width: float) -> np.ndarray:
    place = np.arange(side)
    weights = np.exp(-0.5 * ((place[:, None] - place) / width) ** 2)
    return (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)


def _halved(images: np.ndarray) -> np.ndarray:
    return images.reshape(len(images), _HALF, 2, _HALF, 2).mean(axis=(2, 4))


@lru_cache(maxsize=8)
def _inside(side: int) -> np.ndarray:
    """Weights (side, side) that leave out the outer 8 % and fade in over the next 10 %."""
    place = (np.arange(side) + 0.5) / side
    fade = np.clip((np.minimum(place, 1 - place) - 0.08) / 0.1, 0, 1).astype(np.float32)
    return np.outer(fade, fade)


def _normal(images: np.ndarray) -> np.ndarray:
    """With mean 0 and deviation 1 inside."""
    weight = _inside(images.shape[1])
    weight = weight / weight.sum()
    images = images - (images * weight).sum(axis=(1, 2), keepdims=True)
    return images / np.maximum(np.sqrt((images**2 * weight).sum(axis=(1, 2), keepdims=True)), 1e-3)


def _correlation(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    weight = _inside(left.shape[1])
    return (_normal(left) * _normal(right) * weight).sum(axis=(1, 2)) / weight.sum()
