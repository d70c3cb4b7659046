"""Throughput of augmentation: vitrail, kornia and Pillow, in one process.

    python -m bench.augment [--device cuda] [--quick]

All augment the same batch of 224-pixel images. Pillow's input and output are Pillow images; kornia converts bytes on
the device to floats. kornia draws one set of operations per batch; `kornia each` augments image by image, so that each
image has different operations, as with vitrail and Pillow. On a CPU, the CPU time of one thread is measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageFilter, ImageOps
from rich.console import Console
from torch import Tensor

from bench.harness import Candidate, Comparison, Effort, compare, cuda_clock, processor_clock
from bench.record import RESULTS, installed, machine_facts, table, write_results
from vitrail.config import AugmentConfig
from vitrail.data.augment.batch import augment_batch
from vitrail.data.augment.distort import FILL
from vitrail.data.augment.policy import Layer, Op, layers_for

SIZE = 224
POLICIES = {
    "RandAugment(2, 10)": AugmentConfig(flip=False, randaugment_layers=2, randaugment_magnitude=10),
    "3-Augment": AugmentConfig(flip=False, three_augment=True, color_jitter=0.3),
}
Work = Callable[[], object]


def pillow(image: Image.Image, op: Op, value: float) -> Image.Image:
    """Apply one operation with Pillow, which has no cutout and no hue."""
    fill = (FILL,) * len(image.getbands())
    if op in _MAPS:
        return image.transform(image.size, Image.Transform.AFFINE, _MAPS[op](value), fillcolor=fill)
    if op is Op.ROTATE:
        return image.rotate(value, fillcolor=fill)
    return _PILLOW[op](image, value)


_MAPS: dict[Op, Callable[[float], tuple[float, ...]]] = {
    Op.SHEAR_X: lambda value: (1, value, 0, 0, 1, 0),
    Op.SHEAR_Y: lambda value: (1, 0, 0, value, 1, 0),
    Op.TRANSLATE_X: lambda value: (1, 0, value, 0, 1, 0),
    Op.TRANSLATE_Y: lambda value: (1, 0, 0, 0, 1, value),
}
_PILLOW: dict[Op, Callable[[Image.Image, float], Image.Image]] = {
    Op.IDENTITY: lambda image, value: image,
    Op.AUTOCONTRAST: lambda image, value: ImageOps.autocontrast(image),
    Op.EQUALIZE: lambda image, value: ImageOps.equalize(image),
    Op.INVERT: lambda image, value: ImageOps.invert(image),
    Op.POSTERIZE: lambda image, value: ImageOps.posterize(image, int(value)),
    Op.SOLARIZE: lambda image, value: ImageOps.solarize(image, int(value)),
    Op.SOLARIZE_ADD: lambda image, value: image.point(
        [min(255, level + int(value)) if level < 128 else level for level in range(256)] * len(image.getbands())
    ),
    Op.BRIGHTNESS: lambda image, value: ImageEnhance.Brightness(image).enhance(value),
    Op.CONTRAST: lambda image, value: ImageEnhance.Contrast(image).enhance(value),
    Op.COLOR: lambda image, value: ImageEnhance.Color(image).enhance(value),
    Op.SHARPNESS: lambda image, value: ImageEnhance.Sharpness(image).enhance(value),
    Op.BLUR: lambda image, value: image.filter(ImageFilter.GaussianBlur(value)),
}


def pillow_layers(images: list[Image.Image], layers: list[Layer]) -> list[Image.Image]:
    """The same operations as vitrail, applied with Pillow."""
    for layer in layers:
        centre = layer.centre if layer.centre is not None else np.zeros((len(images), 2))
        rows = zip(images, layer.op.tolist(), layer.value.tolist(), centre.tolist(), strict=True)
        images = [_apply(image, Op(op), value, position) for image, op, value, position in rows]
    return images


def _apply(image: Image.Image, op: Op, value: float, position: list[float]) -> Image.Image:
    if op is not Op.CUTOUT:
        return pillow(image, op, value)
    y, x, pad = int(position[0] * image.height), int(position[1] * image.width), int(value)
    result = image.copy()
    result.paste((FILL,) * 3, (max(0, x - pad), max(0, y - pad), min(image.width, x + pad), min(image.height, y + pad)))
    return result


def vitrail_work(pixels: Tensor, config: AugmentConfig) -> Work:
    """Each call is a new epoch, with new random operations."""
    sample, epoch = torch.arange(len(pixels)), torch.zeros(len(pixels), dtype=torch.int64)

    def work() -> Tensor:
        epoch.add_(1)
        return augment_batch(pixels, config, 0, epoch, sample)

    return work


def pillow_work(pixels: Tensor, config: AugmentConfig) -> Work:
    images = [Image.fromarray(image) for image in pixels.permute(0, 2, 3, 1).cpu().numpy()]
    sample, epoch = np.arange(len(pixels)), np.zeros(len(pixels), dtype=np.int64)

    def work() -> object:
        epoch[:] += 1
        return pillow_layers(images, layers_for(config, 0, epoch, sample, (SIZE, SIZE)))

    return work


def kornia_work(pixels: Tensor, policy: str, each: bool) -> Work:
    kornia: Any = import_module("kornia.augmentation")
    if policy == "3-Augment":
        sigma = (0.1, 2.0)
        one_of_three = kornia.ImageSequential(
            kornia.RandomGrayscale(p=1.0),
            kornia.RandomSolarize(thresholds=(0.5, 0.5), additions=(0.0, 0.0), p=1.0),
            kornia.RandomGaussianBlur((13, 13), sigma, p=1.0),
            random_apply=1,
        )
        augment: Any = torch.nn.Sequential(one_of_three, kornia.ColorJitter(0.3, 0.3, 0.3, p=1.0))
    else:
        augment = kornia.auto.RandAugment(n=2, m=10)
    torch.manual_seed(0)

    def work() -> object:
        images = pixels.to(torch.float32).div_(255)
        return [augment(image) for image in images.split(1)] if each else augment(images)

    return work


def compare_policy(policy: str, batch: int, device: str, effort: Effort) -> Comparison:
    pixels = random_images(batch).to(device)
    config = POLICIES[policy]
    candidates = [Candidate("ours", vitrail_work(pixels, config)), Candidate("pillow", pillow_work(pixels, config))]
    if installed("kornia"):
        candidates += [
            Candidate("kornia", kornia_work(pixels, policy, each=False)),
            Candidate("kornia each", kornia_work(pixels, policy, each=True)),
        ]
    return compare(candidates, effort, cuda_clock if device == "cuda" else processor_clock)


def random_images(count: int) -> Tensor:
    """Alternately smooth and noisy images, uint8 (count, 3, SIZE, SIZE): the cost of an operation depends on them."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 256, (count, 3, SIZE, SIZE), generator=generator, dtype=torch.uint8)
    coarse = torch.rand(count, 3, 14, 14, generator=generator) * 255
    smooth = torch.nn.functional.interpolate(coarse, (SIZE, SIZE), mode="bilinear").to(torch.uint8)
    return torch.where((torch.arange(count) % 2 == 0)[:, None, None, None], smooth, noise)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.augment", description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--quick", action="store_true", help="only batch size 64")
    options = parser.parse_args()
    if options.device == "cpu":
        torch.set_num_threads(1)
    console = Console(width=120)
    rows, results = [], []
    for policy in POLICIES:
        for batch in (64,) if options.quick else (64, 256):
            result = compare_policy(policy, batch, options.device, Effort(seconds=20, min_rounds=7, max_rounds=30))
            speeds = {name: round(batch / result.time(name).median) for name in result.seconds}
            console.print(f"{policy}, {batch}: images/s {speeds}")
            rows.append(((policy, str(batch), f"{speeds['ours']:,}"), result))
            results.append({"policy": policy, "batch": batch, "images_per_second": speeds, **result.summary()})
    console.print(table(f"augmentation on {options.device}", ("policy", "batch", "ours, images/s"), rows))
    facts = machine_facts(options.device)
    facts["packages"] |= {name: installed(name) for name in ("kornia", "pillow")}
    write_results(RESULTS, f"augment-{options.device}", {"machine": facts, "size": SIZE, "races": results})


if __name__ == "__main__":
    main()
