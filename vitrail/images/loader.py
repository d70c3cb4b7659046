"""Samples -> batches. The position in the stream of training images is one integer; everything follows from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vitrail.config import AugmentConfig, Preprocess
from vitrail.images.augment import inception_crop
from vitrail.images.decode import BadImage, decode
from vitrail.images.preprocess import crop_resize, prepare
from vitrail.images.randomness import order
from vitrail.images.scan import cores


class Source(Protocol):
    """What a split must offer: labels, and the bytes and name of each image."""

    @property
    def labels(self) -> np.ndarray: ...
    def __len__(self) -> int: ...
    def name(self, index: int) -> str: ...
    def read(self, index: int) -> bytes: ...


@dataclass
class Batch:
    pixels: Tensor  # uint8 (B, C, H, W)
    labels: Tensor  # int64 (B,)
    weights: Tensor  # float32 (B,): 0 for an image that could not be read, 1 otherwise
    epoch: Tensor  # int64 (B,)
    sample: Tensor  # int64 (B,): index in the split
    failures: list[tuple[str, str]] = field(default_factory=list)  # (name, reason) of the images with weight 0

    def __len__(self) -> int:
        return len(self.labels)

    def pin_memory(self) -> Batch:
        """torch calls this on what it does not know, so that copies to a GPU need not wait."""
        return Batch(
            self.pixels.pin_memory(),
            self.labels.pin_memory(),
            self.weights.pin_memory(),
            self.epoch,  # read on the CPU
            self.sample,
            self.failures,
        )


class Reader:
    """Decodes samples by index; keeps the decoded images when all of them fit in memory."""

    def __init__(self, source: Source, spec: Preprocess, max_pixels: int, keep: bool):
        self.source, self.spec, self.max_pixels = source, spec, max_pixels
        self.kept: dict[int, np.ndarray] | None = {} if keep else None

    def image(self, index: int) -> np.ndarray:
        """uint8 (H, W, C); raises BadImage."""
        if self.kept is not None and index in self.kept:
            return self.kept[index]
        try:
            data = self.source.read(index)
        except OSError as error:
            raise BadImage(f"cannot be read: {error.strerror or error}") from error
        spec = self.spec
        image = decode(data, channels=spec.channels, background=spec.background, max_pixels=self.max_pixels)
        if self.kept is not None:
            self.kept[index] = image
        return image


class _Batches(Dataset[Batch]):
    """Makes the batch of a step; runs in the workers."""

    def __init__(self, reader: Reader, batch_size: int):
        self.reader, self.batch_size = reader, batch_size
        self.labels = torch.from_numpy(np.asarray(reader.source.labels, dtype=np.int64))

    def samples(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """(epoch, sample) of each image of the step."""
        raise NotImplementedError

    def pixels(self, image: np.ndarray, epoch: int, sample: int) -> Tensor:
        raise NotImplementedError

    def __getitem__(self, step: int) -> Batch:
        epochs, samples = self.samples(step)
        spec = self.reader.spec
        pixels = torch.zeros(len(samples), spec.channels, *spec.size, dtype=torch.uint8)
        weights = torch.ones(len(samples))
        failures = []
        for slot, (epoch, sample) in enumerate(zip(epochs.tolist(), samples.tolist(), strict=True)):
            try:
                pixels[slot] = self.pixels(self.reader.image(sample), epoch, sample)
            except BadImage as error:
                weights[slot] = 0
                failures.append((self.reader.source.name(sample), str(error)))
        index = torch.from_numpy(samples)
        return Batch(pixels, self.labels[index], weights, torch.from_numpy(epochs), index, failures)


class _TrainingBatches(_Batches):
    """An endless stream: positions 0, 1, 2, ... run through epoch after epoch, each in its own order."""

    def __init__(self, reader: Reader, batch_size: int, augment: AugmentConfig, seed: int):
        super().__init__(reader, batch_size)
        self.augment, self.seed = augment, seed
        self.orders: dict[int, np.ndarray] = {}  # of the epochs that the current step touches

    def samples(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        size = len(self.reader.source)
        position = np.arange(step * self.batch_size, (step + 1) * self.batch_size)
        epochs, places = np.divmod(position, size)
        touched = set(epochs.tolist())
        known = {epoch: rows for epoch, rows in self.orders.items() if epoch in touched}
        self.orders = known | {epoch: order(self.seed, epoch, size) for epoch in touched - known.keys()}
        samples = np.array([self.orders[e][p] for e, p in zip(epochs.tolist(), places.tolist(), strict=True)])
        return epochs, samples

    def pixels(self, image: np.ndarray, epoch: int, sample: int) -> Tensor:
        if self.augment.crop == "none":
            return prepare(image, self.reader.spec)
        box = inception_crop(image.shape[0], image.shape[1], self.augment, self.seed, epoch, sample)
        return crop_resize(image, box, self.reader.spec)


class _EvaluationBatches(_Batches):
    """Every sample once, in order."""

    def samples(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        samples = np.arange(step * self.batch_size, min((step + 1) * self.batch_size, len(self.reader.source)))
        return np.zeros_like(samples), samples

    def pixels(self, image: np.ndarray, epoch: int, sample: int) -> Tensor:
        return prepare(image, self.reader.spec)


class Loader:
    """Batches for training steps or for evaluation, from the main process or from workers."""

    def __init__(self, batches: _Batches, workers: int | None, device: torch.device):
        self.batches, self.pin = batches, device.type == "cuda"
        # Images kept decoded are made in the main process: workers would each keep a copy.
        self.workers = workers if workers is not None else 0 if batches.reader.kept is not None else min(8, cores())

    @property
    def batch_size(self) -> int:
        return self.batches.batch_size

    def from_step(self, start: int, stop: int) -> Iterator[Batch]:
        """The batches of steps start, start+1, ..., stop-1."""
        prefetch = 4 if self.workers else None
        yield from DataLoader(
            self.batches,
            batch_size=None,
            sampler=range(start, stop),
            num_workers=self.workers,
            prefetch_factor=prefetch,
            pin_memory=self.pin,
        )

    def __len__(self) -> int:
        return -(-len(self.batches.reader.source) // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        return self.from_step(0, len(self))


def training_loader(
    reader: Reader, batch_size: int, augment: AugmentConfig, seed: int, workers: int | None, device: torch.device
) -> Loader:
    return Loader(_TrainingBatches(reader, batch_size, augment, seed), workers, device)


def evaluation_loader(reader: Reader, batch_size: int, workers: int | None, device: torch.device) -> Loader:
    return Loader(_EvaluationBatches(reader, batch_size), workers, device)
