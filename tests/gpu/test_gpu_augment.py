"""Augmentation on the GPU gives exactly the pixels of the CPU, without synchronising with the device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vitrail.config import AugmentConfig
from vitrail.data.augment.batch import augment_batch, erase
from vitrail.data.augment.mix import mix
from vitrail.inference.device import deterministic

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

POLICIES = [
    AugmentConfig(flip_vertical=True, randaugment_layers=3, randaugment_magnitude=9, randaugment_std=2.0),
    AugmentConfig(three_augment=True, color_jitter=0.4),
]
EPOCH, SAMPLE = torch.zeros(200, dtype=torch.int64), torch.arange(200)


@pytest.mark.parametrize("config", POLICIES)
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_the_gpu_distorts_as_the_cpu(config: AugmentConfig, channels: int) -> None:
    pixels = torch.randint(0, 256, (200, channels, 65, 80), dtype=torch.uint8)
    pixels[::2] = pixels[::2] // 8 + 90  # some with little contrast
    device = torch.device("cuda")
    with deterministic(device):
        result = augment_batch(pixels.to(device), config, 1, EPOCH, SAMPLE)
    assert torch.equal(result.cpu(), augment_batch(pixels, config, 1, EPOCH, SAMPLE))


def test_nothing_waits_for_the_gpu() -> None:
    config = AugmentConfig(
        randaugment_layers=2, color_jitter=0.3, hue=0.1, erasing=0.5, mixup=0.8, cutmix=1.0, mix_per="sample"
    )
    pixels = torch.randint(0, 256, (200, 3, 64, 64), dtype=torch.uint8, device="cuda")
    targets, weights = torch.eye(200, device="cuda"), torch.ones(200, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        images = augment_batch(pixels, config, 1, EPOCH, SAMPLE).float()
        erase(images, config, 1, EPOCH, SAMPLE)
        mix(images, targets, weights, config, 1, [0], np.arange(200))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_part_of_a_batch_is_erased_and_mixed_as_the_whole() -> None:
    config = AugmentConfig(erasing=0.7, mixup=0.8, cutmix=1.0, mix_per="sample")
    pixels = torch.randn(200, 3, 32, 32, device="cuda")
    targets, weights = torch.eye(200, device="cuda"), torch.ones(200, device="cuda")

    def mixed(rows: torch.Tensor) -> torch.Tensor:
        images = erase(pixels[rows.cuda()], config, 1, EPOCH[rows], SAMPLE[rows])
        return mix(images, targets[rows.cuda()], weights[rows.cuda()], config, 1, [0], rows.numpy())[0]

    assert torch.equal(mixed(torch.arange(49, 100))[1:], mixed(torch.arange(200))[50:100])
