"""How much memory is left to use, on this machine and in this container."""

from __future__ import annotations

from pathlib import Path

UNKNOWN = 2 << 30  # what is taken for granted where nothing can be read

_CGROUPS = [  # (limit, in use, name of the reclaimable part in memory.stat) of control groups, version 2 and 1
    ("memory.max", "memory.current", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
]


def available_memory(system: Path = Path("/")) -> int:
    """Bytes that can be taken without another program going short: the least that the kernel or a container allows."""
    found = [_of_machine(system / "proc/meminfo")]
    for limit, used, reclaimable in _CGROUPS:
        found.append(_of_container(system / "sys/fs/cgroup" / limit, system / "sys/fs/cgroup" / used, reclaimable))
    known = [value for value in found if value is not None]
    return max(0, min(known)) if known else UNKNOWN


def _of_machine(path: Path) -> int | None:
    for line in _lines(path):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


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
