"""Pixels for the network, built from the one Preprocess spec that training, evaluation, export and serving share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from vitrail.config import Preprocess, Size, validate

_REACH = 8  # a resized picture is never made longer than this many crops


def preprocess_for(size: Size, base: Preprocess | None, overrides: Mapping[str, Any]) -> Preprocess:
    """`overrides` laid on `base` (that of the starting weights, or the defaults), for a network that takes `size`."""
    values = base.model_dump() if base is not None else {}
    return validate(Preprocess, {**values, "size": size, **overrides}, "preprocess")


def prepare(image: np.ndarray, spec: Preprocess) -> torch.Tensor:
    """A decoded picture, uint8 (H, W, C), as evaluation and prediction see it: uint8 (C, height, width)."""
    if spec.resize == "squash":
        return _resize(image, spec.size, spec)
    return _centre_crop(image, spec)


def crop_resize(image: np.ndarray, box: tuple[int, int, int, int], spec: Preprocess) -> torch.Tensor:
    """The `box` (top, left, height, width) of a decoded picture, resized as in evaluation: uint8 (C, height, width)."""
    top, left, height, width = box
    return _resize(image[top : top + height, left : left + width], spec.size, spec)


def normalise(pixels: torch.Tensor, spec: Preprocess) -> torch.Tensor:
    """uint8 (B, C, H, W) as what the network was trained on: float32 (x / 255 - mean) / std, on the same device."""
    if pixels.dtype != torch.uint8:
        raise TypeError(f"normalise takes uint8 pixels, not {pixels.dtype}: were they normalised before?")
    mean = torch.tensor(spec.mean, dtype=torch.float32, device=pixels.device).view(-1, 1, 1)
    std = torch.tensor(spec.std, dtype=torch.float32, device=pixels.device).view(-1, 1, 1)
    return pixels.to(torch.float32).div_(255).sub_(mean).div_(std)


def _centre_crop(image: np.ndarray, spec: Preprocess) -> torch.Tensor:
    """Resize with the aspect kept until the crop is `crop_fraction` of the tighter side, then cut out the centre.

    The arithmetic (floor of the target, truncated long side, rounded offset) is that of timm and torchvision, so that
    weights from there see the pixels they were measured on.
    """
    height, width = spec.size
    # The nudge: a fraction computed as 224/400 must give back 400, and not 399 for a rounding error.
    target = math.floor(height / spec.crop_fraction + 1e-6), math.floor(width / spec.crop_fraction + 1e-6)
    image = _trim(image, target)
    rows, columns = image.shape[:2]
    if target[0] * columns >= target[1] * rows:  # the picture is wider than the crop
        resized = target[0], max(target[1], int(target[0] * columns / rows))
    else:
        resized = max(target[0], int(target[1] * rows / columns)), target[1]
    whole = _resize(image, resized, spec)
    top, left = round((resized[0] - height) / 2), round((resized[1] - width) / 2)
    return whole[:, top : top + height, left : left + width].contiguous()


def _trim(image: np.ndarray, target: Size) -> np.ndarray:
    """Drop the far ends of an extremely long picture, evenly: resized whole, 30000x2 pixels would fill gigabytes."""
    scale = max(target[0] / image.shape[0], target[1] / image.shape[1])
    surplus = [max(0, image.shape[axis] - math.ceil(_REACH * target[axis] / scale)) // 2 for axis in (0, 1)]
    return image[surplus[0] : image.shape[0] - surplus[0], surplus[1] : image.shape[1] - surplus[1]]


def _resize(image: np.ndarray, size: Size, spec: Preprocess) -> torch.Tensor:
    """(H, W, C) -> (C, height, width). With antialiasing this is Pillow's kernel, on 8-bit integers and
    channels-last memory, the fastest form torch has; without it, the float kernel rounded, since torch's 8-bit one
    differs from it."""
    pixels = torch.from_numpy(np.require(image, requirements=["C", "W"])).permute(2, 0, 1).unsqueeze(0)
    if spec.antialias:
        resized = F.interpolate(pixels, size, mode=spec.interpolation, antialias=True, align_corners=False)
    else:
        smooth = F.interpolate(pixels.to(torch.float32), size, mode=spec.interpolation, align_corners=False)
        resized = smooth.round_().clamp_(0, 255).to(torch.uint8)
    return resized.squeeze(0).contiguous()
