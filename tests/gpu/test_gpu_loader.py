"""Batches on a GPU are equal to those on the CPU, with asynchronous copies."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.data.images import MemorySource
from vitrail.config import AugmentConfig, Preprocess
from vitrail.data.loader.cache import shared_bytes
from vitrail.data.loader.loader import training_loader
from vitrail.data.loader.reader import Reader
from vitrail.data.to_device import pinned

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SPEC = Preprocess(size=(96, 96))
GPU = torch.device("cuda")


def batches(source: MemorySource, workers: int, device: torch.device, steps: int = 25):  # type: ignore[no-untyped-def]
    return training_loader(Reader(source, SPEC, 10**6), 64, AugmentConfig(), 0, workers, device).from_step(0, steps)


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_a_busy_gpu_sees_every_batch_as_it_was_made(workers: int) -> None:
    """The queued work takes much longer than loading a batch, so a buffer that is reused too early is detected."""
    source = MemorySource.noise(40)
    expected = [batch.pixels.long().sum((1, 2, 3)) for batch in batches(source, 0, torch.device("cpu"))]
    heavy = torch.randn(4096, 4096, device=GPU)
    sums = []
    for batch in batches(source, workers, GPU):
        assert batch.pixels.is_cuda
        for _ in range(20):
            heavy = (heavy @ heavy).clamp(-1, 1)
        sums.append(batch.pixels.long().sum((1, 2, 3)))
    assert torch.equal(torch.stack(expected), torch.stack(sums).cpu())


def test_shared_memory_is_pinned_for_copies_and_then_released() -> None:
    memory = shared_bytes(1 << 22)
    with pinned(memory, GPU):
        assert torch.from_numpy(memory).is_pinned()
        memory[:] = np.arange(len(memory)) % 251
        copy = torch.from_numpy(memory).to(GPU, non_blocking=True)
        torch.cuda.synchronize()
        assert torch.equal(copy.cpu(), torch.from_numpy(memory))
    assert not torch.from_numpy(memory).is_pinned()


def test_a_stream_left_in_the_middle_gives_everything_back() -> None:
    for _ in range(3):
        stream = batches(MemorySource.noise(40), 2, GPU, 1000)
        next(stream)
        stream.close()
    with pinned(shared_bytes(1 << 20), GPU):
        pass
