"""Available memory of the machine or container, and the choice of the image cache."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from vitrail.config import DataConfig, Preprocess
from vitrail.data.loader.cache import PixelCache, StoredPixelCache
from vitrail.data.loader.loader import Loader
from vitrail.data.loader.reader import Reader
from vitrail.data.samples import Samples
from vitrail.data.scan import cores
from vitrail.errors import UserError, error_reason

MAX_CACHE_BYTES = 32 << 30  # largest cache with data.cache=auto
MEMORY_FRACTION = 0.4  # of the available memory, at most
DEFAULT_AVAILABLE = 2 << 30  # assumed if the available memory is unknown

_CGROUPS = [  # control groups v2 and v1: controller, folder, limit, usage, reclaimable key in memory.stat
    ("", "", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
]


def available_memory(system: Path = Path("/")) -> int:
    """Available memory in bytes: the minimum over the machine and all control groups of this process."""
    limits = [_machine_available(system / "proc/meminfo")]
    for controller, folder, limit, used, reclaimable in _CGROUPS:
        for group in _groups(system / "proc/self/cgroup", controller):
            path = system / "sys/fs/cgroup" / folder / group
            limits.append(_cgroup_available(path / limit, path / used, reclaimable))
    known = [value for value in limits if value is not None]
    return max(0, min(known)) if known else DEFAULT_AVAILABLE


def _machine_available(path: Path) -> int | None:
    for line in _lines(path):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _groups(path: Path, controller: str) -> list[PurePosixPath]:
    """The control group of this process and all its parents, whose limits apply too, relative to the root group.

    The root is always included: in a container it is often the container's own group.
    """
    for line in _lines(path):
        number, _, rest = line.partition(":")
        controllers, _, path_in_group = rest.partition(":")
        group = PurePosixPath(path_in_group.lstrip("/"))
        if ".." in group.parts:  # outside the namespace of this process
            continue
        if controller in controllers.split(",") and (controller or number == "0"):
            return [group, *group.parents]
    return [PurePosixPath()]


def _cgroup_available(limit: Path, used: Path, reclaimable: str) -> int | None:
    try:
        maximum, used_bytes = int(_lines(limit)[0]), int(_lines(used)[0])
    except (ValueError, IndexError):  # "max": no limit; or no such file
        return None
    stat = dict(line.split() for line in _lines(limit.with_name("memory.stat")))
    return maximum - used_bytes + int(stat.get(reclaimable, 0))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def make_reader(samples: Samples, spec: Preprocess, data: DataConfig, processes: int = 1) -> Reader:
    """Reader for a split that is read many times (training), by `processes` ranks on this machine."""
    size = decoded_bytes(samples, spec)
    # Scaled decoding changes pixels slightly. It must depend on settings and data only, not on the available memory, so
    # that a run resumed on another machine is bit-identical.
    scaled = data.scaled_decoding and (data.cache == "none" or (data.cache == "auto" and size > MAX_CACHE_BYTES))
    return Reader(samples, spec, data.max_pixels, _make_cache(samples, spec, data, size, processes), scaled)


def decoded_bytes(samples: Samples, spec: Preprocess) -> int:
    """Size of all decoded images."""
    return int(samples.areas.sum()) * spec.channels


def fits_in_memory(size: int) -> bool:
    """Whether data.cache=auto keeps this many bytes."""
    return size <= min(MAX_CACHE_BYTES, MEMORY_FRACTION * available_memory())


def _make_cache(samples: Samples, spec: Preprocess, data: DataConfig, size: int, processes: int) -> PixelCache | None:
    if data.cache == "none" or (data.cache == "auto" and not fits_in_memory(size * processes)):  # one cache per process
        return None
    try:
        return StoredPixelCache(samples, spec) if data.cache == "disk" else PixelCache(samples.areas, spec.channels)
    except (OSError, MemoryError, ValueError) as error:  # ValueError: too large for an address
        if data.cache == "auto":  # not requested by the user: train without a cache
            return None
        reason = error_reason(error) or "not enough memory"
        raise UserError(
            f"data.cache={data.cache} needs {size / 1e9:,.1f} GB for the decoded images: {reason}; "
            "remove data.cache, or set VITRAIL_CACHE to a folder with enough space"
        ) from None


def data_wait_advice(loader: Loader, samples: Samples, spec: Preprocess, data: DataConfig) -> str:
    """One sentence of advice for when training waits for images."""
    size = decoded_bytes(samples, spec)
    if loader.workers < cores():
        return f"use more data loader processes: --set data.workers={cores()}"
    if loader.reader.cache is None and size <= MEMORY_FRACTION * available_memory():
        return f"the decoded images ({size / 1e9:,.1f} GB) fit in memory, so cache them: --set data.cache=memory"
    height, width = spec.size
    return f"use smaller images: vitrail pack {data.path} OUT --resize {round(max(height, width) * 8 / 7)}"
