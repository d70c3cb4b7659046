"""Distortions of uint8 images, a different one for each row of a batch, bit-identical to Pillow.

Uses integers, or floats that represent integers exactly, wherever Pillow rounds. So CPU and GPU agree, and a row does
not depend on the rest of the batch. Follows Pillow where big_vision's TensorFlow code differs by rounding (sharpness,
grey) or by half a pixel (shear).

The first three channels are RGB, or the first one is grey if there are fewer than three. Only geometric operations
change the channels after them. Saturation and hue do not change grey images.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrail.data.augment.policy import BOX_ONE, BOX_PASSES, Layer, Op, OpArguments
from vitrail.data.to_device import on_device

FILL = 128  # value outside the image
LUMA = (19595.0, 38470.0, 7471.0)  # over 65536, as in Pillow; all sums are below 2**24, exact in float32


class KernelArguments(NamedTuple):
    """Arguments of the rows that a kernel processes, on their device; see OpArguments."""

    factor: Tensor  # float32 (n, 1, 1, 1)
    integers: Tensor  # int32 (n, 6)
    table: Tensor  # uint8 (n, 256)


Kernel = Callable[[Tensor, KernelArguments], Tensor]  # uint8 (n, C, H, W) -> values 0 to 255 of any type


def distort(pixels: Tensor, layers: Sequence[Layer]) -> Tensor:
    """Apply `layers` to uint8 (B, C, H, W), one after the other.

    On a GPU, rows are sorted by operation in every layer, so that each kernel processes one slice; the last line
    restores the order. On a CPU, images are processed one by one, as one fits in the cache.
    """
    grouped = pixels.device.type != "cpu"
    color_channels = 3 if pixels.shape[1] >= 3 else 1
    rows = np.arange(len(pixels))  # rows[k]: index of the sample in row k
    pixels = pixels if grouped else pixels.clone()
    for layer in layers:
        arguments = OpArguments.of(layer, pixels.shape[-2], pixels.shape[-1])
        kernels = _KERNEL_OF[layer.op]
        kernels[(layer.op == Op.BLUR) & (arguments.integers[:, 2] > 0)] = _WIDE_BLUR
        if grouped:
            order = np.argsort(kernels, kind="stable")
            pixels = pixels.index_select(0, _on(pixels, np.argsort(rows)[order]))
            rows, kernels, arguments = order, kernels[order], arguments[order]
        columns = (arguments.factor, arguments.integers, arguments.table)
        factor, integers, table = (_on(pixels, column) for column in columns)
        factor = factor[:, None, None, None]
        for number, start, stop in _runs(kernels, max_rows=len(kernels) if grouped else 1):
            kernel, ops = _KERNELS[number]
            target = pixels[start:stop] if ops[0] >= Op.ROTATE else pixels[start:stop, :color_channels]
            rows_arguments = KernelArguments(factor[start:stop], integers[start:stop], table[start:stop])
            target.copy_(kernel(target, rows_arguments))
    return pixels.index_select(0, _on(pixels, np.argsort(rows))) if grouped else pixels


def _on(like: Tensor, values: np.ndarray) -> Tensor:
    return on_device(values, like.device)


def _runs(kernels: np.ndarray, max_rows: int) -> Iterator[tuple[int, int, int]]:
    """(kernel, start, stop) of each run of equal kernels, at most `max_rows` long. Skips kernel 0, the identity."""
    edges = [0, *(np.flatnonzero(np.diff(kernels)) + 1).tolist(), len(kernels)]
    for first, last in pairwise(edges):
        if first < last and kernels[first]:
            for start in range(first, last, max_rows):
                yield int(kernels[first]), start, min(start + max_rows, last)


def autocontrast(x: Tensor, _: KernelArguments) -> Tensor:
    """Stretch each channel so that its lowest value becomes 0 and its highest 255."""
    flat = x.flatten(2)
    low, high = (edge.to(torch.float64) for edge in (flat.amin(-1, keepdim=True), flat.amax(-1, keepdim=True)))
    ramp = torch.arange(256, device=x.device, dtype=torch.float64)
    scale = torch.full_like(low, 255.0) / (high - low)  # infinite for a constant channel, which is left unchanged
    table = (ramp * scale - low * scale).clamp(0, 255)
    return _look_up(torch.where(high > low, table, ramp), x)


def equalize(x: Tensor, _: KernelArguments) -> Tensor:
    """Equalise the histogram of each channel."""
    flat = x.flatten(2)  # (n, C, H*W)
    counts = _histogram(flat)
    highest = flat.amax(-1, keepdim=True).to(torch.int64)
    step = (flat.shape[-1] - counts.gather(2, highest)) // 255  # Pillow excludes the highest value
    spread = (counts.cumsum(-1) - counts + step // 2) // step.clamp(min=1)
    ramp = torch.arange(256, device=x.device)
    return _look_up(torch.where(step > 0, spread.clamp(max=255), ramp), x)


def _histogram(flat: Tensor) -> Tensor:
    """Histogram of each channel, (n, C, 256). bincount is twice as fast, but synchronises on a GPU."""
    if flat.device.type == "cpu":
        counts = [torch.bincount(channel, minlength=256) for channel in flat.flatten(0, 1)]
        return torch.stack(counts).view(*flat.shape[:2], 256)
    ones = torch.ones((), device=flat.device, dtype=torch.int64).expand_as(flat)
    zeros = torch.zeros(*flat.shape[:2], 256, device=flat.device, dtype=torch.int64)
    # Integer sums do not depend on the order, but in deterministic mode torch would sort the indices.
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        return zeros.scatter_add_(2, flat.to(torch.int64), ones)
    finally:
        torch.use_deterministic_algorithms(deterministic)


def _look_up(tables: Tensor, x: Tensor) -> Tensor:
    """Map values of x, (n, C, H, W), through `tables`, (n, C or 1, 256). One flat index_select is the fastest form."""
    first = torch.arange(0, tables.numel(), 256, device=x.device, dtype=torch.int32)
    index = x.to(torch.int32).add_(first.view(*tables.shape[:2], 1, 1))
    return tables.to(torch.uint8).flatten().index_select(0, index.flatten()).view_as(x)


def look_up(x: Tensor, args: KernelArguments) -> Tensor:
    """Map every value through a table (invert, posterize, solarize, brightness)."""
    return _look_up(args.table[:, None], x)


def contrast(x: Tensor, args: KernelArguments) -> Tensor:
    """Blend with the rounded mean of the grey image."""
    image = x.to(torch.float32)
    mean = (_grey(image).mean((2, 3), keepdim=True, dtype=torch.float64) + 0.5).floor()
    return _blend(mean.to(torch.float32), image, args)


def color(x: Tensor, args: KernelArguments) -> Tensor:
    """Blend with the grey image (saturation)."""
    image = x.to(torch.float32)
    return _blend(_grey(image), image, args) if x.shape[1] == 3 else x


def sharpness(x: Tensor, args: KernelArguments) -> Tensor:
    """Blend with a 3 x 3 mean whose centre has weight 5; the border is unchanged."""
    values = x.to(torch.int16)
    rows = (values[:, :, :-2] + values[:, :, 1:-1]).add_(values[:, :, 2:])
    total = (rows[..., :-2] + rows[..., 1:-1]).add_(rows[..., 2:])
    centre = values[:, :, 1:-1, 1:-1]
    smooth = total.add_(centre, alpha=4).to(torch.float32).mul_(1 / 13).add_(0.5).floor_()  # never close to .5
    result = x.clone()
    result[:, :, 1:-1, 1:-1] = _blend(smooth, centre.to(torch.float32), args)
    return result


def _grey(image: Tensor) -> Tensor:
    """Luminance of float (n, C, H, W), (n, 1, H, W)."""
    if image.shape[1] == 1:
        return image
    total = image[:, 0:1] * LUMA[0]
    return total.add_(image[:, 1:2], alpha=LUMA[1]).add_(image[:, 2:3], alpha=LUMA[2]).add_(32768).mul_(2**-16).floor_()


def _blend(plain: Tensor, image: Tensor, args: KernelArguments) -> Tensor:
    """Interpolate from `plain` (factor 0) to `image` (factor 1) and beyond, clipped and truncated as in Pillow."""
    return _clip((image - plain).mul_(args.factor).add_(plain))


def _clip(values: Tensor) -> Tensor:
    return values.clamp_(0, 255).to(torch.int32)  # faster than to uint8


def hue(x: Tensor, args: KernelArguments) -> Tensor:
    """Rotate the hue by a fraction of the circle, as torchvision's adjust_hue, rounded to nearest."""
    if x.shape[1] != 3:
        return x
    image = x.to(torch.float32)
    red, green, blue = image.unbind(1)  # (n, H, W)
    value, minimum = image.amax(1), image.amin(1)
    chroma = value - minimum
    safe = chroma.clamp(min=1)
    from_green, from_blue = 2 + (blue - red) / safe, 4 + (red - green) / safe
    angle = torch.where(value == red, (green - blue) / safe, torch.where(value == green, from_green, from_blue))
    angle = angle + 6 * args.factor[:, 0]
    channels = []
    for offset in (5, 3, 1):  # each channel is a clipped triangle wave of the angle
        along = torch.remainder(angle + offset, 6)
        channels.append(value - chroma * torch.minimum(along, 4 - along).clamp(0, 1))
    return _clip(torch.stack(channels, 1).add_(0.5))


def blur(x: Tensor, args: KernelArguments, radius: int) -> Tensor:
    """Gaussian blur as in Pillow: three box blurs along rows, then three along columns, each rounded."""
    centre, near, far = args.integers[:, :3, None, None, None].unbind(1)  # (n, 1, 1, 1)
    levels = x.to(torch.int32)
    for axis in (3, 2):
        size = levels.shape[axis]
        wide = torch.cat([levels.narrow(axis, 0, 1)] * radius + [levels] + [levels.narrow(axis, 0, 1)] * radius, axis)
        levels = wide.narrow(axis, radius, size)  # the image between two padded edges
        for _ in range(BOX_PASSES):
            wide.narrow(axis, 0, radius).copy_(levels.narrow(axis, 0, 1))
            wide.narrow(axis, radius + size, radius).copy_(levels.narrow(axis, size - 1, 1))
            total = (levels * centre).add_(BOX_ONE // 2)
            for distance, weight in zip(range(1, radius + 1), (near, far), strict=False):
                pair = wide.narrow(axis, radius - distance, size) + wide.narrow(axis, radius + distance, size)
                total.addcmul_(pair, weight)
            # Sums above 2**31 wrap around; the mask removes the sign.
            torch.bitwise_and(total.bitwise_right_shift_(24), 255, out=levels)
    return levels


def affine(x: Tensor, args: KernelArguments) -> Tensor:
    """Affine transform with nearest-neighbour sampling in Pillow's fixed-point arithmetic, padded with FILL."""
    height, width = x.shape[-2:]
    a, b, c, d, e, f = args.integers[:, :, None].unbind(1)  # (n, 1)
    along, down = (torch.arange(size, device=x.device, dtype=torch.int32) for size in (width, height))
    column = ((a * along)[:, None, :] + (b * down + c)[:, :, None]).bitwise_right_shift_(16).clamp_(-1, width)
    row = ((d * along)[:, None, :] + (e * down + f)[:, :, None]).bitwise_right_shift_(16).clamp_(-1, height)
    index = row.mul_(width + 2).add_(column).add_(width + 3).to(torch.int64)  # (n, H, W)
    framed = torch.nn.functional.pad(x, (1, 1, 1, 1), value=FILL).flatten(2)
    return torch.gather(framed, 2, index.flatten(1)[:, None].expand(-1, x.shape[1], -1)).view_as(x)


def cutout(x: Tensor, args: KernelArguments) -> Tensor:
    """Fill a square with FILL."""
    top, left, bottom, right = args.integers[:, :4, None].unbind(1)  # (n, 1)
    rows, columns = (torch.arange(size, device=x.device) for size in x.shape[-2:])
    down, along = (rows >= top) & (rows < bottom), (columns >= left) & (columns < right)  # (n, H), (n, W)
    hole = (down[:, :, None] & along[:, None, :])[:, None].to(torch.uint8).neg_()  # (n, 1, H, W): 0 or 255
    return (x & ~hole) | (hole & FILL)


_KERNELS: list[tuple[Kernel, tuple[Op, ...]]] = [
    (lambda x, _: x, (Op.IDENTITY,)),
    (autocontrast, (Op.AUTOCONTRAST,)),
    (equalize, (Op.EQUALIZE,)),
    (look_up, (Op.INVERT, Op.POSTERIZE, Op.SOLARIZE, Op.SOLARIZE_ADD, Op.BRIGHTNESS)),
    (contrast, (Op.CONTRAST,)),
    (color, (Op.COLOR,)),
    (sharpness, (Op.SHARPNESS,)),
    (hue, (Op.HUE,)),
    (partial(blur, radius=1), (Op.BLUR,)),
    (affine, (Op.ROTATE, Op.SHEAR_X, Op.SHEAR_Y, Op.TRANSLATE_X, Op.TRANSLATE_Y)),
    (cutout, (Op.CUTOUT,)),
    (partial(blur, radius=2), (Op.BLUR,)),  # for wider box blurs
]
_WIDE_BLUR = len(_KERNELS) - 1
_KERNEL_OF = np.array([next(n for n, (_, ops) in enumerate(_KERNELS) if op in ops) for op in Op])
