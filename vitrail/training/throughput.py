"""How training goes, since the last log: loss, accuracy, speed, and the time without data."""

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
    """Nothing is read from the device before `summary`. Time spent on anything but training does not count."""

    def __init__(self, ranks: Ranks = SINGLE_PROCESS) -> None:
        self.ranks = ranks
        self._restart()

    def _restart(self) -> None:
        self.done: list[StepResult] = []
        self.images = 0  # of this process
        self.waited = 0.0  # seconds
        self.started = time.monotonic()

    def waiting(self, items: Iterable[Item]) -> Iterator[Item]:
        """The items, with the time until each is there counted as waiting."""
        upcoming = iter(items)
        while True:
            since = time.monotonic()
            try:
                item = next(upcoming)
            except StopIteration:
                return
            waited = getattr(item, "waited", None)
            self.waited += time.monotonic() - since if waited is None else waited
            yield item

    def add(self, done: StepResult, images: int) -> None:
        self.done.append(done)
        self.images += images

    def summary(self) -> dict[str, float]:
        """Of the steps that were not skipped; and how many were."""
        finite = torch.stack([done.finite for done in self.done])
        norms = torch.stack([done.norm for done in self.done])
        sums = torch.stack([torch.stack([done.loss, done.correct, done.weight]) for done in self.done])  # (steps, 3)
        loss, correct, weight = self.ranks.all_reduce_sum(
            torch.where(finite[:, None], sums, 0.0).sum(0).float()
        ).tolist()
        skipped = len(self.done) - int(finite.sum())
        norm = float(norms[finite].mean()) if skipped < len(self.done) else float("nan")
        seconds = max(time.monotonic() - self.started, 1e-9)
        row: dict[str, float] = {"skipped": skipped}
        if skipped < len(self.done):
            row |= {
                "loss": loss / max(weight, 1e-9),
                "grad_norm": norm,
            }
            row |= {"accuracy": round(correct / max(weight, 1e-9), 6)} if math.isfinite(correct) else {}
        row |= {
            "images_per_second": self.images * self.ranks.world_size / seconds,
            "data_wait": round(min(1.0, self.waited / seconds), 4),
        }
        self._restart()
        return row

    @contextmanager
    def paused(self) -> Iterator[None]:
        since = time.monotonic()
        try:
            yield
        finally:
            self.started += time.monotonic() - since
