"""How much memory is left to use, on this machine and in this container."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

UNKNOWN = 2 << 30  # what is taken for granted where nothing can be read

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
    return max(0, min(known)) if known else UNKNOWN


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
