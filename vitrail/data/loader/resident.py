"""Loader for small data: all images are preprocessed once and kept on the device, and batches are gathered there.

For crops that use the full image, so that all random augmentation happens on the device.
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
    """Gives the same batches as Loader, from images that are read once through `images`."""

    def __init__(self, images: EvaluationLoader, sampler: TrainingSampler) -> None:
        self.images, self.sampler = images, sampler
        self.dataset: ImageBatch | None = None

    def from_step(self, start: int, stop: int, merge: int = 1) -> Iterator[ImageBatch]:
        """Yield the batches of steps start, ..., stop-1, with `merge` steps concatenated into one batch.

        On a GPU, a merged batch costs the host little more than a single one.
        """
        dataset = self.dataset = self.dataset or self._read()
        failed = dict(dataset.failures)
        names = self.images.reader.source.name
        for first in range(start, stop, merge):
            rows = [self.sampler(step) for step in range(first, min(first + merge, stop))]
            sample = torch.from_numpy(np.concatenate([row.samples for row in rows]))
            index = on_device(sample.numpy(), dataset.pixels.device)
            own_rows = np.concatenate([row.samples[self.sampler.overlap :] for row in rows]).tolist() if failed else []
            yield ImageBatch(
                dataset.pixels[index],
                dataset.labels[sample],
                dataset.weights[sample],
                torch.from_numpy(np.concatenate([row.epochs for row in rows])),
                sample,
                torch.from_numpy(np.concatenate([row.positions for row in rows])),
                [(name, failed[name]) for name in map(names, own_rows) if name in failed],
                self.sampler.overlap,
            )

    def _read(self) -> ImageBatch:
        """Read all images of the split as one batch."""
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
        indices = np.arange(len(source))
        labels = torch.from_numpy(np.ascontiguousarray(source.labels_of(indices)))
        weights = torch.from_numpy(np.array(source.weights_of(indices), np.float32)) * readable
        return replace(first, pixels=pixels, labels=labels, weights=weights, failures=failures)
