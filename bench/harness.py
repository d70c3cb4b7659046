"""Compare the run times of several implementations.

Calls are interleaved, so other load on the machine affects all candidates alike. The result of a candidate is the
median of its per-round ratios to the first candidate.
"""

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
class Candidate:
    """A named function to time. Its setup is done before."""

    name: str
    work: Callable[[], object]


@dataclass(frozen=True)
class Effort:
    """The duration of a comparison."""

    seconds: float = 8.0  # in total, measured by the clock of the comparison, without warm-up
    min_rounds: int = 7  # fewer than six cannot be significant
    max_rounds: int = 60
    turn_seconds: float = 0.05  # a turn repeats the work for at least this long
    warmup: int = 1


class Clock(Protocol):
    """Return the seconds that `repeats` calls of `work` take."""

    def __call__(self, work: Callable[[], object], repeats: int) -> float: ...


def wall_clock(work: Callable[[], object], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    return time.perf_counter() - start


def processor_clock(work: Callable[[], object], repeats: int) -> float:
    """CPU time of this process, which is independent of other processes. For one thread only: the time that threads
    wait for each other is counted."""
    start = time.process_time()
    for _ in range(repeats):
        work()
    return time.process_time() - start


def cuda_clock(work: Callable[[], object], repeats: int) -> float:
    """Time between two CUDA events. The device is idle at the first, so no earlier work is counted."""
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
    """Median and quartiles."""

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
class Comparison:
    """Seconds per call of each candidate, one value per round. The first candidate is the reference."""

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
        """Time of a candidate relative to the first, per round; above 1: the first was faster."""
        pairs = zip(self.seconds[name], self.seconds[self.first], strict=True)
        return [seconds / reference for seconds, reference in pairs]

    def ratio(self, name: str) -> Spread:
        return Spread.of(self.ratios(name))

    def verdict(self, name: str) -> Literal["ahead", "even", "behind"]:
        """Whether the first candidate is ahead of `name`, by a sign test over the rounds (one-sided p < 1/40)."""
        ratios = self.ratios(name)
        wins, losses = sum(ratio > 1 for ratio in ratios), sum(ratio < 1 for ratio in ratios)
        if binomial_tail(max(wins, losses), len(ratios)) >= 1 / 40:
            return "even"
        return "ahead" if wins > losses else "behind"

    def summary(self) -> dict[str, Any]:
        candidates: dict[str, Any] = {name: {"seconds": self.time(name).rounded()} for name in self.seconds}
        for name in list(self.seconds)[1:]:
            candidates[name] |= {"ratio": self.ratio(name).rounded(), self.first: self.verdict(name)}
        return {"rounds": self.rounds, "contestants": candidates}


def binomial_tail(heads: int, throws: int) -> float:
    """Probability that a fair coin shows at least `heads` heads in `throws` throws."""
    return sum(math.comb(throws, count) for count in range(heads, throws + 1)) / 2**throws


def compare(candidates: Sequence[Candidate], effort: Effort, clock: Clock) -> Comparison:
    """Time the candidates in turns, in an order that changes every round."""
    seconds: dict[str, list[float]] = {candidate.name: [] for candidate in candidates}
    with no_garbage_collection():
        for candidate in candidates:
            clock(candidate.work, effort.warmup)
        repeats, rounds = plan([clock(candidate.work, 1) for candidate in candidates], effort)
        for number in range(rounds):
            for candidate in order(candidates, number):
                seconds[candidate.name].append(clock(candidate.work, repeats) / repeats)
            gc.collect()
    return Comparison(seconds)


def plan(once: Sequence[float], effort: Effort) -> tuple[int, int]:
    """Return calls per turn and number of rounds, from the time of one call of each candidate."""
    repeats = max(1, math.ceil(effort.turn_seconds / max(once[0], 1e-9)))
    rounds = int(effort.seconds / max(repeats * sum(once), 1e-9))
    return repeats, min(max(rounds, effort.min_rounds), effort.max_rounds)


def order(candidates: Sequence[Candidate], number: int) -> list[Candidate]:
    """The candidates in the order of a round: rotated by one each round and reversed every other cycle, so that none
    always follows the same other one."""
    lap, shift = divmod(number, len(candidates))
    rotated = [*candidates[shift:], *candidates[:shift]]
    return rotated[::-1] if lap % 2 else rotated


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
