"""Pixels for the network, built from the one Preprocess spec that training, evaluation, export and serving share."""

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

_REACH = 32  # a resized picture is never made longer than this many crops
_LARGE = 1 << 20  # pixels from which memory is worth recycling
_floats = BufferPool()
_FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


def resolve_preprocess(
    size: Size, base: Preprocess | None, overrides: Mapping[str, Any], channels: int = 3
) -> Preprocess:
    """`overrides` laid on `base` (that of the starting weights, or the defaults), for a network that takes `size`
    and, where it starts from nothing, `channels`."""
    half = (0.5,) * channels
    values = base.model_dump() if base is not None else {"mean": half, "std": half}
    return validate(Preprocess, {**values, "size": size, **overrides}, "preprocess")


def eval_transform(image: np.ndarray, spec: Preprocess) -> torch.Tensor:
    """A decoded picture, uint8 (H, W, C), as evaluation and prediction see it: uint8 (C, height, width)."""
    if spec.resize == "squash":
        return _exact(image, spec.size, spec)
    return _centre_crop(image, spec)


def crop_resize(image: np.ndarray, box: tuple[int, int, int, int], spec: Preprocess) -> torch.Tensor:
    """The `box` (top, left, height, width) of a decoded picture for training: uint8 (C, height, width).

    The antialiased filter is evaluation's in torch's form: three times as fast, with weights of 16 bits where Pillow
    has 22, so that a few pixels in a thousand differ, by one. It does not weigh colours by their alpha, as Pillow does.
    """
    top, left, height, width = box
    cut = image[top : top + height, left : left + width]
    if not spec.antialias or spec.channels == 4:
        return _exact(cut, spec.size, spec)
    return F.interpolate(_tensor(cut), spec.size, mode=spec.interpolation, antialias=True)[0]


def normalise(pixels: torch.Tensor, spec: Preprocess) -> torch.Tensor:
    """uint8 (B, C, H, W) as what the network was trained on: float32 (x / 255 - mean) / std, on the same device."""
    if pixels.dtype != torch.uint8:
        raise TypeError(f"normalise takes uint8 pixels, not {pixels.dtype}: were they normalised before?")
    mean, std = _column(spec.mean, pixels.device), _column(spec.std, pixels.device)
    large = pixels.device.type == "cpu" and pixels.numel() > _LARGE
    floats = _floats.empty(tuple(pixels.shape)).copy_(pixels) if large else pixels.to(torch.float32)
    return floats.sub_(mean).div_(std)


@functools.lru_cache(64)
def _column(values: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """255 times the values, (C, 1, 1). Kept, because bringing them to a GPU waits for all it has to do."""
    return torch.tensor([255 * value for value in values], dtype=torch.float32, device=device).view(-1, 1, 1)


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
    whole = _exact(image, resized, spec)
    top, left = round((resized[0] - height) / 2), round((resized[1] - width) / 2)
    return whole[:, top : top + height, left : left + width].contiguous()


def _trim(image: np.ndarray, target: Size) -> np.ndarray:
    """Drop the far ends of an extremely long picture, evenly: resized whole, 30000x2 pixels would fill gigabytes."""
    scale = max(target[0] / image.shape[0], target[1] / image.shape[1])
    surplus = [max(0, image.shape[axis] - math.ceil(_REACH * target[axis] / scale)) // 2 for axis in (0, 1)]
    return image[surplus[0] : image.shape[0] - surplus[0], surplus[1] : image.shape[1] - surplus[1]]


def _exact(image: np.ndarray, size: Size, spec: Preprocess) -> torch.Tensor:
    """(H, W, C) -> (C, height, width), to the bit as Pillow resizes; without antialiasing, as torch does on floats."""
    if not spec.antialias:
        smooth = F.interpolate(_tensor(image).to(torch.float32), size, mode=spec.interpolation, align_corners=False)
        return smooth.round_().clamp_(0, 255).to(torch.uint8)[0].contiguous()
    known = image.shape[2] in (3, 4)
    parts = [image] if known else [image[:, :, channel] for channel in range(image.shape[2])]
    resized = [Image.fromarray(part).resize(size[::-1], _FILTERS[spec.interpolation]) for part in parts]
    rows = np.asarray(resized[0]) if known else np.stack([np.asarray(part) for part in resized], axis=-1)
    return torch.from_numpy(np.array(rows.transpose(2, 0, 1), order="C"))


def _tensor(image: np.ndarray) -> torch.Tensor:
    """(1, C, H, W) in channels-last memory, the form torch resizes fastest, and gives back where it knows it as such:
    a last axis moved before the first is added would not be one."""
    return torch.from_numpy(np.require(image, requirements=["C", "W"])).unsqueeze(0).permute(0, 3, 1, 2)
