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
from torch import Tensor

from vitrail.config import DataConfig, Preprocess, Size
from vitrail.data.decode import MAX_PIXELS, BadImage
from vitrail.data.formats import is_image_name
from vitrail.data.loader.loader import ImageBatch
from vitrail.data.loader.reader import Reader
from vitrail.data.transforms import eval_transform, normalise
from vitrail.errors import UserError, check_integer, warn_once
from vitrail.inference.device import choose_device, device_of
from vitrail.inference.image_list import IMAGE, Image, ImageList
from vitrail.inference.runner import forward_batches
from vitrail.models.build import Network, build_from_state_dict
from vitrail.models.variants import parse_image_size
from vitrail.tasks.table import prediction_task
from vitrail.tasks.task import PredictionTask
from vitrail.weights.names import local_path
from vitrail.weights.read import read_weights

if TYPE_CHECKING:
    from vitrail.weights.bundle import Card

NONE_OF_THESE = "none of these"
NONFINITE_OUTPUT = "the network's answer is not finite: the weights, or their preprocessing, are unusable"


@dataclass(frozen=True)
class Prediction:
    """What a classifier says of one image."""

    label: str  # of any number of labels: all of them, with commas between
    probability: float  # of the first label; where none is given, of the likeliest class
    top: tuple[tuple[str, float], ...]  # the likeliest classes, best first
    labels: tuple[str, ...]  # one, or any number, likeliest first; none: below the threshold
    probabilities: tuple[float, ...]  # of the labels


@dataclass(frozen=True)
class Classifier:
    """A network with all that is needed to use it: what `vitrail.load` returns. Threads may share one.

    Attributes
    ----------
    net
        The torch module, in evaluation mode. It takes normalised pixels (B, C, H, W) and returns logits (B, classes).
    card
        What the weights file says about itself: the network's config, the recipe, the data, metrics, source, licence.
    file
        The weights file in vitrail's layout that it was read from; None for other layouts.
    spec
        What `vitrail.load` was asked for.
    preprocess
        How an image becomes the network's input: size, resize, interpolation, mean, std.
    classes
        The names of the classes in the order of the logits. Weights without names have "class 0", "class 1", ...

    Examples
    --------
    >>> clf = vitrail.load("runs/photos")
    >>> clf.predict(["new.jpg"])[0].label
    """

    net: Network
    card: Card
    file: Path | None = None
    spec: str | Path = "weights"

    @property
    def preprocess(self) -> Preprocess:
        """How an image becomes the network's input: size, resize, interpolation, mean, std."""
        return self.card.preprocess

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes in the order of the logits. Weights without names have "class 0", "class 1", ..."""
        return self.card.classes or tuple(f"class {index}" for index in range(self.card.model.num_classes))

    @property
    def task(self) -> PredictionTask:
        """How logits become labels: one or any number for an image."""
        return prediction_task(self.card.task, self.card.model.num_classes)

    def predict(
        self, images: Iterable[Image], *, top: int = 5, threshold: float | None = None, batch_size: int = 32
    ) -> list[Prediction]:
        """Label images.

        Parameters
        ----------
        images
            Paths, bytes of image files, or uint8 arrays (height, width, channels); or one of these. An iterator is read
            batch by batch.
        top
            How many classes to list for each image.
        threshold
            Below this probability the label is "none of these". If None, the threshold that `vitrail evaluate --write`
            found for these weights; else 0, and 0.5 for weights that give an image any number of labels.
        batch_size
            How many images go through the network at once.

        Returns
        -------
        list of Prediction
            In order, each with label, probability, top, labels and probabilities.

        Raises
        ------
        UserError
            If an image cannot be read. `vitrail.predict` goes on instead.

        Examples
        --------
        >>> clf.predict(["new.jpg"], top=2)[0].top
        """
        self.check_options(top, threshold)
        found: list[Prediction] = []
        for given, batch, logits in self._run(self.net, images, batch_size):
            for row, answer in enumerate(self.predictions(logits, top, threshold)):
                if answer is None:
                    raise UserError(f"{given.name(int(batch.sample[row]))}: {NONFINITE_OUTPUT}")
                found.append(answer)
        return found

    def embed(self, images: Iterable[Image], *, batch_size: int = 32) -> np.ndarray:
        """Compute the features of images: what the last layer of the classifier sees of them.

        Parameters
        ----------
        images
            The same as for `predict`.
        batch_size
            How many images go through the network at once.

        Returns
        -------
        ndarray of float32
            (N, D), in order.

        Examples
        --------
        >>> clf.embed(["new.jpg"]).shape
        """
        found = []
        for given, batch, features in self._run(self.net.forward_features, images, batch_size):
            odd = (~features.isfinite().all(dim=-1)).nonzero()
            if len(odd):
                raise UserError(f"{given.name(int(batch.sample[odd[0, 0]]))}: {NONFINITE_OUTPUT}")
            found.append(features.numpy())
        if not found:
            config = self.card.model
            width = getattr(config, "representation", 0) or getattr(config, "features", config.width)
            return np.empty((0, width), np.float32)
        return np.concatenate(found)

    def _run(
        self, forward: Callable[[Tensor], Tensor], images: Iterable[Image], batch_size: int
    ) -> Iterator[tuple[ImageList, ImageBatch, Tensor]]:
        """What `forward` gives for images, batch by batch; one that cannot be read is an error. An iterator is drawn
        from a batch at a time."""
        images = _as_images(images)
        check_integer("batch_size", batch_size)
        if isinstance(images, Sequence):
            parts: Iterator[Sequence[Image]] = iter([images])
        else:
            rest = iter(images)
            parts = iter(lambda: list(islice(rest, batch_size)), [])
        data = DataConfig(workers=None if _may_start_processes() else 0)
        first = 0
        for part in parts:
            given = ImageList(part, self.preprocess.channels, first)
            first += len(part)
            spec, device = self.preprocess, device_of(self.net)
            for batch, out in forward_batches(forward, given, spec, device, batch_size=batch_size, data=data):
                if batch.failures:
                    raise UserError(": ".join(batch.failures[0]))
                yield given, batch, out

    def pixels(self, image: Image) -> Tensor:
        """Read one image and resize it for the network; not yet normalised.

        Parameters
        ----------
        image
            A path, bytes, or a uint8 array (height, width, channels).

        Returns
        -------
        Tensor of uint8
            (C, H, W), on the CPU.

        Examples
        --------
        >>> clf.pixels("new.jpg").shape
        """
        given = ImageList([image], self.preprocess.channels)
        try:
            return eval_transform(Reader(given, self.preprocess, MAX_PIXELS).image(0), self.preprocess)
        except BadImage as error:
            raise UserError(f"{given.name(0)}: {error}") from None

    def inputs(self, images: Iterable[Image]) -> Tensor:
        """Prepare images for `net`: read, resized and normalised, on its device.

        Parameters
        ----------
        images
            The same as for `predict`. All are held in memory at once.

        Returns
        -------
        Tensor of float32
            (N, C, H, W).

        Examples
        --------
        >>> logits = clf.net(clf.inputs(["new.jpg"]))
        """
        pixels = [self.pixels(image) for image in _as_images(images)]
        if not pixels:
            return torch.empty(0, self.preprocess.channels, *self.preprocess.size, device=device_of(self.net))
        return normalise(torch.stack(pixels).to(device_of(self.net)), self.preprocess)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Turn logits into probabilities, at the temperature of these weights.

        Parameters
        ----------
        logits
            (N, classes), as `net` returns them.

        Returns
        -------
        Tensor of float32
            (N, classes). Each row adds up to 1, except for weights that give an image any number of labels.

        Examples
        --------
        >>> clf.probabilities(clf.net(clf.inputs(["new.jpg"])))
        """
        logits = logits.float() / self.card.postprocess.temperature
        return self.task.probabilities(logits)

    def chances(self, logits: Tensor) -> Tensor:
        """The old name of `probabilities`."""
        warn_once("Classifier.chances", "Classifier.probabilities")
        return self.probabilities(logits)

    def predictions(self, logits: Tensor, top: int, threshold: float | None) -> list[Prediction | None]:
        """What the network's logits (N, classes) say; none for an image whose probabilities are not finite, of which
        nothing can be said."""
        classes = self.classes
        chances = self.probabilities(logits)
        finite = (logits.isfinite() & chances.isfinite()).all(dim=-1).tolist()
        found: list[Prediction | None] = []
        for (ranked, given), sound in zip(
            self.task.predictions(chances, top, threshold, self.card.postprocess), finite, strict=True
        ):
            labels, probabilities = tuple(classes[i] for i, _ in given), tuple(p for _, p in given)
            words, likeliest = ", ".join(labels) or NONE_OF_THESE, (given or ranked)[0][1]
            likely = tuple((classes[i], p) for i, p in ranked)
            found.append(Prediction(words, likeliest, likely, labels, probabilities) if sound else None)
        return found

    def check_options(self, top: int, threshold: float | None) -> None:
        if not self.classes:
            raise UserError("these weights have no classifier: train one with `vitrail train DATA --from WEIGHTS`")
        check_integer("top", top, "the number of classes to return")
        if threshold is not None and not isinstance(threshold, int | float | np.number):
            raise UserError(f"threshold is a probability, from 0 to 1, not {threshold!r}")
        if threshold is not None and not 0 <= threshold <= 1:
            raise UserError(f"threshold is a probability, from 0 to 1, not {threshold:g}")


def load(spec: str | Path, *, image_size: int | Size | None = None, device: str | torch.device = "cpu") -> Classifier:
    """Load weights with their preprocessing and class names, ready to predict.

    Parameters
    ----------
    spec
        A weights file, a run folder, "bundled", or "hf-hub:owner/name". Files of timm, transformers and the original
        code are read, too.
    image_size
        A side in pixels, or (height, width), for weights of other libraries that do not state it.
    device
        "cpu", "cuda", "mps", or "auto" for the best there is.

    Returns
    -------
    Classifier
        With the methods predict, embed, pixels, inputs and probabilities, and net, preprocess, classes and card.

    Examples
    --------
    >>> clf = vitrail.load("runs/photos", device="auto")
    """
    path = local_path(spec)
    if path is not None and is_image_name(path.name) and path.is_file():
        raise UserError(f"'{spec}' is an image, and no weights: they come first, as in vitrail predict WEIGHTS IMAGES")
    place = choose_device(device)
    weights = read_weights(spec, image_size=None if image_size is None else parse_image_size(image_size))
    net = build_from_state_dict(weights.card.model, weights.state)
    own = weights.file if weights.layout == "vitrail" else None
    return Classifier(net.to(place).eval().requires_grad_(False), weights.card, own, spec)


def as_classifier(
    weights: str | Path | Classifier, image_size: int | Size | None = None, device: str | torch.device = "auto"
) -> Classifier:
    """The Classifier of `weights`, which may be one already: that is used as it is."""
    if not isinstance(weights, Classifier):
        return load(weights, image_size=image_size, device=device)
    if image_size is not None or device != "auto":
        raise UserError("a loaded Classifier has its image_size and device: give them to vitrail.load instead")
    return weights


def _as_images(images: Iterable[Image]) -> Iterable[Image]:
    if isinstance(images, str | Path | bytes | np.ndarray):
        return [images]  # one image, and not the characters of its name
    if not isinstance(images, Iterable):
        raise UserError(f"these are images, or one, and not {type(images).__name__}: {IMAGE}")
    return images


def _may_start_processes() -> bool:
    """Not from a thread, whose neighbours may hold a lock, nor from a process that may have no children."""
    return threading.current_thread() is threading.main_thread() and not multiprocessing.current_process().daemon
