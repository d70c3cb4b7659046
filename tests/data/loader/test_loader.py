"""The data loader: batches are a function of the step, with any number of workers and ranks."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.data.images import MemorySource, encode, photo
from vitrail.config import AugmentConfig, Preprocess
from vitrail.data.augment.crop import crop_box, crop_draws
from vitrail.data.decode import decode
from vitrail.data.loader import loader as loader_module
from vitrail.data.loader import workers as workers_module
from vitrail.data.loader.cache import PixelCache
from vitrail.data.loader.loader import (
    ImageBatch,
    evaluation_loader,
    training_loader,
    training_sampler,
)
from vitrail.data.loader.reader import Reader, jpeg_downscale_for, scale_box
from vitrail.data.loader.resident import ResidentLoader
from vitrail.data.randomness import epoch_permutation
from vitrail.data.transforms import crop_resize
from vitrail.distributed import SINGLE_PROCESS, Ranks
from vitrail.errors import UserError

SPEC = Preprocess(size=(8, 8))
CPU = torch.device("cpu")
FIELDS = ("pixels", "labels", "weights", "epoch", "sample", "position")


def reader_for(source, keep=False, **options):
    return Reader(source, SPEC, 10**6, PixelCache(source.areas, 3) if keep else None, **options)


def stream(source, start, stop, batch_size=4, workers=0, keep=False, seed=0, ranks=SINGLE_PROCESS, **augment):
    augments = AugmentConfig(**augment)
    loader = training_loader(reader_for(source, keep), batch_size, augments, seed, workers, CPU, ranks)
    return list(loader.from_step(start, stop))


def assert_same(left, right):
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert a.failures == b.failures
        for field in FIELDS:
            assert torch.equal(getattr(a, field), getattr(b, field))


def global_batches(parts):
    """The batches of several ranks joined to global ones, without the overlapping rows."""
    for ranks in zip(*parts, strict=True):
        values = {field: torch.cat([getattr(b, field)[b.overlap :] for b in ranks]) for field in FIELDS}
        yield ImageBatch(**values, failures=[f for b in ranks for f in b.failures])


def test_every_epoch_has_every_sample_once():
    batches = stream(MemorySource.noise(10), 0, 10)  # 40 positions: four epochs of ten
    epochs = torch.cat([b.epoch for b in batches])
    samples = torch.cat([b.sample for b in batches])
    assert epochs.tolist() == [e for e in range(4) for _ in range(10)]
    for epoch in range(4):
        assert samples[epochs == epoch].tolist() == epoch_permutation(0, epoch, 10).tolist()


def test_pixels_equal_the_crop_of_the_decoded_image():
    source = MemorySource.noise(10)
    for batch in stream(source, 0, 4):
        for row, (epoch, sample) in enumerate(zip(batch.epoch.tolist(), batch.sample.tolist(), strict=True)):
            image = decode(source.files[sample])
            box = crop_box(*image.shape[:2], AugmentConfig(), crop_draws(0, epoch, sample))
            assert torch.equal(batch.pixels[row], crop_resize(image, box, SPEC))


def test_batches_are_a_function_of_the_step():
    whole = stream(MemorySource.noise(10), 0, 8)
    assert_same(whole[3:], stream(MemorySource.noise(10), 3, 8))
    assert_same(whole, stream(MemorySource.noise(10), 0, 8, keep=True))
    other = stream(MemorySource.noise(10), 0, 8, seed=1)
    assert any((a.pixels != b.pixels).any() for a, b in zip(whole, other, strict=True))


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("keep", [False, True])
def test_batches_do_not_depend_on_workers_or_cache(workers, keep):
    source = MemorySource.noise(10, frozenset({7}))
    assert_same(stream(source, 1, 12, batch_size=20), stream(source, 1, 12, batch_size=20, workers=workers, keep=keep))


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_ranks_make_the_same_global_batch(world, workers):
    source = MemorySource.noise(11, frozenset({5}))
    whole = stream(source, 2, 7, batch_size=8)
    assert [b.position.tolist() for b in whole] == [list(range(8))] * 5
    for neighbour in (False, True):
        options = {"batch_size": 8, "workers": workers, "mixup": 0.2 * neighbour}
        parts = [stream(source, 2, 7, ranks=Ranks(rank, world), **options) for rank in range(world)]
        assert_same(whole, list(global_batches(parts)))
        for rank, part in enumerate(parts):
            for step, batch in enumerate(part):
                assert batch.overlap == (neighbour and world > 1)
                if batch.overlap:
                    previous = (rank * 8 // world - 1) % 8
                    assert batch.position[0] == previous
                    assert torch.equal(batch.pixels[0], whole[step].pixels[previous])


def test_a_batch_size_that_ranks_cannot_divide_is_an_error():
    with pytest.raises(UserError, match=r"train\.batch_size=8 .* 3 processes"):
        stream(MemorySource.noise(4), 0, 1, batch_size=8, ranks=Ranks(0, 3))


def test_an_unreadable_image_has_weight_zero():
    good, bad = stream(MemorySource.noise(10), 0, 5), stream(MemorySource.noise(10, frozenset({4})), 0, 5)
    failures = [f for b in bad for f in b.failures]
    assert failures == [("4.png", "cannot be read: No such file or directory")] * 2
    for a, b in zip(good, bad, strict=True):
        assert torch.equal(a.sample, b.sample)
        assert torch.equal(b.weights, torch.where(b.sample == 4, 0, 1 + b.sample % 2).float())
        assert torch.equal(a.pixels[b.weights > 0], b.pixels[b.weights > 0])
        assert not b.pixels[b.weights == 0].any()


def test_multilabel_targets_are_zeros_and_ones():
    for batch in stream(MemorySource.noise(10, sets=4), 0, 3, workers=1):
        assert batch.labels.dtype == torch.uint8
        assert batch.labels.tolist() == [[s >> k & 1 for k in range(4)] for s in batch.sample.tolist()]
        assert len(batch) == 4


def test_evaluation_has_each_sample_once_in_order():
    for workers in (0, 2):
        loader = evaluation_loader(reader_for(MemorySource.noise(10)), 4, workers, CPU)
        batches = list(loader)
        assert [len(b) for b in batches] == [4, 4, 2]
        assert len(loader) == 3
        assert torch.cat([b.sample for b in batches]).tolist() == list(range(10))
        assert torch.cat([b.labels for b in batches]).tolist() == (np.arange(10) % 3).tolist()


# cache


def test_cached_images_are_read_once():
    source = MemorySource.noise(10)
    stream(source, 0, 10, keep=True)
    assert source.reads == 10


def test_workers_fill_one_cache_for_all():
    source = MemorySource.noise(10)
    reader = reader_for(source, keep=True)
    first = list(training_loader(reader, 5, AugmentConfig(), 0, 2, CPU).from_step(0, 4))
    source.broken = frozenset(range(10))  # everything is in the cache
    assert_same(first, list(training_loader(reader, 5, AugmentConfig(), 0, 2, CPU).from_step(0, 4)))
    assert_same(first, list(training_loader(reader, 5, AugmentConfig(), 0, 0, CPU).from_step(0, 4)))


# scaled decoding


def test_jpeg_downscale():
    sides = (19, 20, 39, 40, 79, 80, 500)
    assert [jpeg_downscale_for((0, 0, side, 999), (10, 20)) for side in sides] == [1, 2, 2, 4, 4, 8, 8]
    assert jpeg_downscale_for((0, 0, 999, 39), (10, 20)) == 1
    assert scale_box((3, 9, 101, 202), 1) == (3, 9, 101, 202)
    assert scale_box((3, 10, 101, 202), 4) == (1, 2, 25, 51)


def test_scaled_decoding_is_close_to_full_decoding_and_only_for_crops():
    source = MemorySource([encode(Image.fromarray(photo(300, 400, i)), "JPEG", quality=92) for i in range(6)])
    spec = Preprocess(size=(32, 32))

    def batch(scaled):
        reader = Reader(source, spec, 10**6, scaled=scaled)
        return next(training_loader(reader, 6, AugmentConfig(scale=(0.5, 1)), 0, 0, CPU).from_step(0, 1)).pixels

    whole, small = batch(False).float(), batch(True).float()
    assert not torch.equal(whole, small)
    assert 10 * torch.log10(255**2 / ((whole - small) ** 2).mean()) > 30
    reader = Reader(source, spec, 10**6, scaled=True)
    assert np.array_equal(reader.image(0), decode(source.files[0]))


# processes


def test_batches_that_are_kept_do_not_change():
    source = MemorySource.noise(10)
    expected = [b.pixels.clone() for b in stream(source, 0, 20)]
    kept = stream(source, 0, 20, workers=2)  # more than there are slots
    assert all(torch.equal(a, b.pixels) for a, b in zip(expected, kept, strict=True))


def test_slots_are_reused_and_dev_shm_is_not_used():
    before = set(Path("/dev/shm").glob("*"))
    loader = training_loader(reader_for(MemorySource.noise(10)), 4, AugmentConfig(), 0, 2, CPU)
    addresses = set()
    for batch in loader.from_step(0, 40):
        addresses.add(batch.pixels.data_ptr())
        assert not [path for path in set(Path("/dev/shm").glob("*")) - before if "torch" in path.name]
    assert len(addresses) <= workers_module.PREFETCH + workers_module.MAX_LENT


def test_a_killed_worker_is_an_error():
    stream_ = training_loader(reader_for(MemorySource.noise(10)), 4, AugmentConfig(), 0, 2, CPU).from_step(0, 1000)
    next(stream_)
    for child in workers_module.multiprocessing.active_children():
        os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(UserError, match=r"signal 9.*data\.workers=1") as error:
        list(stream_)
    assert "\n" not in str(error.value)
    assert not workers_module.multiprocessing.active_children()


def test_workers_ignore_signals_to_the_process_group():
    stream_ = training_loader(reader_for(MemorySource.noise(10)), 4, AugmentConfig(), 0, 2, CPU).from_step(0, 30)
    next(stream_)
    time.sleep(0.2)
    for child in workers_module.multiprocessing.active_children():
        os.kill(child.pid, signal.SIGTERM)
        os.kill(child.pid, signal.SIGINT)
    assert len(list(stream_)) == 29


def test_workers_end_with_the_stream():
    stream_ = training_loader(reader_for(MemorySource.noise(10)), 4, AugmentConfig(), 0, 2, CPU).from_step(0, 1000)
    next(stream_)
    assert len(workers_module.multiprocessing.active_children()) == 2
    stream_.close()
    assert not workers_module.multiprocessing.active_children()


def test_an_exception_in_a_worker_is_raised_with_its_traceback():
    source = MemorySource.noise(10)
    source.files = None  # type: ignore[assignment]
    source.__class__ = type("Broken", (MemorySource,), {"__len__": lambda self: 10})
    with pytest.raises(RuntimeError, match="TypeError"):
        list(training_loader(Reader(source, SPEC, 10**6), 4, AugmentConfig(), 0, 1, CPU).from_step(0, 2))


def test_threads_if_processes_cannot_be_forked(monkeypatch):
    expected = stream(MemorySource.noise(10), 0, 6)
    monkeypatch.setattr(workers_module, "CAN_FORK", False)
    assert_same(expected, stream(MemorySource.noise(10), 0, 6, workers=2))
    assert not workers_module.multiprocessing.active_children()


@pytest.mark.parametrize(
    ("device", "keep", "cores", "workers"),
    [("cpu", False, 4, 4), ("cpu", False, 64, 8), ("cpu", True, 4, 1), ("cpu", True, 1, 0), ("cuda", False, 64, 16)],
)
def test_automatic_number_of_workers(monkeypatch, device, keep, cores, workers):
    monkeypatch.setattr(loader_module, "cores", lambda: cores)
    reader = reader_for(MemorySource.noise(2), keep)
    assert loader_module.workers_for(reader, None, torch.device(device)) == workers
    assert loader_module.workers_for(reader, 3, torch.device(device)) == 3


def test_repeats_are_the_same_images_with_other_augmentation():
    rows = stream(MemorySource.noise(10), 0, 5, batch_size=6, repeats=3)
    for step, batch in enumerate(rows):
        assert batch.sample[:2].tolist() == batch.sample[2:4].tolist() == batch.sample[4:].tolist()
        assert len(batch.epoch.unique()) == 3, step  # random numbers depend on the epoch
        assert not torch.equal(batch.pixels[0], batch.pixels[2])
    seen = torch.cat([batch.sample[:2] for batch in rows])
    assert sorted(seen.tolist()) == list(range(10))  # one epoch in five steps of two images
    assert (
        len(stream(MemorySource.noise(10), 0, 1, batch_size=7, repeats=3)[0]) == 7
    )  # as in DeiT: 1024 is not a multiple of 3


@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_evaluate_every_image_once_in_the_same_number_of_batches(world):
    parts = []
    for rank in range(world):
        loader = evaluation_loader(reader_for(MemorySource.noise(10)), 3, 0, CPU, Ranks(rank, world))
        batches = list(loader)
        assert len(batches) == len(loader) == -(-10 // (3 * world))
        parts += [batch.sample[batch.weights > 0] for batch in batches]
    assert sorted(torch.cat(parts).tolist()) == list(range(10))


@pytest.mark.parametrize("merge", [1, 3])
@pytest.mark.parametrize("crop", ["none", "shift", "zoom"])
def test_resident_loader_and_merged_batches_give_the_same_rows(crop, merge):
    source, augment = MemorySource.noise(11, frozenset({5})), AugmentConfig(crop=crop, mixup=0.1)
    ranks = Ranks(1, 2)
    expected = list(training_loader(reader_for(source), 4, augment, 0, 0, CPU, ranks).from_step(2, 15))
    images = evaluation_loader(reader_for(source), 4, 0, CPU)
    resident = ResidentLoader(images, training_sampler(reader_for(source), 4, augment, 0, ranks))
    loaded = training_loader(reader_for(source), 4, augment, 0, 0, CPU, ranks)
    for loader in (resident, loaded):
        found = list(loader.from_step(2, 15, merge))
        assert len(found) == -(-13 // merge)
        for field in FIELDS:
            left, right = (torch.cat([getattr(batch, field) for batch in batches]) for batches in (found, expected))
            assert torch.equal(left, right)
        assert [f for b in found for f in b.failures] == [f for b in expected for f in b.failures] != []
