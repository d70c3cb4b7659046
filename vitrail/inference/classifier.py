"""A loaded classifier: weights, preprocessing and class names in one object."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from vitrail.config import DataConfig, Preprocess, Size
from vitrail.data.decode import MAX_PIXELS, BadImage
from vitrail.data.files import read_file
from vitrail.data.formats import is_image_name
from vitrail.data.loader.loader import ImageBatch
from vitrail.data.loader.reader import Reader
from vitrail.data.transforms import prepare
from vitrail.errors import UserError, check_whole, reason_of
from vitrail.inference.device import choose_device, device_of
from vitrail.inference.runner import run
from vitrail.models.build import build_with
from vitrail.models.variants import size_of
from vitrail.tasks.table import prediction_task
from vitrail.tasks.task import PredictionTask
from vitrail.weights.names import local_path
from vitrail.weights.read import read_weights

if TYPE_CHECKING:
    from vitrail.weights.bundle import Card

NONE_OF_THESE = "none of these"
NOT_FINITE = "the network's answer is not finite: the weights, or their preprocessing, are unusable"
_IMAGE = "an image is a path, bytes or a uint8 array"
Image = str | Path | bytes | np.ndarray  # a file, its bytes, or decoded uint8 (H, W, C)


class GivenImages:
    """Files, bytes and decoded images, for a Reader."""

    def __init__(self, images: Sequence[Image], channels: int, first: int = 0) -> None:
        """`first`: the number of the first one, among those that the user gave."""
        for image in images:
            if isinstance(image, np.ndarray):
                _check_array(image, channels)
            elif not isinstance(image, str | Path | bytes):
                raise UserError(f"{_IMAGE}, not {type(image).__name__}")
        self.images, self.first = images, first

    def __len__(self) -> int:
        return len(self.images)

    def name(self, index: int) -> str:
        image = self.images[index]
        return str(image) if isinstance(image, str | Path) else f"image {self.first + index}"

    def read(self, index: int) -> bytes | np.ndarray:
        image = self.images[index]
        try:
            return read_file(image) if isinstance(image, str | Path) else image
        except (OSError, ValueError) as error:  # ValueError: a path that none can be
            raise BadImage(reason_of(error)) from None

    def labels_of(self, indices: np.ndarray) -> np.ndarray:
        return np.zeros(len(indices), np.int64)

    def weights_of(self, indices: np.ndarray) -> np.ndarray:
        return np.ones(len(indices), np.float32)


@dataclass(frozen=True)
class Prediction:
    label: str  # of any number of labels: all of them, with commas between
    probability: float  # of the first label; where none is given, of the likeliest class
    top: tuple[tuple[str, float], ...]  # the likeliest classes, best first
    labels: tuple[str, ...]  # one, or any number, likeliest first; none: below the threshold
    probabilities: tuple[float, ...]  # of the labels


@dataclass(frozen=True)
class Classifier:
    """The whole contract of a weights file: `net`, `preprocess`, `classes`, `card`."""

    net: nn.Module
    card: Card
    file: Path | None = None  # of vitrail, that it was read from

    @property
    def preprocess(self) -> Preprocess:
        return self.card.preprocess

    @property
    def classes(self) -> tuple[str, ...]:
        """Names in the order of the logits; weights that came without have numbers for names."""
        return self.card.classes or tuple(f"class {index}" for index in range(self.card.model.num_classes))

    @property
    def task(self) -> PredictionTask:
        return prediction_task(self.card.task, self.card.model.num_classes)

    def predict(
        self, images: Iterable[Image], *, top: int = 5, threshold: float | None = None, batch_size: int = 32
    ) -> list[Prediction]:
        """One Prediction per image, in order; below `threshold` the label is "none of these".

        If not given, the threshold is the one that `vitrail evaluate --write` found for these weights; else 0, and 1/2
        for weights that give an image any number of labels.
        """
        self.check_asked(top, threshold)
        found: list[Prediction] = []
        for given, batch, logits in self._run(self.net, images, batch_size):
            for row, answer in enumerate(self.predictions(logits, top, threshold)):
                if answer is None:
                    raise UserError(f"{given.name(int(batch.sample[row]))}: {NOT_FINITE}")
                found.append(answer)
        return found

    def embed(self, images: Iterable[Image], *, batch_size: int = 32) -> np.ndarray:
        """The features of images, what the classifier's last layer sees of them: float32 (N, D), in order."""
        forward: Callable[[Tensor], Tensor] = self.net.forward_features  # type: ignore[assignment]
        found = []
        for given, batch, features in self._run(forward, images, batch_size):
            odd = (~features.isfinite().all(dim=-1)).nonzero()
            if len(odd):
                raise UserError(f"{given.name(int(batch.sample[odd[0, 0]]))}: {NOT_FINITE}")
            found.append(features.numpy())
        if not found:
            config = self.card.model
            width = getattr(config, "representation", 0) or getattr(config, "features", config.width)
            return np.empty((0, width), np.float32)
        return np.concatenate(found)

    def _run(
        self, forward: Callable[[Tensor], Tensor], images: Iterable[Image], batch_size: int
    ) -> Iterator[tuple[GivenImages, ImageBatch, Tensor]]:
        """What `forward` gives for images, batch by batch; one that cannot be read is an error. An iterator is drawn
        from a batch at a time."""
        if isinstance(images, str | Path | bytes | np.ndarray):
            images = [images]  # one image, and not the characters of its name
        if not isinstance(images, Iterable):
            raise UserError(f"these are images, or one, and not {type(images).__name__}: {_IMAGE}")
        check_whole("batch_size", batch_size)
        if isinstance(images, Sequence):
            parts: Iterator[Sequence[Image]] = iter([images])
        else:
            rest = iter(images)
            parts = iter(lambda: list(islice(rest, batch_size)), [])
        data = DataConfig(workers=None if _may_start_processes() else 0)
        first = 0
        for part in parts:
            given = GivenImages(part, self.preprocess.channels, first)
            first += len(part)
            spec, device = self.preprocess, device_of(self.net)
            for batch, out in run(forward, given, spec, device, batch_size=batch_size, data=data):
                if batch.failures:
                    raise UserError(": ".join(batch.failures[0]))
                yield given, batch, out

    def pixels(self, image: Image) -> Tensor:
        """An image as the network's uint8 input (C, H, W)."""
        given = GivenImages([image], self.preprocess.channels)
        try:
            return prepare(Reader(given, self.preprocess, MAX_PIXELS).image(0), self.preprocess)
        except BadImage as error:
            raise UserError(f"{given.name(0)}: {error}") from None

    def chances(self, logits: Tensor) -> Tensor:
        """Probabilities (N, classes) of the network's logits, at the temperature of these weights."""
        logits = logits.float() / self.card.answering.temperature
        return self.task.probabilities(logits)

    def predictions(self, logits: Tensor, top: int, threshold: float | None) -> list[Prediction | None]:
        """What the network's logits (N, classes) say; none for an image whose probabilities are not finite, of which
        nothing can be said."""
        classes = self.classes
        chances = self.chances(logits)
        finite = (logits.isfinite() & chances.isfinite()).all(dim=-1).tolist()
        found: list[Prediction | None] = []
        for (ranked, given), sound in zip(
            self.task.predictions(chances, top, threshold, self.card.answering), finite, strict=True
        ):
            labels, probabilities = tuple(classes[i] for i, _ in given), tuple(p for _, p in given)
            words, likeliest = ", ".join(labels) or NONE_OF_THESE, (given or ranked)[0][1]
            likely = tuple((classes[i], p) for i, p in ranked)
            found.append(Prediction(words, likeliest, likely, labels, probabilities) if sound else None)
        return found

    def check_asked(self, top: int, threshold: float | None) -> None:
        if not self.classes:
            raise UserError("these weights have no classifier: train one with `vitrail train DATA --from WEIGHTS`")
        check_whole("top", top, "how many classes to show")
        if threshold is not None and not isinstance(threshold, int | float | np.number):
            raise UserError(f"threshold is a probability, from 0 to 1, not {threshold!r}")
        if threshold is not None and not 0 <= threshold <= 1:
            raise UserError(f"threshold is a probability, from 0 to 1, not {threshold:g}")


def load(spec: str | Path, *, image_size: int | Size | None = None, device: str | torch.device = "cpu") -> Classifier:
    """Weights from a file, a folder, `bundled` or `hf-hub:owner/name`, ready to predict.

    `image_size`, a side or (height, width), is for foreign weights that do not say theirs.
    """
    path = local_path(spec)
    if path is not None and is_image_name(path.name) and path.is_file():
        raise UserError(f"'{spec}' is an image, and no weights: they come first, as in vitrail predict WEIGHTS IMAGES")
    place = choose_device(device)
    weights = read_weights(spec, image_size=None if image_size is None else size_of(image_size))
    net = build_with(weights.card.model, weights.state)
    own = weights.file if weights.layout == "vitrail" else None
    return Classifier(net.to(place).eval().requires_grad_(False), weights.card, own)


def _check_array(image: np.ndarray, channels: int) -> None:
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[-1] != channels or not image.size:
        shape = "x".join(map(str, image.shape))
        raise UserError(f"an image array is uint8 height x width x {channels}, not {image.dtype} {shape}")


def _may_start_processes() -> bool:
    """Not from a thread, whose neighbours may hold a lock, nor from a process that may have no children."""
    return threading.current_thread() is threading.main_thread() and not multiprocessing.current_process().daemon
