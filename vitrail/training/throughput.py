"""Training metrics since the last log: loss, accuracy, images per second, and time spent waiting for data."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from vitrail.distributed import SINGLE_PROCESS, Ranks
from vitrail.training.step import StepResult

Item = TypeVar("Item")


class Throughput:
    """Accumulates step results. Only `summary` reads from the device; time inside `paused` does not count."""

    def __init__(self, ranks: Ranks = SINGLE_PROCESS) -> None:
        self.ranks = ranks
        self._restart()

    def _restart(self) -> None:
        self.results: list[StepResult] = []
        self.images = 0  # of this process
        self.data_wait = 0.0  # seconds
        self.started = time.monotonic()

    def timed(self, items: Iterable[Item]) -> Iterator[Item]:
        """Iterate over `items` and measure the time spent waiting for each."""
        iterator = iter(items)
        while True:
            since = time.monotonic()
            try:
                item = next(iterator)
            except StopIteration:
                return
            waited = getattr(item, "waited", None)
            self.data_wait += time.monotonic() - since if waited is None else waited
            yield item

    def add(self, result: StepResult, images: int) -> None:
        self.results.append(result)
        self.images += images

    def summary(self) -> dict[str, float]:
        """Metrics of the steps since the last summary, without skipped ones, and the number of `skipped` steps."""
        finite = torch.stack([result.finite for result in self.results])
        norms = torch.stack([result.grad_norm for result in self.results])
        sums = torch.stack([torch.stack([r.loss, r.correct, r.weight]) for r in self.results])  # (steps, 3)
        loss, correct, weight = self.ranks.all_reduce_sum(
            torch.where(finite[:, None], sums, 0.0).sum(0).float()
        ).tolist()
        skipped = len(self.results) - int(finite.sum())
        seconds = max(time.monotonic() - self.started, 1e-9)
        row: dict[str, float] = {"skipped": skipped}
        if skipped < len(self.results):
            row["loss"] = loss / max(weight, 1e-9)
            row["grad_norm"] = float(norms[finite].mean())
            if math.isfinite(correct):
                row["accuracy"] = round(correct / max(weight, 1e-9), 6)
        row["images_per_second"] = self.images * self.ranks.world_size / seconds
        row["data_wait"] = round(min(1.0, self.data_wait / seconds), 4)
        self._restart()
        return row

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time inside the context, for validation and checkpoints."""
        since = time.monotonic()
        try:
            yield
        finally:
            self.started += time.monotonic() - since
