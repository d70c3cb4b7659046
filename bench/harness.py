"""One way to time things side by side: rounds are interleaved, so what disturbs the machine disturbs every contestant,
and a contestant is judged by the median of its per-round ratios to the first one."""

from __future__ import annotations

import gc
import json
import math
import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import torch

RESULTS = Path(__file__).parent / "results"
PACKAGES = ["torch", "timm", "transformers", "torchvision", "numpy", "triton"]


@dataclass(frozen=True)
class Contestant:
    """A name and the work to time; everything the work needs was set up before."""

    name: str
    work: Callable[[], object]


@dataclass(frozen=True)
class Effort:
    """How long a race may take. A turn repeats the work until it is long enough for the clock."""

    seconds: float = 15.0  # of one race, warm-up not counted
    min_rounds: int = 5
    max_rounds: int = 60
    turn_seconds: float = 0.05
    warmup: int = 2


class Clock(Protocol):
    """Seconds that `repeats` calls of some work take."""

    def __call__(self, work: Callable[[], object], repeats: int) -> float: ...


def wall_clock(work: Callable[[], object], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    return time.perf_counter() - start


def cuda_clock(work: Callable[[], object], repeats: int) -> float:
    """Device time between two events; the device is idle before, so no other contestant's work is counted."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(repeats):
        work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1000


CLOCKS: dict[str, Clock] = {"cpu": wall_clock, "cuda": cuda_clock}


@dataclass(frozen=True)
class Spread:
    """A median with the quartiles around it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if len(values) < 2:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True)
class Race:
    """Seconds per call of each contestant, one value a round; the first contestant is the one the others are held to."""

    seconds: dict[str, list[float]]

    @property
    def first(self) -> str:
        return next(iter(self.seconds))

    def time(self, name: str) -> Spread:
        return Spread.of(self.seconds[name])

    def ratio(self, name: str) -> Spread:
        """How many times as long as the first contestant; above 1: the first is faster."""
        return Spread.of(
            [theirs / ours for ours, theirs in zip(self.seconds[self.first], self.seconds[name], strict=True)]
        )

    def verdict(self, name: str) -> str:
        """Of the first contestant: ahead or behind only when the whole middle half of the rounds says so."""
        ratio = self.ratio(name)
        return "ahead" if ratio.low > 1 else "behind" if ratio.high < 1 else "even"

    def summary(self) -> dict[str, Any]:
        rows: dict[str, Any] = {"rounds": len(self.seconds[self.first]), "contestants": {}}
        for name in self.seconds:
            rows["contestants"][name] = {"seconds": vars(self.time(name)), "ratio": vars(self.ratio(name))}
        return rows


def race(contestants: Sequence[Contestant], effort: Effort, clock: Clock) -> Race:
    """Time the contestants turn by turn, in an order that changes every round."""
    with no_garbage_collection():
        for contestant in contestants:
            clock(contestant.work, effort.warmup)
        once = [clock(contestant.work, 1) for contestant in contestants]
        repeats = max(1, math.ceil(effort.turn_seconds / max(once[0], 1e-9)))
        rounds = int(effort.seconds / max(repeats * sum(once), 1e-9))
        rounds = min(max(rounds, effort.min_rounds), effort.max_rounds)
        seconds: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
        for number in range(rounds):
            for contestant in order(contestants, number):
                seconds[contestant.name].append(clock(contestant.work, repeats) / repeats)
            gc.collect()
    return Race(seconds)


def order(contestants: Sequence[Contestant], number: int) -> list[Contestant]:
    """Rotated by one each round, and reversed every other lap, so that nobody always follows the same rival."""
    lap, shift = divmod(number, len(contestants))
    rotated = [*contestants[shift:], *contestants[:shift]]
    return rotated[::-1] if lap % 2 else rotated


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def machine_facts(device: str) -> dict[str, Any]:
    """What a reader needs to judge or repeat a number."""
    facts: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := installed(name))},
    }
    if device == "cuda":
        facts["gpu"] = torch.cuda.get_device_name()
        facts["cuda"] = torch.version.cuda
    return facts


def cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine()


def installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def write_results(name: str, device: str, results: dict[str, Any], folder: Path = RESULTS) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{device}.json"
    path.write_text(json.dumps(results, indent=1) + "\n")
    return path
