"""Whether two thumbnails show the same picture: laid over each other, with the shift and zoom that fits best."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from PIL import Image

SIDE = 64  # pixels of a thumbnail
SAME_IMAGE = 0.95  # correlation from which two thumbnails are one picture
SAME_WITHOUT_COLOUR = 0.985  # the same for a colour picture and a grey one, which colour cannot tell apart
SAME_COLOURS = 0.8  # correlation of the colours of one picture
_CELLS = 16  # along a side of a thumbnail, whose colours are compared: small copies of a JPEG lose finer ones
_OTHER_COLOURS, _OTHER_SHARE = 24.0, 0.25  # levels, or share of all colour, that they may differ by at most
_PALER = 0.4  # times the saturation, at most
_CONTRAST, _LIGHTER = 0.6, 64.0  # times the contrast, and levels of brightness, by which copies differ at most
_CONTRAST_GREY, _LIGHTER_GREY = 0.75, 20.0  # the same for a colour picture and a grey one
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


def thumbnail_similarity(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """How well pairs of thumbnails (n, 64, 64, 3) agree, float32 (n,): with SAME or more they are one picture.

    Allowed are a zoom and shift of a few per cent along each axis, another saturation, and a little more or less
    light and contrast. A grey copy keeps the brightness of the coloured picture.
    """
    left, right = left.astype(np.float32), right.astype(np.float32)
    result = _laid_over(left, right)
    again = np.flatnonzero(
        (result >= _PERHAPS) & (result < SAME_IMAGE)
    )  # what has a border fits into the other one only
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
    """Differences of red and blue from the brightness agree up to their strength, or there are none to compare; and
    the brightness agrees up to a little light and contrast."""
    ours, theirs = _colours(left), _colours(right)
    theirs = _warp(theirs.reshape(-1, _HALF, _HALF), np.repeat(fit, 3, axis=0)).reshape(ours.shape)
    grey, weight = (ours[:, 2], theirs[:, 2]), _inside(_HALF) / _inside(_HALF).sum()
    light = [(image * weight).sum(axis=(1, 2)) for image in grey]
    contrast = [
        np.sqrt(((image - mean[:, None, None]) ** 2 * weight).sum(axis=(1, 2)))
        for image, mean in zip(grey, light, strict=True)
    ]
    lighter = np.abs(light[0] - light[1])
    flatter = np.minimum(*contrast) / np.maximum(np.maximum(*contrast), 1e-6)

    product, weaker, stronger = _agreement(ours[:, :2], theirs[:, :2], weight)
    agree = product >= SAME_COLOURS * np.sqrt(weaker * stronger)
    size = _HALF // _CELLS
    few = [image[:, :2].reshape(-1, 2, _CELLS, size, _CELLS, size).mean(axis=(3, 5)) for image in (ours, theirs)]
    product, low, high = _agreement(few[0], few[1], weight.reshape(_CELLS, size, _CELLS, size).sum(axis=(1, 3)))
    power = np.maximum(np.sqrt(low * high), 1e-6)
    left_over = power - np.maximum(product, 0) ** 2 / power  # whatever the saturation is multiplied by
    agree &= left_over <= np.maximum(_OTHER_COLOURS**2, _OTHER_SHARE**2 * power)
    agree &= low >= _PALER**2 * high

    weak, strong = weaker < _GREY**2, stronger >= _GREY**2
    alone = (fits >= SAME_WITHOUT_COLOUR) & (lighter <= _LIGHTER_GREY) & (flatter >= _CONTRAST_GREY)
    return (lighter <= _LIGHTER) & (flatter >= _CONTRAST) & np.where(weak & strong, alone, weak | agree)


def _colours(images: np.ndarray) -> np.ndarray:
    """Red and blue without the brightness, and the brightness, of halved pictures, (n, 3, s, s)."""
    grey = images @ _LUMINANCE
    return np.stack([_halved(plane) for plane in (images[..., 0] - grey, images[..., 2] - grey, grey)], axis=1)


def _agreement(ours: np.ndarray, theirs: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The inner product of colours (n, 2, s, s), and the smaller and larger of their own, (n,) each."""
    product, own, other = (
        (one * another * weight).sum(axis=(1, 2, 3))
        for one, another in ((ours, theirs), (ours, ours), (theirs, theirs))
    )
    return product, np.minimum(own, other), np.maximum(own, other)


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
