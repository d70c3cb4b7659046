import io

import numpy as np
import pytest
import torch
from PIL import Image

from vitrail.config import AugmentConfig, Preprocess
from vitrail.images.loader import Reader, evaluation_loader, training_loader

SPEC = Preprocess(size=(8, 8))
CPU = torch.device("cpu")


class Pictures:
    """A source in memory: image i is a plain colour of its own."""

    def __init__(self, count: int, broken: frozenset[int] = frozenset()):
        self.labels = np.arange(count) % 3
        self.broken = broken
        self.reads = 0

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, index: int) -> str:
        return f"{index}.png"

    def read(self, index: int) -> bytes:
        self.reads += 1
        if index in self.broken:
            raise FileNotFoundError(2, "No such file or directory")
        file = io.BytesIO()
        noise = np.random.default_rng(index).integers(0, 255, (12, 10, 3), dtype=np.uint8)
        Image.fromarray(noise).save(file, "PNG")
        return file.getvalue()


def stream(source, start, stop, batch_size=4, workers=0, keep=False, seed=0):
    reader = Reader(source, SPEC, 10**6, keep)
    return list(training_loader(reader, batch_size, AugmentConfig(), seed, workers, CPU).from_step(start, stop))


def assert_same(left, right):
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        for field in ("pixels", "labels", "weights", "epoch", "sample"):
            assert torch.equal(getattr(a, field), getattr(b, field))


def test_every_epoch_sees_every_sample_once_across_batch_borders():
    batches = stream(Pictures(10), 0, 10)  # 40 positions: four epochs of ten
    epochs = torch.cat([b.epoch for b in batches])
    samples = torch.cat([b.sample for b in batches])
    assert epochs.tolist() == [e for e in range(4) for _ in range(10)]
    for epoch in range(4):
        assert sorted(samples[epochs == epoch].tolist()) == list(range(10))


def test_the_stream_is_a_function_of_the_step():
    whole = stream(Pictures(10), 0, 8)
    assert_same(whole[3:], stream(Pictures(10), 3, 8))
    assert_same(whole, stream(Pictures(10), 0, 8, keep=True))
    assert any((a.pixels != b.pixels).any() for a, b in zip(whole, stream(Pictures(10), 0, 8, seed=1), strict=True))


@pytest.mark.slow
def test_workers_change_nothing():
    assert_same(stream(Pictures(10), 1, 8), stream(Pictures(10), 1, 8, workers=2))


def test_an_unreadable_image_keeps_its_slot_with_weight_zero():
    good, bad = stream(Pictures(10), 0, 5), stream(Pictures(10, broken=frozenset({4})), 0, 5)
    failures = [f for b in bad for f in b.failures]
    assert failures == [("4.png", "cannot be read: No such file or directory")] * 2
    for a, b in zip(good, bad, strict=True):
        assert torch.equal(a.sample, b.sample)
        assert torch.equal(b.weights, (b.sample != 4).float())
        assert torch.equal(a.pixels[b.weights > 0], b.pixels[b.weights > 0])


def test_kept_images_are_read_once():
    source = Pictures(10)
    stream(source, 0, 10, keep=True)
    assert source.reads == 10


def test_evaluation_takes_each_sample_once_in_order():
    loader = evaluation_loader(Reader(Pictures(10), SPEC, 10**6, False), 4, 0, CPU)
    batches = list(loader)
    assert [len(b) for b in batches] == [4, 4, 2] and len(loader) == 3
    assert torch.cat([b.sample for b in batches]).tolist() == list(range(10))
    assert torch.cat([b.labels for b in batches]).tolist() == (np.arange(10) % 3).tolist()
