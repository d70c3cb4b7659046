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
NONFINITE_OUTPUT = "the output of the network is NaN or Inf: the weights or their preprocessing are wrong"


@dataclass(frozen=True)
class Prediction:
    """The prediction for one image."""

    label: str  # "none of these" below the threshold; multilabel: all labels, separated by commas
    probability: float  # of the most probable label, or class if no label is predicted
    top: tuple[tuple[str, float], ...]  # the most probable classes, best first
    labels: tuple[str, ...]  # most probable first; empty below the threshold
    probabilities: tuple[float, ...]  # of the labels


@dataclass(frozen=True)
class Classifier:
    """A network with its preprocessing and class names, as `vitrail.load` returns it. Threads can share one.

    Attributes
    ----------
    net
        The torch module, in evaluation mode. It takes normalised pixels (B, C, H, W) and returns logits (B, classes).
    card
        The metadata of the weights file: network config, recipe, data, metrics, source, licence.
    file
        The weights file, if it is in vitrail's format; None for other formats.
    spec
        The argument of `vitrail.load`.
    preprocess
        Preprocessing of images: size, resizing, interpolation, mean, std.
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
        """Preprocessing of images: size, resizing, interpolation, mean, std."""
        return self.card.preprocess

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes in the order of the logits. Weights without names have "class 0", "class 1", ..."""
        return self.card.classes or tuple(f"class {index}" for index in range(self.card.model.num_classes))

    @property
    def task(self) -> PredictionTask:
        """The task of the weights: classification or multilabel."""
        return prediction_task(self.card.task, self.card.model.num_classes)

    def predict(
        self, images: Iterable[Image], *, top: int = 5, threshold: float | None = None, batch_size: int = 32
    ) -> list[Prediction]:
        """Label images.

        Parameters
        ----------
        images
            Paths, bytes of image files, or uint8 arrays (height, width, channels); or one of these. Iterators are
            consumed batch by batch.
        top
            Number of most probable classes to return for each image.
        threshold
            Below this probability the label is "none of these". If None, the threshold that `vitrail evaluate --write`
            stored in the weights; without one 0, and 0.5 for multilabel weights.
        batch_size
            How many images go through the network at once.

        Returns
        -------
        list of Prediction
            In order, each with label, probability, top, labels and probabilities.

        Raises
        ------
        UserError
            If an image cannot be read. `vitrail.predict` skips such images.

        Examples
        --------
        >>> clf.predict(["new.jpg"], top=2)[0].top
        """
        self.check_options(top, threshold)
        results: list[Prediction] = []
        for image_list, batch, logits in self._forward(self.net, images, batch_size):
            for row, prediction in enumerate(self.predictions(logits, top, threshold)):
                if prediction is None:
                    raise UserError(f"{image_list.name(int(batch.sample[row]))}: {NONFINITE_OUTPUT}")
                results.append(prediction)
        return results

    def embed(self, images: Iterable[Image], *, batch_size: int = 32) -> np.ndarray:
        """Compute features of images: the input of the classification head.

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
        batches = []
        for image_list, batch, features in self._forward(self.net.forward_features, images, batch_size):
            nonfinite = (~features.isfinite().all(dim=-1)).nonzero()
            if len(nonfinite):
                raise UserError(f"{image_list.name(int(batch.sample[nonfinite[0, 0]]))}: {NONFINITE_OUTPUT}")
            batches.append(features.numpy())
        if not batches:
            config = self.card.model
            width = getattr(config, "representation", 0) or getattr(config, "features", config.width)
            return np.empty((0, width), np.float32)
        return np.concatenate(batches)

    def _forward(
        self, forward: Callable[[Tensor], Tensor], images: Iterable[Image], batch_size: int
    ) -> Iterator[tuple[ImageList, ImageBatch, Tensor]]:
        """Run `forward` on images, batch by batch. Raises an error if an image cannot be read."""
        images = _as_images(images)
        check_integer("batch_size", batch_size)
        if isinstance(images, Sequence):
            chunks: Iterator[Sequence[Image]] = iter([images])
        else:
            iterator = iter(images)
            chunks = iter(lambda: list(islice(iterator, batch_size)), [])
        data = DataConfig(workers=None if _can_start_processes() else 0)
        first = 0
        for chunk in chunks:
            image_list = ImageList(chunk, self.preprocess.channels, first)
            first += len(chunk)
            spec, device = self.preprocess, device_of(self.net)
            for batch, out in forward_batches(forward, image_list, spec, device, batch_size=batch_size, data=data):
                if batch.failures:
                    raise UserError(": ".join(batch.failures[0]))
                yield image_list, batch, out

    def pixels(self, image: Image) -> Tensor:
        """Read one image and resize it for the network, without normalisation.

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
        image_list = ImageList([image], self.preprocess.channels)
        try:
            return eval_transform(Reader(image_list, self.preprocess, MAX_PIXELS).image(0), self.preprocess)
        except BadImage as error:
            raise UserError(f"{image_list.name(0)}: {error}") from None

    def inputs(self, images: Iterable[Image]) -> Tensor:
        """Prepare images for `net`: read, resized and normalised, on its device.

        Parameters
        ----------
        images
            As for `predict`. All are in memory at once.

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
        """Convert logits to probabilities, with the temperature stored in the weights.

        Parameters
        ----------
        logits
            (N, classes), as `net` returns them.

        Returns
        -------
        Tensor of float32
            (N, classes). Each row sums to 1, except for multilabel weights.

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
        """Convert logits (N, classes) to predictions. None for images with NaN or Inf outputs."""
        classes = self.classes
        probabilities = self.probabilities(logits)
        finite = (logits.isfinite() & probabilities.isfinite()).all(dim=-1).tolist()
        results: list[Prediction | None] = []
        for (ranked, predicted), is_finite in zip(
            self.task.predictions(probabilities, top, threshold, self.card.postprocess), finite, strict=True
        ):
            if not is_finite:
                results.append(None)
                continue
            labels = tuple(classes[index] for index, _ in predicted)
            results.append(
                Prediction(
                    label=", ".join(labels) or NONE_OF_THESE,
                    probability=(predicted or ranked)[0][1],
                    top=tuple((classes[index], p) for index, p in ranked),
                    labels=labels,
                    probabilities=tuple(p for _, p in predicted),
                )
            )
        return results

    def check_options(self, top: int, threshold: float | None) -> None:
        """Raise an error if the options of `predict` are invalid, or the weights have no classification head."""
        if not self.classes:
            raise UserError(
                "no classification head in these weights: train one with `vitrail train DATA --from WEIGHTS`"
            )
        check_integer("top", top, "the number of classes to return")
        if threshold is not None and not isinstance(threshold, int | float | np.number):
            raise UserError(f"threshold must be a probability from 0 to 1, not {threshold!r}")
        if threshold is not None and not 0 <= threshold <= 1:
            raise UserError(f"threshold must be a probability from 0 to 1, not {threshold:g}")


def load(spec: str | Path, *, image_size: int | Size | None = None, device: str | torch.device = "cpu") -> Classifier:
    """Load weights with their preprocessing and class names, ready to predict.

    Parameters
    ----------
    spec
        A weights file, a run folder, "bundled", or "hf-hub:owner/name". Weights of timm, transformers and the original
        JAX code work, too.
    image_size
        Side in pixels, or (height, width), for weights of other libraries that do not state it.
    device
        "cpu", "cuda", "mps", or "auto" for the best available one.

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
        raise UserError(f"'{spec}' is an image, not weights: weights come first, as in vitrail predict WEIGHTS IMAGES")
    device = choose_device(device)
    weights = read_weights(spec, image_size=None if image_size is None else parse_image_size(image_size))
    net = build_from_state_dict(weights.card.model, weights.state)
    file = weights.file if weights.layout == "vitrail" else None
    return Classifier(net.to(device).eval().requires_grad_(False), weights.card, file, spec)


def as_classifier(
    weights: str | Path | Classifier, image_size: int | Size | None = None, device: str | torch.device = "auto"
) -> Classifier:
    """Load `weights`, or return them if they are already a Classifier."""
    if not isinstance(weights, Classifier):
        return load(weights, image_size=image_size, device=device)
    if image_size is not None or device != "auto":
        raise UserError("image_size and device cannot change a loaded Classifier: pass them to vitrail.load")
    return weights


def _as_images(images: Iterable[Image]) -> Iterable[Image]:
    if isinstance(images, str | Path | bytes | np.ndarray):
        return [images]
    if not isinstance(images, Iterable):
        raise UserError(f"images must be an image or an iterable of images, not {type(images).__name__}: {IMAGE}")
    return images


def _can_start_processes() -> bool:
    """Whether worker processes can be started: not from a thread, since others may hold locks, nor from a daemon."""
    return threading.current_thread() is threading.main_thread() and not multiprocessing.current_process().daemon
