"""How much memory is left on this machine and in this container, and which images are kept decoded in it."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from vitrail.config import DataConfig, Preprocess
from vitrail.data.loader.cache import PixelCache, StoredPixelCache
from vitrail.data.loader.loader import Loader
from vitrail.data.loader.reader import Reader
from vitrail.data.samples import Samples
from vitrail.data.scan import cores
from vitrail.errors import UserError, error_reason

MAX_CACHE_BYTES = 32 << 30  # decoded bytes up to which images are kept without being asked
MEMORY_FRACTION = 0.4  # of the memory that is left, at most
DEFAULT_AVAILABLE = 2 << 30  # what is taken for granted where nothing can be read

_CGROUPS = [  # (controller, folder, limit, in use, reclaimable part in memory.stat) of control groups, version 2 and 1
    ("", "", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
]


def available_memory(system: Path = Path("/")) -> int:
    """Bytes that can be taken without another program going short: the least that the kernel or a container allows."""
    found = [_of_machine(system / "proc/meminfo")]
    for controller, folder, limit, used, reclaimable in _CGROUPS:
        for group in _groups(system / "proc/self/cgroup", controller):
            place = system / "sys/fs/cgroup" / folder / group
            found.append(_of_container(place / limit, place / used, reclaimable))
    known = [value for value in found if value is not None]
    return max(0, min(known)) if known else DEFAULT_AVAILABLE


def _of_machine(path: Path) -> int | None:
    for line in _lines(path):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _groups(path: Path, controller: str) -> list[PurePosixPath]:
    """The process's control group and all around it, whose limits hold too, below the folder of all groups.

    The outermost is always among them: in a container it is often the container's own, under a path that is not there.
    """
    for line in _lines(path):
        number, _, rest = line.partition(":")
        controllers, _, place = rest.partition(":")
        group = PurePosixPath(place.lstrip("/"))
        if ".." in group.parts:  # it lies outside of what this process can see
            continue
        if controller in controllers.split(",") and (controller or number == "0"):
            return [group, *group.parents]
    return [PurePosixPath()]


def _of_container(limit: Path, used: Path, reclaimable: str) -> int | None:
    try:
        most, now = int(_lines(limit)[0]), int(_lines(used)[0])
    except (ValueError, IndexError):  # "max": no limit; or no such file
        return None
    parts = dict(line.split() for line in _lines(limit.with_name("memory.stat")))
    return most - now + int(parts.get(reclaimable, 0))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def make_reader(samples: Samples, spec: Preprocess, data: DataConfig, beside: int = 1) -> Reader:
    """For a split that is read many times, as in training, by so many processes on this machine."""
    size = decoded_bytes(samples, spec)
    # Whether images are decoded smaller changes their pixels a little. So it hangs on the settings and the data alone,
    # and not on the memory that is left: a run goes on to the bit on another machine.
    scaled = data.scaled_decoding and (data.cache == "none" or (data.cache == "auto" and size > MAX_CACHE_BYTES))
    return Reader(samples, spec, data.max_pixels, _cache(samples, spec, data, size, beside), scaled)


def decoded_bytes(samples: Samples, spec: Preprocess) -> int:
    return int(samples.areas.sum()) * spec.channels


def fits_in_memory(size: int) -> bool:
    return size <= min(MAX_CACHE_BYTES, MEMORY_FRACTION * available_memory())


def _cache(samples: Samples, spec: Preprocess, data: DataConfig, size: int, beside: int) -> PixelCache | None:
    if data.cache == "none" or (data.cache == "auto" and not fits_in_memory(size * beside)):  # each keeps its own
        return None
    try:
        return StoredPixelCache(samples, spec) if data.cache == "disk" else PixelCache(samples.areas, spec.channels)
    except (OSError, MemoryError, ValueError) as error:  # ValueError: longer than an address can say
        if data.cache == "auto":  # nobody asked for it, as where a limit on addresses is below the free memory
            return None
        reason = error_reason(error) or "there is too little memory"
        raise UserError(
            f"the decoded images, {size / 1e9:,.1f} GB, cannot be kept: {reason}; "
            "leave out data.cache, or set VITRAIL_CACHE to a folder with room for them"
        ) from None


def data_wait_advice(loader: Loader, samples: Samples, spec: Preprocess, data: DataConfig) -> str:
    """What would help here when training waits for images, in one sentence."""
    size = decoded_bytes(samples, spec)
    if loader.workers < cores():
        return f"more processes that load images would help: --set data.workers={cores()}"
    if loader.reader.cache is None and size <= MEMORY_FRACTION * available_memory():
        return f"images kept decoded, {size / 1e9:,.1f} GB, fit in memory and would help: --set data.cache=memory"
    height, width = spec.size
    return f"smaller images would help: vitrail pack {data.path} OUT --resize {round(max(height, width) * 8 / 7)}"
