"""Small data kept where it is used: every image made once, on the device, and batches picked from there.

For crops that take each image as evaluation does, so that all that differs from epoch to epoch happens on the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from vitrail.data.loader.loader import EvaluationLoader, ImageBatch
from vitrail.data.loader.sampler import TrainingSampler
from vitrail.data.to_device import on_device


class ResidentLoader:
    """The batches that a Loader would make, of the images that `images` reads through once."""

    def __init__(self, images: EvaluationLoader, order: TrainingSampler) -> None:
        self.images, self.order = images, order
        self.kept: ImageBatch | None = None

    def from_step(self, start: int, stop: int, together: int = 1) -> Iterator[ImageBatch]:
        """The batches of steps start, ..., stop-1; `together` of them, one after the other in one batch, cost a GPU's
        host little more than one."""
        kept = self.kept = self.kept or self._read()
        failed = dict(kept.failures)
        names = self.images.reader.source.name
        for first in range(start, stop, together):
            rows = [self.order(step) for step in range(first, min(first + together, stop))]
            sample = torch.from_numpy(np.concatenate([row.samples for row in rows]))
            index = on_device(sample.numpy(), kept.pixels.device)
            own = np.concatenate([row.samples[self.order.extra :] for row in rows]).tolist() if failed else []
            yield ImageBatch(
                kept.pixels[index],
                kept.labels[sample],
                kept.weights[sample],
                torch.from_numpy(np.concatenate([row.epochs for row in rows])),
                sample,
                torch.from_numpy(np.concatenate([row.positions for row in rows])),
                [(name, failed[name]) for name in map(names, own) if name in failed],
                self.order.extra,
            )

    def _read(self) -> ImageBatch:
        """All images of the split as one batch."""
        device, source = self.images.device, self.images.reader.source
        pixels = torch.empty(len(source), *self.images.shape, dtype=torch.uint8, device=device)
        readable = torch.zeros(len(source), dtype=torch.bool)
        failures, first = [], None
        for batch in self.images:
            first = first or batch
            pixels[batch.sample.to(device)] = batch.pixels.to(device)
            readable[batch.sample] = batch.weights > 0
            failures += batch.failures
        assert first is not None
        every = np.arange(len(source))
        labels = torch.from_numpy(np.ascontiguousarray(source.labels_of(every)))
        weights = torch.from_numpy(np.array(source.weights_of(every), np.float32)) * readable
        return replace(first, pixels=pixels, labels=labels, weights=weights, failures=failures)
