"""Image transforms: decoded pixels to network inputs, by one Preprocess spec."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from vitrail.config import Preprocess, Size, validate
from vitrail.data.buffer_pool import BufferPool

_MAX_CROPS = 32  # a resized image is never longer than this many crops
_POOLED = 1 << 20  # pixels from which buffers are reused
_float_buffers = BufferPool()
_FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


def resolve_preprocess(
    size: Size, base: Preprocess | None, overrides: Mapping[str, Any], channels: int = 3
) -> Preprocess:
    """Preprocess spec for inputs of `size`: `overrides` on top of `base` (of the starting weights) or the defaults.

    `channels` applies only without `base`.
    """
    half = (0.5,) * channels
    values = base.model_dump() if base is not None else {"mean": half, "std": half}
    return validate(Preprocess, {**values, "size": size, **overrides}, "preprocess")


def eval_transform(image: np.ndarray, spec: Preprocess) -> torch.Tensor:
    """Resize and crop a decoded image, uint8 (H, W, C), for evaluation and prediction: uint8 (C, height, width)."""
    if spec.resize == "squash":
        return _resize(image, spec.size, spec)
    return _centre_crop(image, spec)


def crop_resize(image: np.ndarray, box: tuple[int, int, int, int], spec: Preprocess) -> torch.Tensor:
    """Crop `box` (top, left, height, width) of a decoded image and resize it, for training: uint8 (C, height, width).

    Uses torch's antialiased filter, which is three times as fast as Pillow's. Its weights have 16 bits, not 22, so
    a few pixels in a thousand differ by 1. It does not weight colours by alpha, so RGBA goes through Pillow.
    """
    top, left, height, width = box
    crop = image[top : top + height, left : left + width]
    if not spec.antialias or spec.channels == 4:
        return _resize(crop, spec.size, spec)
    return F.interpolate(_tensor(crop), spec.size, mode=spec.interpolation, antialias=True)[0]


def normalise(pixels: torch.Tensor, spec: Preprocess) -> torch.Tensor:
    """Normalise uint8 (B, C, H, W): float32 (x / 255 - mean) / std, on the same device."""
    if pixels.dtype != torch.uint8:
        raise TypeError(f"normalise takes uint8 pixels, not {pixels.dtype}; are they normalised already?")
    mean, std = _column(spec.mean, pixels.device), _column(spec.std, pixels.device)
    pooled = pixels.device.type == "cpu" and pixels.numel() > _POOLED
    floats = _float_buffers.empty(tuple(pixels.shape)).copy_(pixels) if pooled else pixels.to(torch.float32)
    return floats.sub_(mean).div_(std)


@functools.lru_cache(64)
def _column(values: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """255 times the values, (C, 1, 1). Cached: a copy to a GPU synchronises."""
    return torch.tensor([255 * value for value in values], dtype=torch.float32, device=device).view(-1, 1, 1)


def _centre_crop(image: np.ndarray, spec: Preprocess) -> torch.Tensor:
    """Resize with the aspect ratio kept until the crop is `crop_fraction` of the tighter side, then crop the centre.

    Rounding (floor of the target, truncated long side, rounded offset) is the same as in timm and torchvision.
    """
    height, width = spec.size
    # 1e-6: a fraction of 224/400 must give 400, not 399 by a rounding error.
    target = math.floor(height / spec.crop_fraction + 1e-6), math.floor(width / spec.crop_fraction + 1e-6)
    image = _trim(image, target)
    rows, columns = image.shape[:2]
    if target[0] * columns >= target[1] * rows:  # the image is wider than the crop
        resized = target[0], max(target[1], int(target[0] * columns / rows))
    else:
        resized = max(target[0], int(target[1] * rows / columns)), target[1]
    whole = _resize(image, resized, spec)
    top, left = round((resized[0] - height) / 2), round((resized[1] - width) / 2)
    return whole[:, top : top + height, left : left + width].contiguous()


def _trim(image: np.ndarray, target: Size) -> np.ndarray:
    """Cut both ends of an extremely long image: resized whole, 30000x2 pixels would take gigabytes."""
    scale = max(target[0] / image.shape[0], target[1] / image.shape[1])
    surplus = [max(0, image.shape[axis] - math.ceil(_MAX_CROPS * target[axis] / scale)) // 2 for axis in (0, 1)]
    return image[surplus[0] : image.shape[0] - surplus[0], surplus[1] : image.shape[1] - surplus[1]]


def _resize(image: np.ndarray, size: Size, spec: Preprocess) -> torch.Tensor:
    """Resize (H, W, C) to (C, height, width), bit-identical to Pillow; without antialiasing, to torch on floats."""
    if not spec.antialias:
        smooth = F.interpolate(_tensor(image).to(torch.float32), size, mode=spec.interpolation, align_corners=False)
        return smooth.round_().clamp_(0, 255).to(torch.uint8)[0].contiguous()
    direct = image.shape[2] in (3, 4)  # Pillow has such a mode
    parts = [image] if direct else [image[:, :, channel] for channel in range(image.shape[2])]
    resized = [Image.fromarray(part).resize(size[::-1], _FILTERS[spec.interpolation]) for part in parts]
    rows = np.asarray(resized[0]) if direct else np.stack([np.asarray(part) for part in resized], axis=-1)
    return torch.from_numpy(np.array(rows.transpose(2, 0, 1), order="C"))


def _tensor(image: np.ndarray) -> torch.Tensor:
    """(1, C, H, W) in channels-last memory, which torch resizes fastest.

    unsqueeze before permute: otherwise torch does not recognise the memory format.
    """
    return torch.from_numpy(np.require(image, requirements=["C", "W"])).unsqueeze(0).permute(0, 3, 1, 2)
