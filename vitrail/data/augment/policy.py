"""Augmentation policies: RandAugment, 3-Augment and colour jitter as layers of operations.

All random numbers are drawn here, on the CPU, for the whole batch; distort.py applies the operations on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from vitrail.config import AugmentConfig, Size
from vitrail.data.randomness import Stream, uniform


class Op(IntEnum):
    """Image operations; comments state their value. From ROTATE on they are geometric and apply to all channels."""

    IDENTITY = 0
    AUTOCONTRAST = 1
    EQUALIZE = 2
    INVERT = 3
    POSTERIZE = 4  # bits to keep
    SOLARIZE = 5  # values from here on are inverted
    SOLARIZE_ADD = 6  # added to values below 128
    BRIGHTNESS = 7  # factor
    CONTRAST = 8  # factor
    COLOR = 9  # factor; 0 gives grey
    SHARPNESS = 10  # factor
    HUE = 11  # fraction of the colour circle
    BLUR = 12  # radius
    ROTATE = 13  # degrees
    SHEAR_X = 14  # pixels per row
    SHEAR_Y = 15  # pixels per column
    TRANSLATE_X = 16  # pixels
    TRANSLATE_Y = 17  # pixels
    CUTOUT = 18  # half the side, in pixels


@dataclass(frozen=True)
class Layer:
    """One operation per image of a batch."""

    op: np.ndarray  # (B,) values of Op
    value: np.ndarray  # (B,) float64
    centre: np.ndarray | None = None  # (B, 2): centre of a cutout, as fractions of height and width


RANDAUGMENT = np.array(
    [
        *(Op.AUTOCONTRAST, Op.EQUALIZE, Op.INVERT, Op.ROTATE, Op.POSTERIZE, Op.SOLARIZE, Op.COLOR, Op.CONTRAST),
        *(Op.BRIGHTNESS, Op.SHARPNESS, Op.SHEAR_X, Op.SHEAR_Y, Op.TRANSLATE_X, Op.TRANSLATE_Y, Op.SOLARIZE_ADD),
        Op.CUTOUT,  # last, because timm has all but this one
    ]
)
TIMM_PROBABILITY = 0.5  # that a layer is applied
CUTOUT_PIXELS, TRANSLATE_PIXELS = 40, 100  # big_vision: at magnitude 10, for any image size
TRANSLATE_FRACTION = 0.45  # timm: of the side
BLUR_RADIUS = (0.1, 2.0)  # DeiT-III
MAX_MAGNITUDE = {"big_vision": 30.0, "timm": 10.0}  # after adding the random spread

FIXED_POINT_ONE = 1 << 16  # of Pillow's coordinates
BOX_ONE = 1 << 24  # 1.0 in Pillow's box blur
BOX_PASSES = 3

# (magnitude / 10, sign, side of the image) -> value of the operation; the first two are (n,)
Range = Callable[[np.ndarray, np.ndarray, int], np.ndarray]


def layers_for(config: AugmentConfig, seed: int, epochs: np.ndarray, samples: np.ndarray, size: Size) -> list[Layer]:
    """All layers of the configured policies for a batch, in order."""
    layers: list[Layer] = []
    if config.randaugment_layers:
        layers += randaugment(config, seed, epochs, samples, size)
    if config.three_augment:
        layers.append(three_augment(seed, epochs, samples))
    if config.color_jitter or config.hue:
        layers += jitter(config, seed, epochs, samples)
    return layers


def randaugment(config: AugmentConfig, seed: int, epochs: np.ndarray, samples: np.ndarray, size: Size) -> list[Layer]:
    """RandAugment (Cubuk et al. 2020): each layer applies one random operation at a fixed magnitude, with random sign.

    Style "big_vision" has 16 operations. It differs from that code where the code has errors: contrast blends with the
    mean of the image (there: with H*W/256), and a solarize threshold above 255 changes nothing (there: it overflows).
    Style "timm" is `rand-inc1` with 15 operations, but with nearest-neighbour sampling and a fill of 128, where timm
    interpolates and fills with the mean of the data.
    """
    timm = config.randaugment_style == "timm"
    ops = RANDAUGMENT[:-1] if timm else RANDAUGMENT
    draws = uniform(seed, Stream.RANDAUGMENT, epochs, samples, 8 * config.randaugment_layers)
    layers = []
    for choice, sign, noise, angle, down, right, coin, _ in draws.reshape(len(draws), -1, 8).transpose(1, 2, 0):
        op = ops[(choice * len(ops)).astype(np.int64)]
        normal = np.sqrt(-2 * np.log(noise)) * np.cos(2 * np.pi * angle)  # Box-Muller transform
        magnitude = config.randaugment_magnitude + config.randaugment_std * normal
        level = np.clip(magnitude, 0, MAX_MAGNITUDE[config.randaugment_style]) / 10
        value = _values(op, level, np.where(sign < 0.5, -1.0, 1.0), size, TIMM if timm else BIG_VISION)
        if timm:
            op = np.where(coin < TIMM_PROBABILITY, op, Op.IDENTITY)
        layers.append(Layer(op, value, np.stack([down, right], axis=-1)))
    return layers


def three_augment(seed: int, epochs: np.ndarray, samples: np.ndarray) -> Layer:
    """3-Augment (DeiT-III): grey, solarize at 128, or blur with a random radius, one of them per image."""
    choice, radius = uniform(seed, Stream.THREE_AUGMENT, epochs, samples, 2).T
    picked = (choice * 3).astype(np.int64)
    blur = BLUR_RADIUS[0] + radius * (BLUR_RADIUS[1] - BLUR_RADIUS[0])
    op = np.array([Op.COLOR, Op.SOLARIZE, Op.BLUR])[picked]
    return Layer(op, np.select([picked == 0, picked == 1], [np.zeros_like(blur), np.full_like(blur, 128.0)], blur))


def jitter(config: AugmentConfig, seed: int, epochs: np.ndarray, samples: np.ndarray) -> list[Layer]:
    """ColorJitter as in torchvision: brightness, contrast, saturation and hue in random order per image."""
    draws = uniform(seed, Stream.JITTER, epochs, samples, 8)
    low = max(0.0, 1 - config.color_jitter)
    factors = low + draws[:, :4] * (1 + config.color_jitter - low)
    factors[:, 3] = (2 * draws[:, 3] - 1) * config.hue
    ops = np.array([Op.BRIGHTNESS, Op.CONTRAST, Op.COLOR, Op.HUE])
    used = np.flatnonzero([config.color_jitter > 0] * 3 + [config.hue > 0])
    order = used[np.argsort(draws[:, 4 + used], axis=1)]  # (B, operations)
    return [Layer(ops[column], factors[np.arange(len(column)), column]) for column in order.T]


def _values(op: np.ndarray, level: np.ndarray, sign: np.ndarray, size: Size, ranges: dict[Op, Range]) -> np.ndarray:
    values = np.zeros(len(op))
    for kind, value in ranges.items():
        rows = op == kind
        values[rows] = value(level[rows], sign[rows], size[1] if kind is Op.TRANSLATE_X else size[0])
    return values


def _bits(level: np.ndarray) -> np.ndarray:
    return np.floor(4 * level)


def _threshold(level: np.ndarray) -> np.ndarray:
    return np.minimum(256, np.floor(256 * level))


def _enhance(level: np.ndarray, sign: np.ndarray, side: int) -> np.ndarray:
    return 1.8 * level + 0.1


def _enhance_more(level: np.ndarray, sign: np.ndarray, side: int) -> np.ndarray:
    return np.maximum(0.1, 1 + sign * 0.9 * level)


GEOMETRIC: dict[Op, Range] = {
    Op.ROTATE: lambda level, sign, side: sign * 30 * level,
    Op.SHEAR_X: lambda level, sign, side: sign * 0.3 * level,
    Op.SHEAR_Y: lambda level, sign, side: sign * 0.3 * level,
}
BIG_VISION: dict[Op, Range] = {
    **GEOMETRIC,
    Op.TRANSLATE_X: lambda level, sign, side: sign * TRANSLATE_PIXELS * level,
    Op.TRANSLATE_Y: lambda level, sign, side: sign * TRANSLATE_PIXELS * level,
    Op.CUTOUT: lambda level, sign, side: np.floor(CUTOUT_PIXELS * level),
    Op.POSTERIZE: lambda level, sign, side: np.clip(_bits(level), 1, 8),  # TensorFlow keeps one bit for 0
    Op.SOLARIZE: lambda level, sign, side: _threshold(level),
    Op.SOLARIZE_ADD: lambda level, sign, side: np.minimum(255, np.floor(110 * level)),
    **dict.fromkeys((Op.COLOR, Op.CONTRAST, Op.BRIGHTNESS, Op.SHARPNESS), _enhance),
}
TIMM: dict[Op, Range] = {
    **GEOMETRIC,
    Op.TRANSLATE_X: lambda level, sign, side: sign * TRANSLATE_FRACTION * side * level,
    Op.TRANSLATE_Y: lambda level, sign, side: sign * TRANSLATE_FRACTION * side * level,
    Op.POSTERIZE: lambda level, sign, side: np.clip(4 - _bits(level), 1, 8),
    Op.SOLARIZE: lambda level, sign, side: 256 - _threshold(level),
    Op.SOLARIZE_ADD: lambda level, sign, side: np.minimum(128, np.floor(110 * level)),
    **dict.fromkeys((Op.COLOR, Op.CONTRAST, Op.BRIGHTNESS, Op.SHARPNESS), _enhance_more),
}


@dataclass(frozen=True)
class OpArguments:
    """Kernel arguments of a layer."""

    factor: np.ndarray  # float32 (B,): the value
    integers: np.ndarray  # int32 (B, 6): affine map, filter weights, or box edges
    table: np.ndarray  # uint8 (B, 256): new value of each value, for operations that are a lookup table

    @classmethod
    def of(cls, layer: Layer, height: int, width: int) -> OpArguments:
        op, value = layer.op, layer.value
        integers = np.zeros((len(op), 6))
        moved, blurred, cut = (op >= Op.ROTATE) & (op <= Op.TRANSLATE_Y), op == Op.BLUR, op == Op.CUTOUT
        integers[moved] = _affine_maps(op[moved], value[moved], height, width)
        integers[blurred, :3] = _box_weights(value[blurred])
        if cut.any() and layer.centre is not None:
            centre = np.floor(layer.centre[cut] * (height, width))  # (n, 2)
            integers[cut, 0:2], integers[cut, 2:4] = centre - value[cut, None], centre + value[cut, None]
        return cls(value.astype(np.float32), integers.astype(np.int32), _tables(op, value))

    def __getitem__(self, rows: np.ndarray) -> OpArguments:
        return OpArguments(self.factor[rows], self.integers[rows], self.table[rows])


def _tables(op: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Lookup tables (B, 256) of the operations that have one, else zeros."""
    ramp = np.arange(256)
    table = np.zeros((len(op), 256), dtype=np.uint8)
    table[op == Op.INVERT] = 255 - ramp
    for kind, change in _TABLES.items():
        rows = op == kind
        table[rows] = change(ramp, value[rows, None])  # (n, 256)
    return table


_TABLES: dict[Op, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    Op.POSTERIZE: lambda ramp, bits: ramp & (256 - 2 ** (8 - bits)).astype(np.int64),
    Op.SOLARIZE: lambda ramp, threshold: np.where(ramp < threshold, ramp, 255 - ramp),
    Op.SOLARIZE_ADD: lambda ramp, added: np.where(ramp < 128, np.minimum(ramp + added, 255), ramp),
    Op.BRIGHTNESS: lambda ramp, factor: np.minimum(ramp.astype(np.float32) * factor.astype(np.float32), 255),
}


def _affine_maps(op: np.ndarray, value: np.ndarray, height: int, width: int) -> np.ndarray:
    """Maps from output to input pixels (n, 6): x = a x' + b y' + c, y = d x' + e y' + f.

    As for Pillow's Image.transform, but between pixel centres and in units of 1/65536 pixel.
    """
    angle = np.where(op == Op.ROTATE, -np.deg2rad(value), 0)
    a, b = np.cos(angle).round(15), np.sin(angle).round(15)
    x, y = width / 2, height / 2  # centre of rotation
    c, f = x - a * x - b * y, y + b * x - a * y
    d, e = -b, a
    b, d = b + np.where(op == Op.SHEAR_X, value, 0), d + np.where(op == Op.SHEAR_Y, value, 0)
    c, f = c + np.where(op == Op.TRANSLATE_X, value, 0), f + np.where(op == Op.TRANSLATE_Y, value, 0)
    maps = np.stack([a, b, c + a * 0.5 + b * 0.5, d, e, f + d * 0.5 + e * 0.5], axis=-1)  # (n, 6)
    return np.floor(maps * FIXED_POINT_ONE + 0.5)


def _box_weights(radius: np.ndarray) -> np.ndarray:
    """Weights (n, 3) of the centre pixel and its first and second neighbours in one box blur of Pillow's Gaussian.

    In single precision, as in Pillow. Valid for radii up to 2.44.
    """
    variance = radius.astype(np.float32) ** 2 / np.float32(BOX_PASSES)
    whole = np.floor((np.sqrt(12 * variance + 1) - 1) / 2)
    part = (2 * whole + 1) * (whole * (whole + 1) - 3 * variance) / (6 * (variance - (whole + 1) * (whole + 1)))
    full = np.floor(np.float32(BOX_ONE) / ((whole + part) * 2 + 1)).astype(np.float64)
    edge = np.floor((BOX_ONE - (2 * whole + 1) * full) / 2)
    return np.where(whole[:, None] > 0, np.stack([full, full, edge], -1), np.stack([full, edge, 0 * edge], -1))
