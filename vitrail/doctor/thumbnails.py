"""Compare two thumbnails, aligned by the shift and zoom that fit best, to decide whether they show the same image."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from PIL import Image

SIDE = 64  # pixels of a thumbnail
SAME_IMAGE = 0.95  # correlation from which two thumbnails show the same image
SAME_IMAGE_GREY = 0.985  # the same for a colour image and a grey one, where colour cannot help
SAME_COLOURS = 0.8  # correlation of the colours of one image
_CELLS = 16  # grid per side on which colours are compared: small JPEG copies lose finer colour detail
_COLOUR_ERROR, _COLOUR_ERROR_FRACTION = (
    24.0,
    0.25,
)  # largest colour difference, in levels or as a fraction of the colour
_MIN_SATURATION = 0.4  # of the less saturated copy, relative to the other
_MIN_CONTRAST, _MAX_BRIGHTNESS = 0.6, 64.0  # contrast ratio and brightness difference (levels) of copies
_MIN_CONTRAST_GREY, _MAX_BRIGHTNESS_GREY = 0.75, 20.0  # the same for a colour image and a grey one
_HALF = SIDE // 2
_TRY_SWAPPED = 0.8  # correlation from which the images are also compared in swapped order
_MIN_COARSE = 0.9  # correlation of half-size thumbnails below which full-size ones are not compared
_GREY = 5.0  # colour difference up to which an image is grey, in levels
_MAX_MOTION = 0.16  # largest shift or zoom, as a fraction of half a side
_MAX_STEP = 0.06
_LUMINANCE = np.array([0.299, 0.587, 0.114], np.float32)


def thumbnail(pixels: np.ndarray) -> np.ndarray:
    """Resize decoded pixels to uint8 (64, 64, 3). The aspect ratio is not kept, so that squeezed copies match too."""
    step = [max(1, side // (8 * SIDE)) for side in pixels.shape[:2]]
    subsampled = np.ascontiguousarray(pixels[:: step[0], :: step[1]])
    return np.asarray(Image.fromarray(subsampled).resize((SIDE, SIDE), Image.Resampling.BOX))


def thumbnail_similarity(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return the similarity of pairs of thumbnails (n, 64, 64, 3), float32 (n,). SAME_IMAGE or more: the same image.

    Tolerates a zoom and shift of a few per cent along each axis, a change of saturation, small changes of brightness
    and contrast, and a grey copy of a colour image.
    """
    left, right = left.astype(np.float32), right.astype(np.float32)
    result = _aligned_correlation(left, right)
    # An image with a border can only be zoomed into: swap the pair.
    again = np.flatnonzero((result >= _TRY_SWAPPED) & (result < SAME_IMAGE))
    result[again] = np.maximum(result[again], _aligned_correlation(right[again], left[again]))
    return result


def _aligned_correlation(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Correlation of the left images with the right ones aligned to them; 0 where the colours differ."""
    greys = [image @ _LUMINANCE for image in (left, right)]
    coarse = [_band_pass(_halved(grey), 1.0, 4.0) for grey in greys]
    fit = _align(coarse[0], coarse[1], np.zeros((len(left), 4), np.float32), rounds=4)
    result = _correlation(coarse[0], _warp(coarse[1], fit))
    maybe = np.flatnonzero(result >= _MIN_COARSE)
    result = np.minimum(result, _MIN_COARSE)
    fine = [_band_pass(grey[maybe], 1.0, 5.0) for grey in greys]
    fit = _align(fine[0], fine[1], fit[maybe], rounds=3)
    score = _correlation(fine[0], _warp(fine[1], fit))
    result[maybe] = np.where(_same_colours(left[maybe], right[maybe], fit, score), score, 0)
    return result


def _align(left: np.ndarray, right: np.ndarray, fit: np.ndarray, rounds: int) -> np.ndarray:
    """Fit zoom and shift along x and y, (n, 4), that align the right images to the left (Gauss-Newton)."""
    side = left.shape[1]
    position = np.linspace(-1, 1, side, dtype=np.float32)
    weight = _inside(side)
    target = _standardized(left)
    for _ in range(rounds):
        warped = _standardized(_warp(right, fit))
        grad_y, grad_x = np.gradient(warped, 2 / (side - 1), axis=(1, 2))
        jacobian = np.stack([grad_x * position, grad_x, grad_y * position[:, None], grad_y], axis=1)
        jacobian = jacobian.reshape(len(left), 4, side * side)
        weighted = jacobian * weight.ravel()
        hessian = weighted @ jacobian.transpose(0, 2, 1) + 0.01 * side * np.eye(4, dtype=np.float32)
        gradient = weighted @ (target - warped).reshape(len(left), side * side, 1)
        step = np.linalg.solve(hessian, gradient)[:, :, 0]
        fit = np.clip(fit + np.clip(step, -_MAX_STEP, _MAX_STEP), -_MAX_MOTION, _MAX_MOTION)
    return fit


def _warp(images: np.ndarray, fit: np.ndarray) -> np.ndarray:
    """Zoom and shift each image (n, s, s) with bilinear interpolation."""
    row = np.arange(len(images))[:, None]
    for zoom, shift in ((fit[:, 2:3], fit[:, 3:4]), (fit[:, 0:1], fit[:, 1:2])):  # y, then x transposed
        last = images.shape[1] - 1
        position = np.linspace(-1, 1, last + 1, dtype=np.float32)
        at = np.clip((position * (1 + zoom) + shift + 1) / 2 * last, 0, last - 0.001)
        low = at.astype(np.int64)
        fraction = (at - low).astype(np.float32)[:, :, None]
        images = (images[row, low] * (1 - fraction) + images[row, low + 1] * fraction).transpose(0, 2, 1)
    return images


def _same_colours(left: np.ndarray, right: np.ndarray, fit: np.ndarray, score: np.ndarray) -> np.ndarray:
    """Whether colours and brightness of each pair agree, bool (n,).

    Colours are red and blue minus luminance: they must agree up to saturation, unless one image is grey. Brightness
    must agree up to a small change of level and contrast.
    """
    left, right = _colour_planes(left), _colour_planes(right)
    right = _warp(right.reshape(-1, _HALF, _HALF), np.repeat(fit, 3, axis=0)).reshape(left.shape)
    grey, weight = (left[:, 2], right[:, 2]), _inside(_HALF) / _inside(_HALF).sum()
    brightness = [(image * weight).sum(axis=(1, 2)) for image in grey]
    contrast = [
        np.sqrt(((image - mean[:, None, None]) ** 2 * weight).sum(axis=(1, 2)))
        for image, mean in zip(grey, brightness, strict=True)
    ]
    brightness_change = np.abs(brightness[0] - brightness[1])
    contrast_ratio = np.minimum(*contrast) / np.maximum(np.maximum(*contrast), 1e-6)

    product, weaker, stronger = _inner_products(left[:, :2], right[:, :2], weight)
    agree = product >= SAME_COLOURS * np.sqrt(weaker * stronger)
    size = _HALF // _CELLS
    cells = [image[:, :2].reshape(-1, 2, _CELLS, size, _CELLS, size).mean(axis=(3, 5)) for image in (left, right)]
    product, low, high = _inner_products(
        cells[0], cells[1], weight.reshape(_CELLS, size, _CELLS, size).sum(axis=(1, 3))
    )
    power = np.maximum(np.sqrt(low * high), 1e-6)
    residual = power - np.maximum(product, 0) ** 2 / power  # what no change of saturation explains
    agree &= residual <= np.maximum(_COLOUR_ERROR**2, _COLOUR_ERROR_FRACTION**2 * power)
    agree &= low >= _MIN_SATURATION**2 * high

    one_grey, one_coloured = weaker < _GREY**2, stronger >= _GREY**2
    grey_copy = (
        (score >= SAME_IMAGE_GREY)
        & (brightness_change <= _MAX_BRIGHTNESS_GREY)
        & (contrast_ratio >= _MIN_CONTRAST_GREY)
    )
    same_light = (brightness_change <= _MAX_BRIGHTNESS) & (contrast_ratio >= _MIN_CONTRAST)
    return same_light & np.where(one_grey & one_coloured, grey_copy, one_grey | agree)


def _colour_planes(images: np.ndarray) -> np.ndarray:
    """Red minus luminance, blue minus luminance, and luminance at half size, (n, 3, s, s)."""
    grey = images @ _LUMINANCE
    return np.stack([_halved(plane) for plane in (images[..., 0] - grey, images[..., 2] - grey, grey)], axis=1)


def _inner_products(
    left: np.ndarray, right: np.ndarray, weight: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inner product of colours (n, 2, s, s), and the smaller and the larger squared norm, (n,) each."""
    product, left_power, right_power = (
        (a * b * weight).sum(axis=(1, 2, 3)) for a, b in ((left, right), (left, left), (right, right))
    )
    return product, np.minimum(left_power, right_power), np.maximum(left_power, right_power)


def _band_pass(images: np.ndarray, fine: float, coarse: float) -> np.ndarray:
    """Difference of Gaussians: keeps edges, removes noise and illumination."""
    side = images.shape[1]
    sharp, soft = _blur(side, fine), _blur(side, coarse)
    return sharp @ images @ sharp.T - soft @ images @ soft.T


@lru_cache(maxsize=8)
def _blur(side: int, width: float) -> np.ndarray:
    position = np.arange(side)
    weights = np.exp(-0.5 * ((position[:, None] - position) / width) ** 2)
    return (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)


def _halved(images: np.ndarray) -> np.ndarray:
    return images.reshape(len(images), _HALF, 2, _HALF, 2).mean(axis=(2, 4))


@lru_cache(maxsize=8)
def _inside(side: int) -> np.ndarray:
    """Weights (side, side): 0 in the outer 8 %, rising over the next 10 %."""
    position = (np.arange(side) + 0.5) / side
    fade = np.clip((np.minimum(position, 1 - position) - 0.08) / 0.1, 0, 1).astype(np.float32)
    return np.outer(fade, fade)


def _standardized(images: np.ndarray) -> np.ndarray:
    """Images with weighted mean 0 and standard deviation 1."""
    weight = _inside(images.shape[1])
    weight = weight / weight.sum()
    images = images - (images * weight).sum(axis=(1, 2), keepdims=True)
    return images / np.maximum(np.sqrt((images**2 * weight).sum(axis=(1, 2), keepdims=True)), 1e-3)


def _correlation(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    weight = _inside(left.shape[1])
    return (_standardized(left) * _standardized(right) * weight).sum(axis=(1, 2)) / weight.sum()
