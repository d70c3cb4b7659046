"""One way to time things side by side: turns are interleaved, so what disturbs the machine disturbs every contestant,
and a contestant is judged by the median of its per-round ratios to the first one."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch


@dataclass(frozen=True)
class Contestant:
    """A name and the work to time; everything the work needs was set up before."""

    name: str
    work: Callable[[], object]


@dataclass(frozen=True)
class Effort:
    """How long a race may take. A turn repeats the work until it is long enough for the clock."""

    seconds: float = 8.0  # of one race by its own clock, warm-up not counted
    min_rounds: int = 7  # six is the fewest that can tell anything
    max_rounds: int = 60
    turn_seconds: float = 0.05
    warmup: int = 1


class Clock(Protocol):
    """Seconds that `repeats` calls of some work take."""

    def __call__(self, work: Callable[[], object], repeats: int) -> float: ...


def wall_clock(work: Callable[[], object], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    return time.perf_counter() - start


def processor_clock(work: Callable[[], object], repeats: int) -> float:
    """Processor time of this process, which other processes on the machine do not add to. For one thread only: threads
    that wait for each other count their waiting."""
    start = time.process_time()
    for _ in range(repeats):
        work()
    return time.process_time() - start


def cuda_clock(work: Callable[[], object], repeats: int) -> float:
    """Time between two events on the device, which is idle at the first, so no rival's work is counted."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(repeats):
        work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1000


@dataclass(frozen=True)
class Spread:
    """A median with the quartiles around it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)

    def rounded(self) -> dict[str, float]:
        return {name: float(f"{value:.5g}") for name, value in vars(self).items()}


@dataclass(frozen=True)
class Race:
    """Seconds per call of each contestant, one a round. The others are held to the first contestant."""

    seconds: dict[str, list[float]]

    @property
    def first(self) -> str:
        return next(iter(self.seconds))

    @property
    def rounds(self) -> int:
        return len(self.seconds[self.first])

    def time(self, name: str) -> Spread:
        return Spread.of(self.seconds[name])

    def ratios(self, name: str) -> list[float]:
        """How many times as long as the first contestant it took, round by round; above 1: the first was faster."""
        pairs = zip(self.seconds[name], self.seconds[self.first], strict=True)
        return [theirs / ours for theirs, ours in pairs]

    def ratio(self, name: str) -> Spread:
        return Spread.of(self.ratios(name))

    def verdict(self, name: str) -> Literal["ahead", "even", "behind"]:
        """Where the first contestant stands, by sign test: ahead or behind only when it won or lost so many rounds as
        an equal would in fewer than one race of forty."""
        ratios = self.ratios(name)
        wins, losses = sum(ratio > 1 for ratio in ratios), sum(ratio < 1 for ratio in ratios)
        if luck(max(wins, losses), len(ratios)) >= 1 / 40:
            return "even"
        return "ahead" if wins > losses else "behind"

    def summary(self) -> dict[str, Any]:
        contestants: dict[str, Any] = {name: {"seconds": self.time(name).rounded()} for name in self.seconds}
        for name in list(self.seconds)[1:]:
            contestants[name] |= {"ratio": self.ratio(name).rounded(), self.first: self.verdict(name)}
        return {"rounds": self.rounds, "contestants": contestants}


def luck(heads: int, throws: int) -> float:
    """How likely a fair coin shows at least so many heads."""
    return sum(math.comb(throws, count) for count in range(heads, throws + 1)) / 2**throws


def race(contestants: Sequence[Contestant], effort: Effort, clock: Clock) -> Race:
    """Time the contestants turn by turn, in an order that changes every round."""
    seconds: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
    with no_garbage_collection():
        for contestant in contestants:
            clock(contestant.work, effort.warmup)
        repeats, rounds = plan([clock(contestant.work, 1) for contestant in contestants], effort)
        for number in range(rounds):
            for contestant in order(contestants, number):
                seconds[contestant.name].append(clock(contestant.work, repeats) / repeats)
            gc.collect()
    return Race(seconds)


def plan(once: Sequence[float], effort: Effort) -> tuple[int, int]:
    """Calls per turn and rounds, from the time of one call of each contestant. All get the same number of calls."""
    repeats = max(1, math.ceil(effort.turn_seconds / max(once[0], 1e-9)))
    rounds = int(effort.seconds / max(repeats * sum(once), 1e-9))
    return repeats, min(max(rounds, effort.min_rounds), effort.max_rounds)


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
