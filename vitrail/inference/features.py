"""Feature extraction with a frozen network, cached on disk and shared among processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from vitrail.data.samples import Samples
from vitrail.data.splits import group_ids
from vitrail.distributed import Ranks
from vitrail.errors import UserError
from vitrail.inference.classifier import Classifier
from vitrail.inference.device import deterministic, device_of
from vitrail.inference.feature_cache import PART_SIZE, FeatureCache
from vitrail.inference.runner import check_finite, forward_batches
from vitrail.interrupt import Interrupts
from vitrail.terminal import escape

BATCH = 64


@dataclass(frozen=True)
class Features:
    """The features of a split, without the images that cannot be read."""

    cache: FeatureCache
    samples: Samples
    interrupts: Interrupts

    def take(self, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        """Features and labels of some images, in order."""
        values, cached = self.cache.take(self.samples.digests[rows])
        return torch.from_numpy(values), torch.from_numpy(self.samples.labels[rows][cached])

    def groups(self, rows: np.ndarray) -> np.ndarray:
        """The group of each image that `take` returns for these rows."""
        _, cached = self.cache.take(self.samples.digests[rows])
        return group_ids(self.samples, rows[cached])

    def parts(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Iterate over features and labels of all images, one cache file at a time."""
        for rows, values in self.cache.rows(self.samples.digests):
            self.interrupts.check()
            yield torch.from_numpy(values), torch.from_numpy(self.samples.labels[rows])


class FeatureExtractor:
    """Computes the features of images that are not in the cache."""

    def __init__(self, classifier: Classifier, console: Console, interrupts: Interrupts, ranks: Ranks) -> None:
        self.net, self.spec = classifier.net, classifier.preprocess
        self.forward: Callable[[Tensor], Tensor] = self.net.forward_features
        self.console, self.interrupts, self.ranks = console, interrupts, ranks
        self.cache = FeatureCache.for_network(self.net, self.spec, device_of(self.net))

    def extract(self, samples: Samples, rows: np.ndarray | None = None, what: str = "") -> Features:
        """Compute missing features of a split, or of some of its rows. All processes must call this."""
        rows = np.arange(len(samples)) if rows is None else np.unique(rows)
        todo = self.ranks.broadcast(lambda: rows[self.cache.missing(samples.digests[rows])])
        if len(todo):
            self._run(samples.subset(todo), what)
            self.ranks.all_gather(None)  # wait until all processes have written their features
            left = self.ranks.broadcast(lambda: len(self.cache.missing(samples.digests[todo])))
            if left == len(todo):
                raise UserError(
                    f"no features for any of the {left:,} images of {what}: check that they and the cache can be read"
                )
            if left:
                self.console.print(f"[dim]{left:,} images of {escape(what)} could not be read and are skipped[/]")
        return Features(self.cache, samples, self.interrupts)

    def _run(self, samples: Samples, what: str) -> None:
        """Compute features and write them to the cache in parts."""
        device = device_of(self.net)
        unwritten: list[tuple[np.ndarray, np.ndarray]] = []

        def write() -> None:
            if sum(len(digests) for digests, _ in unwritten):
                digests, values = zip(*unwritten, strict=True)
                self.cache.add(np.concatenate(digests), np.concatenate(values))
            unwritten.clear()

        try:
            with deterministic(device), self._bar(what, -(-len(samples) // self.ranks.world_size)) as progress:
                outputs = forward_batches(
                    self.forward,
                    samples,
                    self.spec,
                    device,
                    batch_size=BATCH,
                    interrupts=self.interrupts,
                    ranks=self.ranks,
                    progress=progress,
                )
                for batch, out in outputs:
                    readable = batch.weights > 0
                    values, rows = out[readable], batch.sample[readable]
                    check_finite(values, rows, samples)
                    unwritten.append((samples.digests[rows.numpy()], values.numpy()))
                    if sum(len(digests) for digests, _ in unwritten) >= PART_SIZE:
                        write()
        finally:
            write()

    @contextmanager
    def _bar(self, what: str, images: int) -> Iterator[Callable[[int], None]]:
        with Progress(console=self.console, transient=True, disable=not self.console.is_terminal) as bar:
            task = bar.add_task(f"features of {escape(what)}", total=images)
            yield lambda done: bar.update(task, completed=done)
