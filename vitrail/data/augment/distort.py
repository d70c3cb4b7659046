"""Distortions of uint8 images, each row of a batch its own, equal to Pillow's.

Whole numbers, or floats that hold whole numbers exactly, wherever Pillow rounds: so a CPU and a GPU agree, and a row's
result depends on nothing but the row. Pillow's forms are taken where the TensorFlow code of big_vision differs by
rounding (sharpness, grey) or by half a pixel (shear).

The first three channels are colours, or the first one alone where there are fewer than three; what follows them is
moved by the geometric operations and by nothing else. One channel is grey: its saturation and hue cannot change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrail.data.augment.policy import BOX_ONE, BOX_PASSES, Arguments, Layer, Op
from vitrail.data.to_device import on_device

FILL = 128  # where there is no image
LUMA = (19595.0, 38470.0, 7471.0)  # over 65536: Pillow's grey; all sums stay below 2**24, exact in float32


class Given(NamedTuple):
    """The arguments of the rows a kernel works on, on their device."""

    factor: Tensor  # float32 (n, 1, 1, 1)
    whole: Tensor  # int32 (n, 6)
    levels: Tensor  # uint8 (n, 256)


Kernel = Callable[[Tensor, Given], Tensor]  # uint8 (n, C, H, W) -> levels of any type (n, C, H, W)


def distort(pixels: Tensor, layers: Sequence[Layer]) -> Tensor:
    """`layers` applied to uint8 (B, C, H, W), one after the other.

    A GPU has the rows sorted by operation, so that each kernel works on one slice and nothing is scattered; the next
    layer sorts again and the last line restores the order. A CPU takes image by image, as one fits in its cache.
    """
    grouped = pixels.device.type != "cpu"
    colours = 3 if pixels.shape[1] >= 3 else 1
    rows = np.arange(len(pixels))  # rows[k] is the sample that row k holds
    pixels = pixels if grouped else pixels.clone()
    for layer in layers:
        arguments = Arguments.of(layer, pixels.shape[-2], pixels.shape[-1])
        kind = _KERNEL_OF[layer.op]
        kind[(layer.op == Op.BLUR) & (arguments.whole[:, 2] > 0)] = _WIDE_BLUR
        if grouped:
            order = np.argsort(kind, kind="stable")
            pixels = pixels.index_select(0, _on(pixels, np.argsort(rows)[order]))
            rows, kind, arguments = order, kind[order], arguments[order]
        factor, whole, levels = (_on(pixels, a) for a in (arguments.factor, arguments.whole, arguments.levels))
        factor = factor[:, None, None, None]
        for number, start, stop in _runs(kind, most=len(kind) if grouped else 1):
            kernel, ops = _KERNELS[number]
            part = pixels[start:stop] if ops[0] >= Op.ROTATE else pixels[start:stop, :colours]
            part.copy_(kernel(part, Given(factor[start:stop], whole[start:stop], levels[start:stop])))
    return pixels.index_select(0, _on(pixels, np.argsort(rows))) if grouped else pixels


def _on(like: Tensor, values: np.ndarray) -> Tensor:
    return on_device(values, like.device)


def _runs(kinds: np.ndarray, most: int) -> Iterator[tuple[int, int, int]]:
    """(kind, start, stop) of each stretch of equal kinds, at most `most` long; what needs no work is left out."""
    edges = [0, *(np.flatnonzero(np.diff(kinds)) + 1).tolist(), len(kinds)]
    for first, last in pairwise(edges):
        if first < last and kinds[first]:
            for start in range(first, last, most):
                yield int(kinds[first]), start, min(start + most, last)


def autocontrast(x: Tensor, _: Given) -> Tensor:
    """The lowest level of each channel becomes 0, the highest 255."""
    flat = x.flatten(2)
    low, high = (edge.to(torch.float64) for edge in (flat.amin(-1, keepdim=True), flat.amax(-1, keepdim=True)))
    ramp = torch.arange(256, device=x.device, dtype=torch.float64)
    scale = torch.full_like(low, 255.0) / (high - low)  # infinite where a channel has one level, which then stays
    table = (ramp * scale - low * scale).clamp(0, 255)
    return _look_up(torch.where(high > low, table, ramp), x)


def equalize(x: Tensor, _: Given) -> Tensor:
    """Levels spread so that each channel's histogram is as flat as it can be."""
    flat = x.flatten(2)  # (n, C, H*W)
    counts = _histogram(flat)
    highest = flat.amax(-1, keepdim=True).to(torch.int64)
    step = (flat.shape[-1] - counts.gather(2, highest)) // 255  # the highest level is not counted
    spread = (counts.cumsum(-1) - counts + step // 2) // step.clamp(min=1)
    ramp = torch.arange(256, device=x.device)
    return _look_up(torch.where(step > 0, spread.clamp(max=255), ramp), x)


def _histogram(flat: Tensor) -> Tensor:
    """How often each level occurs, (n, C, 256). bincount is twice as fast, but on a GPU it waits for the device."""
    if flat.device.type == "cpu":
        counts = [torch.bincount(channel, minlength=256) for channel in flat.flatten(0, 1)]
        return torch.stack(counts).view(*flat.shape[:2], 256)
    ones = torch.ones((), device=flat.device, dtype=torch.int64).expand_as(flat)
    zeros = torch.zeros(*flat.shape[:2], 256, device=flat.device, dtype=torch.int64)
    # Whole numbers add up to the same in any order; in deterministic mode torch would sort them all the same.
    asked = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        return zeros.scatter_add_(2, flat.to(torch.int64), ones)
    finally:
        torch.use_deterministic_algorithms(asked)


def _look_up(tables: Tensor, x: Tensor) -> Tensor:
    """Levels of x, (n, C, H, W), replaced by those in `tables`, (n, C or 1, 256): one flat selection, the fastest
    form."""
    first = torch.arange(0, tables.numel(), 256, device=x.device, dtype=torch.int32)
    index = x.to(torch.int32).add_(first.view(*tables.shape[:2], 1, 1))
    return tables.to(torch.uint8).flatten().index_select(0, index.flatten()).view_as(x)


def look_up(x: Tensor, given: Given) -> Tensor:
    return _look_up(given.levels[:, None], x)


def contrast(x: Tensor, given: Given) -> Tensor:
    """Blended with the rounded mean of the grey image."""
    image = x.to(torch.float32)
    mean = (_grey(image).mean((2, 3), keepdim=True, dtype=torch.float64) + 0.5).floor()
    return _blend(mean.to(torch.float32), image, given)


def color(x: Tensor, given: Given) -> Tensor:
    image = x.to(torch.float32)
    return _blend(_grey(image), image, given) if x.shape[1] == 3 else x


def sharpness(x: Tensor, given: Given) -> Tensor:
    """Blended with the mean of 3 x 3 pixels in which the middle one counts five times; the border stays."""
    levels = x.to(torch.int16)
    rows = (levels[:, :, :-2] + levels[:, :, 1:-1]).add_(levels[:, :, 2:])
    total = (rows[..., :-2] + rows[..., 1:-1]).add_(rows[..., 2:])
    middle = levels[:, :, 1:-1, 1:-1]
    smooth = total.add_(middle, alpha=4).to(torch.float32).mul_(1 / 13).add_(0.5).floor_()  # never near a half
    result = x.clone()
    result[:, :, 1:-1, 1:-1] = _blend(smooth, middle.to(torch.float32), given)
    return result


def _grey(image: Tensor) -> Tensor:
    """float (n, C, H, W) -> (n, 1, H, W)."""
    if image.shape[1] == 1:
        return image
    total = image[:, 0:1] * LUMA[0]
    return total.add_(image[:, 1:2], alpha=LUMA[1]).add_(image[:, 2:3], alpha=LUMA[2]).add_(32768).mul_(2**-16).floor_()


def _blend(plain: Tensor, image: Tensor, given: Given) -> Tensor:
    """From `plain` at factor 0 over `image` at 1 and beyond, cut off to whole levels as Pillow does."""
    return _levels((image - plain).mul_(given.factor).add_(plain))


def _levels(values: Tensor) -> Tensor:
    return values.clamp_(0, 255).to(torch.int32)  # faster than straight to uint8


def hue(x: Tensor, given: Given) -> Tensor:
    """Colours turned by a share of the circle, value and saturation kept (torchvision's, rounded to the nearest)."""
    if x.shape[1] != 3:
        return x
    image = x.to(torch.float32)
    red, green, blue = image.unbind(1)  # (n, H, W)
    value, least = image.amax(1), image.amin(1)
    chroma = value - least
    safe = chroma.clamp(min=1)
    from_green, from_blue = 2 + (blue - red) / safe, 4 + (red - green) / safe
    turn = torch.where(value == red, (green - blue) / safe, torch.where(value == green, from_green, from_blue))
    turn = turn + 6 * given.factor[:, 0]
    channels = []
    for offset in (5, 3, 1):  # each channel is a clipped triangle along the circle
        along = torch.remainder(turn + offset, 6)
        channels.append(value - chroma * torch.minimum(along, 4 - along).clamp(0, 1))
    return _levels(torch.stack(channels, 1).add_(0.5))


def blur(x: Tensor, given: Given, reach: int) -> Tensor:
    """Pillow's Gaussian: three box blurs along the rows, then three along the columns, each rounded."""
    middle, near, far = given.whole[:, :3, None, None, None].unbind(1)  # (n, 1, 1, 1)
    levels = x.to(torch.int32)
    for axis in (3, 2):
        size = levels.shape[axis]
        wide = torch.cat([levels.narrow(axis, 0, 1)] * reach + [levels] + [levels.narrow(axis, 0, 1)] * reach, axis)
        levels = wide.narrow(axis, reach, size)  # the image, between two edges
        for _ in range(BOX_PASSES):
            wide.narrow(axis, 0, reach).copy_(levels.narrow(axis, 0, 1))
            wide.narrow(axis, reach + size, reach).copy_(levels.narrow(axis, size - 1, 1))
            total = (levels * middle).add_(BOX_ONE // 2)
            for distance, weight in zip(range(1, reach + 1), (near, far), strict=False):
                pair = wide.narrow(axis, reach - distance, size) + wide.narrow(axis, reach + distance, size)
                total.addcmul_(pair, weight)
            # Sums above 2**31 have wrapped: the mask undoes the sign.
            torch.bitwise_and(total.bitwise_right_shift_(24), 255, out=levels)
    return levels


def affine(x: Tensor, given: Given) -> Tensor:
    """The nearest pixel, in Pillow's fixed-point arithmetic; coordinates outside land on a border of FILL."""
    height, width = x.shape[-2:]
    a, b, c, d, e, f = given.whole[:, :, None].unbind(1)  # (n, 1)
    along, down = (torch.arange(size, device=x.device, dtype=torch.int32) for size in (width, height))
    column = ((a * along)[:, None, :] + (b * down + c)[:, :, None]).bitwise_right_shift_(16).clamp_(-1, width)
    row = ((d * along)[:, None, :] + (e * down + f)[:, :, None]).bitwise_right_shift_(16).clamp_(-1, height)
    index = row.mul_(width + 2).add_(column).add_(width + 3).to(torch.int64)  # (n, H, W)
    framed = torch.nn.functional.pad(x, (1, 1, 1, 1), value=FILL).flatten(2)
    return torch.gather(framed, 2, index.flatten(1)[:, None].expand(-1, x.shape[1], -1)).view_as(x)


def cutout(x: Tensor, given: Given) -> Tensor:
    top, left, bottom, right = given.whole[:, :4, None].unbind(1)  # (n, 1)
    rows, columns = (torch.arange(size, device=x.device) for size in x.shape[-2:])
    down, along = (rows >= top) & (rows < bottom), (columns >= left) & (columns < right)  # (n, H), (n, W)
    hole = (down[:, :, None] & along[:, None, :])[:, None].to(torch.uint8).neg_()  # (n, 1, H, W): 0 or 255
    return (x & ~hole) | (hole & FILL)


_KERNELS: list[tuple[Kernel, tuple[Op, ...]]] = [
    (lambda x, _: x, (Op.NOTHING,)),
    (autocontrast, (Op.AUTOCONTRAST,)),
    (equalize, (Op.EQUALIZE,)),
    (look_up, (Op.INVERT, Op.POSTERIZE, Op.SOLARIZE, Op.SOLARIZE_ADD, Op.BRIGHTNESS)),
    (contrast, (Op.CONTRAST,)),
    (color, (Op.COLOR,)),
    (sharpness, (Op.SHARPNESS,)),
    (hue, (Op.HUE,)),
    (partial(blur, reach=1), (Op.BLUR,)),
    (affine, (Op.ROTATE, Op.SHEAR_X, Op.SHEAR_Y, Op.TRANSLATE_X, Op.TRANSLATE_Y)),
    (cutout, (Op.CUTOUT,)),
    (partial(blur, reach=2), (Op.BLUR,)),  # for radii whose boxes reach that far
]
_WIDE_BLUR = len(_KERNELS) - 1
_KERNEL_OF = np.array([next(n for n, (_, ops) in enumerate(_KERNELS) if op in ops) for op in Op])
