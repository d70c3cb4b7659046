"""The cache of decoded images: correct pixels or none, whatever happens to its file."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.data.images import MemorySource, encode
from vitrail.config import DataConfig, Preprocess
from vitrail.data.decode import decode
from vitrail.data.loader import cache as cache_module
from vitrail.data.loader import memory as memory_module
from vitrail.data.loader.cache import PixelCache, StoredPixelCache
from vitrail.data.loader.memory import DEFAULT_AVAILABLE, available_memory
from vitrail.data.loader.reader import Reader
from vitrail.errors import UserError

SPEC = Preprocess(size=(8, 8))


def filled(source: MemorySource, cache: PixelCache) -> PixelCache:
    reader = Reader(source, SPEC, 10**6, cache)
    for index in range(len(source)):
        reader.image(index)
    cache.save()
    return cache


def assert_pixels(source: MemorySource, cache: PixelCache) -> None:
    """Read through the reader, which decodes images missing from the cache."""
    reader = Reader(source, SPEC, 10**6, cache)
    for index, data in enumerate(source.files):
        np.testing.assert_array_equal(reader.image(index), decode(data))


def cached(cache: PixelCache, count: int) -> list[bool]:
    return [cache.get(index) is not None for index in range(count)]


def test_cached_images_are_returned_read_only() -> None:
    source = MemorySource.noise(7)
    cache = PixelCache(source.areas, 3)
    assert cached(cache, 7) == [False] * 7
    filled(source, cache)
    for index, data in enumerate(source.files):
        image = cache.get(index)
        assert image is not None
        np.testing.assert_array_equal(image, decode(data))
        with pytest.raises(ValueError, match="read-only"):
            image[0] = 0


def test_an_image_whose_size_changed_is_not_cached() -> None:
    source = MemorySource.noise(3)
    cache = PixelCache(source.areas, 3)
    source.files[1] = encode(Image.fromarray(np.zeros((5, 5, 3), np.uint8)), "PNG")
    assert_pixels(source, cache)
    assert cached(cache, 3) == [True, False, True]


def test_another_process_fills_the_cache() -> None:
    source = MemorySource.noise(4)
    cache = PixelCache(source.areas, 3)
    process = multiprocessing.get_context("fork").Process(target=filled, args=(source, cache))
    process.start()
    process.join()
    assert cached(cache, 4) == [True] * 4
    assert_pixels(source, cache)


def test_a_later_run_reuses_the_file(tmp_path: Path) -> None:
    source = MemorySource.noise(7)
    filled(source, StoredPixelCache(source, SPEC, tmp_path))
    source.reads = 0
    again = StoredPixelCache(source, SPEC, tmp_path)
    assert_pixels(source, again)
    assert source.reads == 0
    more = MemorySource.noise(8)
    assert cached(StoredPixelCache(more, SPEC, tmp_path), 8) == [False] * 8  # other images have another file


@pytest.mark.parametrize("offset", [0, 100, -1])
def test_damaged_pixels_are_decoded_again(tmp_path: Path, offset: int) -> None:
    source = MemorySource.noise(7)
    path = filled(source, StoredPixelCache(source, SPEC, tmp_path)).path
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)
    cache = StoredPixelCache(source, SPEC, tmp_path)
    assert cached(cache, 7).count(False) == 1
    assert_pixels(source, cache)
    cache.save()
    assert cached(StoredPixelCache(source, SPEC, tmp_path), 7) == [True] * 7  # and repaired


def test_a_truncated_file_or_damaged_index_is_filled_again(tmp_path: Path) -> None:
    source = MemorySource.noise(7)
    first = filled(source, StoredPixelCache(source, SPEC, tmp_path))
    first.path.write_bytes(first.path.read_bytes()[:500])
    assert_pixels(source, StoredPixelCache(source, SPEC, tmp_path))
    filled(source, StoredPixelCache(source, SPEC, tmp_path))
    for damage in (b"", b"not an index", first.index_path.read_bytes()[:-20]):
        first.index_path.write_bytes(damage)
        cache = StoredPixelCache(source, SPEC, tmp_path)
        assert cached(cache, 7) == [False] * 7
        assert_pixels(source, cache)


def test_a_run_killed_before_saving_leaves_no_wrong_pixels(tmp_path: Path) -> None:
    source = MemorySource.noise(7)
    cache = StoredPixelCache(source, SPEC, tmp_path)
    assert_pixels(source, cache)  # without save()
    assert cached(StoredPixelCache(source, SPEC, tmp_path), 7) == [False] * 7


def test_a_file_changed_after_the_scan_is_not_cached(tmp_path: Path) -> None:
    source = MemorySource.noise(3)
    cache = StoredPixelCache(source, SPEC, tmp_path)
    source.files[1] = encode(Image.fromarray(np.zeros(decode(source.files[1]).shape, np.uint8)), "PNG")
    assert_pixels(source, cache)
    assert cached(cache, 3) == [True, False, True]


def test_the_file_name_depends_on_everything_pixels_depend_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = MemorySource.noise(3)
    specs = [SPEC, Preprocess(size=(8, 8), background=(0, 0, 0)), Preprocess(size=(8, 8), mean=(0.5,), std=(0.5,))]
    assert len({StoredPixelCache(source, spec, tmp_path).path for spec in specs}) == 3
    for module, name in ((cache_module.features, "version_feature"), (cache_module.metadata, "version")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, lambda _: "another")
            other = StoredPixelCache(source, SPEC, tmp_path).path
        assert other != StoredPixelCache(source, SPEC, tmp_path).path
    wider = Preprocess(size=(16, 9), resize="short_side", interpolation="bicubic")  # does not change decoded pixels
    assert StoredPixelCache(source, wider, tmp_path).path == StoredPixelCache(source, SPEC, tmp_path).path


# the choice of the cache


def reader_for(monkeypatch: pytest.MonkeyPatch, available: int, **data: object) -> Reader:
    monkeypatch.setattr(memory_module, "available_memory", lambda: available)
    return memory_module.make_reader(MemorySource.noise(6), SPEC, DataConfig(**data))


def test_images_are_cached_where_they_fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path))
    size = int(MemorySource.noise(6).areas.sum()) * 3
    assert type(reader_for(monkeypatch, 10 * size).cache) is PixelCache
    assert reader_for(monkeypatch, size).cache is None
    assert type(reader_for(monkeypatch, 0, cache="memory").cache) is PixelCache
    assert type(reader_for(monkeypatch, 0, cache="disk").cache) is StoredPixelCache
    assert reader_for(monkeypatch, 10 * size, cache="none").cache is None


def test_pixels_do_not_depend_on_the_available_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path))
    for cache in ("auto", "memory", "disk"):
        assert not any(reader_for(monkeypatch, available, cache=cache).scaled for available in (0, 10**9))
    assert reader_for(monkeypatch, 10**9, cache="none").scaled
    assert not reader_for(monkeypatch, 10**9, cache="none", scaled_decoding=False).scaled
    monkeypatch.setattr(memory_module, "MAX_CACHE_BYTES", 10)
    assert all(reader_for(monkeypatch, available).scaled for available in (0, 10**9))


def test_a_cache_that_cannot_be_created_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"data\.cache=disk .*Not a directory.*VITRAIL_CACHE"):
        reader_for(monkeypatch, 10**9, cache="disk")


@pytest.mark.parametrize("failure", [OSError(12, "Cannot allocate memory"), MemoryError(), ValueError("too large")])
def test_failed_allocation_with_auto_means_no_cache(monkeypatch: pytest.MonkeyPatch, failure: Exception) -> None:
    def fail(*arguments: object) -> PixelCache:
        raise failure

    monkeypatch.setattr(memory_module, "PixelCache", fail)
    assert reader_for(monkeypatch, 10**9).cache is None
    with pytest.raises(UserError, match=r"data\.cache=memory .*: \w+"):
        reader_for(monkeypatch, 10**9, cache="memory")


def test_memory_of_nested_control_groups(tmp_path: Path) -> None:
    def write(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    write("proc/self/cgroup", "0::/system.slice/job_7/step:0\n")
    write("sys/fs/cgroup/system.slice/job_7/memory.max", "5000\n")
    write("sys/fs/cgroup/system.slice/job_7/memory.current", "1000\n")
    write("sys/fs/cgroup/system.slice/job_7/step:0/memory.max", "max\n")
    write("sys/fs/cgroup/system.slice/job_7/step:0/memory.current", "900\n")
    write("sys/fs/cgroup/system.slice/other/memory.max", "10\n")
    write("sys/fs/cgroup/system.slice/other/memory.current", "9\n")
    assert available_memory(tmp_path) == 4000
    write("sys/fs/cgroup/system.slice/job_7/step:0/memory.max", "3000\n")
    assert available_memory(tmp_path) == 2100
    write("proc/self/cgroup", "5:cpu,memory:/slurm/job\n1:name=systemd:/\n0::/\n")
    write("sys/fs/cgroup/memory/slurm/memory.limit_in_bytes", "800\n")
    write("sys/fs/cgroup/memory/slurm/memory.usage_in_bytes", "100\n")
    write("sys/fs/cgroup/memory/slurm/memory.stat", "inactive_file 3\ntotal_inactive_file 50\n")
    assert available_memory(tmp_path) == 750
    write("proc/self/cgroup", "5:memory:/../slurm\n")
    assert available_memory(tmp_path) == DEFAULT_AVAILABLE


def test_memory_of_machine_and_container(tmp_path: Path) -> None:
    assert available_memory(tmp_path) == DEFAULT_AVAILABLE
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemFree: 10 kB\nMemAvailable: 8000 kB\n")
    assert available_memory(tmp_path) == 8000 * 1024
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("4096\n")
    assert available_memory(tmp_path) == 8000 * 1024
    (group / "memory.max").write_text("1000000\n")
    (group / "memory.stat").write_text("anon 1\ninactive_file 96\n")
    assert available_memory(tmp_path) == 1000000 - 4096 + 96
    assert available_memory() > 0
