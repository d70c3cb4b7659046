"""A frozen network and images -> features, kept on disk; any number of processes share the work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from vitrail.config import DataConfig
from vitrail.data.loader.loader import Place, evaluation_loader
from vitrail.data.loader.reader import Reader
from vitrail.data.samples import Samples
from vitrail.data.splits import groups_of
from vitrail.distributed import Ranks
from vitrail.errors import UserError
from vitrail.inference.classifier import Classifier
from vitrail.inference.device import repeatable
from vitrail.inference.feature_cache import PART, FeatureCache
from vitrail.inference.forward import device_of, run_network
from vitrail.interrupt import Interrupts
from vitrail.terminal import escape

BATCH = 64


@dataclass(frozen=True)
class Features:
    """Of one split: those of the images that could be read."""

    cache: FeatureCache
    samples: Samples
    interrupts: Interrupts

    def take(self, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        """Features and labels of some images, in their order."""
        values, found = self.cache.take(self.samples.digests[rows])
        return torch.from_numpy(values), torch.from_numpy(self.samples.labels[rows][found])

    def groups(self, rows: np.ndarray) -> np.ndarray:
        """What belongs together among the images that `take` gives for these rows."""
        _, found = self.cache.take(self.samples.digests[rows])
        return groups_of(self.samples, rows[found])

    def parts(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Features and labels of all images, a part at a time."""
        for rows, values in self.cache.rows(self.samples.digests):
            self.interrupts.check()
            yield torch.from_numpy(values), torch.from_numpy(self.samples.labels[rows])


class Extractor:
    """Runs a network over images whose features are not known yet."""

    def __init__(self, classifier: Classifier, console: Console, interrupts: Interrupts, ranks: Ranks) -> None:
        self.net, self.spec = classifier.net, classifier.preprocess
        self.forward: Callable[[Tensor], Tensor] = self.net.forward_features  # type: ignore[assignment]
        self.console, self.interrupts, self.ranks = console, interrupts, ranks
        self.cache = FeatureCache.of(self.net, self.spec, device_of(self.net))

    def of(self, samples: Samples, rows: np.ndarray | None = None, what: str = "") -> Features:
        """Make sure that the images, or some rows of them, have features; all processes call this together."""
        rows = np.arange(len(samples)) if rows is None else np.unique(rows)
        todo = self.ranks.share(lambda: rows[self.cache.missing(samples.digests[rows])])
        if len(todo):
            self._run(samples.subset(todo), what)
            self.ranks.gather(None)  # until all have written theirs
            left = self.ranks.share(lambda: len(self.cache.missing(samples.digests[todo])))
            if left == len(todo):
                raise UserError(f"none of the {left:,} images of {what} gave features: can they and the cache be read?")
            if left:
                self.console.print(f"[dim]{left:,} images of {escape(what)} could not be read and are left out[/]")
        return Features(self.cache, samples, self.interrupts)

    @torch.no_grad()
    def _run(self, samples: Samples, what: str) -> None:
        ranks, device, data = self.ranks, device_of(self.net), DataConfig()
        place = Place(ranks.rank, ranks.world, ranks.beside)
        loader = evaluation_loader(Reader(samples, self.spec, data.max_pixels), BATCH, data.workers, device, place)
        with repeatable(device), self._bar(what, len(loader)) as advance, _Kept(self.cache) as kept:
            for batch in loader:
                out = run_network(self.forward, [batch], self.spec, device).check_finite(samples)
                kept.add(samples.digests[out.sample.numpy()], out.values.numpy())
                advance()
                self.interrupts.check(ranks)

    @contextmanager
    def _bar(self, what: str, steps: int) -> Iterator[Callable[[], None]]:
        with Progress(console=self.console, transient=True, disable=not self.console.is_terminal) as bar:
            task = bar.add_task(f"features of {escape(what)}", total=steps)
            yield lambda: bar.advance(task)


class _Kept:
    """Features on their way to the disk; also those of a run that is stopped get there."""

    def __init__(self, cache: FeatureCache) -> None:
        self.cache = cache
        self.held: list[tuple[np.ndarray, np.ndarray]] = []

    def add(self, digests: np.ndarray, values: np.ndarray) -> None:
        self.held.append((digests, values))
        if sum(len(part) for part, _ in self.held) >= PART:
            self._write()

    def _write(self) -> None:
        digests, values = zip(*self.held, strict=True)
        self.held = []
        if sum(map(len, digests)):
            self.cache.add(np.concatenate(digests), np.concatenate(values))

    def __enter__(self) -> _Kept:
        return self

    def __exit__(self, *_: object) -> None:
        if self.held:
            self._write()
