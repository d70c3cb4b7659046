"""`vitrail predict` and `vitrail embed`: predict labels or compute features of images."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch import Tensor

from vitrail.config import DataConfig, Size
from vitrail.data.formats import SUPPORTED_FORMATS
from vitrail.data.sources.images import Images, find_images, image_paths
from vitrail.errors import UserError, check_integer
from vitrail.inference.classifier import NONFINITE_OUTPUT, Classifier, Prediction, as_classifier
from vitrail.inference.device import device_of
from vitrail.inference.runner import forward_batches, row_errors

BATCH = 32
GPU_BATCH = 128


@dataclass(frozen=True)
class Row:
    """The prediction for one image, or the error."""

    file: str
    prediction: Prediction | None
    error: str | None


class Embeddings(NamedTuple):
    """Features of images, and the errors of images that could not be read."""

    values: np.ndarray  # float32 (N, D)
    files: list[str]  # the N images, in order
    failures: list[tuple[str, str]]  # (file, error) of the others


def predict(
    weights: str | Path | Classifier,
    images: str | Path | Iterable[str | Path],
    *,
    top: int = 1,
    threshold: float | None = None,
    image_size: int | Size | None = None,
    follow_links: bool = True,
    device: str = "auto",
    workers: int | None = None,
) -> list[Row]:
    """Predict the labels of all images at the given paths. Prints nothing.

    Parameters
    ----------
    weights
        A weights file, a run folder, "bundled", "hf-hub:owner/name", or a Classifier that `vitrail.load` returned.
    images
        Files, folders, archives, tables and data sets: anything `train` takes, with or without labels.
    top
        Number of classes to list per image.
    threshold
        Below this probability the label is "none of these". If None, the threshold stored in the weights by
        `vitrail evaluate --write`; without one 0, or 0.5 for multilabel weights.
    image_size
        A side in pixels, or (height, width), for weights of other libraries that do not state it.
    follow_links
        Whether to follow symbolic links in folders.
    device
        "cpu", "cuda", "mps", or "auto" for the best available device.
    workers
        Number of decoding processes, 0 to decode in this process. If None, chosen by the number of images and cores.

    Returns
    -------
    list of Row
        One per image, in order, with `file`, `prediction` (label, probability, top, labels, probabilities) and `error`.
        If an image cannot be read, `prediction` is None and `error` is the reason.

    Examples
    --------
    >>> for row in vitrail.predict("runs/photos", "inbox/"):
    ...     print(row.file, row.prediction.label if row.prediction else row.error)
    """
    classifier, paths = as_classifier(weights, image_size, device), image_paths(images)
    rows = predict_rows(classifier, paths, top=top, threshold=threshold, follow_links=follow_links, workers=workers)
    return list(chain.from_iterable(rows))


def predict_rows(
    classifier: Classifier,
    paths: Sequence[str | Path],
    *,
    top: int = 1,
    threshold: float | None = None,
    follow_links: bool = True,
    workers: int | None = None,
    notes: list[str] | None = None,
) -> Iterator[list[Row]]:
    """Like `predict`, but yields rows batch by batch. Messages about ignored files are appended to `notes`."""
    classifier.check_options(top, threshold)
    batches = _run(classifier, classifier.net, _find_images(paths, notes, follow_links), workers)
    return (
        [
            Row(name, None, error) if error else Row(name, prediction, None if prediction else NONFINITE_OUTPUT)
            for name, error, prediction in zip(
                names, errors, classifier.predictions(logits, top, threshold), strict=True
            )
        ]
        for names, errors, logits in batches
    )


def embed(
    weights: str | Path | Classifier,
    images: str | Path | Iterable[str | Path],
    *,
    image_size: int | Size | None = None,
    follow_links: bool = True,
    device: str = "auto",
    workers: int | None = None,
) -> Embeddings:
    """Compute the features of all images at the given paths: the input of the last layer of the classifier.

    Parameters
    ----------
    weights
        A weights file, a run folder, "bundled", "hf-hub:owner/name", or a Classifier that `vitrail.load` returned.
    images
        Files, folders, archives, tables and data sets: anything `train` takes, with or without labels.
    image_size
        A side in pixels, or (height, width), for weights of other libraries that do not state it.
    follow_links
        Whether to follow symbolic links in folders.
    device
        "cpu", "cuda", "mps", or "auto" for the best available device.
    workers
        Number of decoding processes, 0 to decode in this process. If None, chosen by the number of images and cores.

    Returns
    -------
    Embeddings
        A tuple of three: `values`, float32 (N, D); `files`, the names of the N images, in order; `failures`, the name
        and the error of each other image.

    Examples
    --------
    >>> values, files, failures = vitrail.embed("runs/photos", "photos/")
    """
    classifier = as_classifier(weights, image_size, device)
    image_list = _find_images(image_paths(images), None, follow_links)
    values, files, failures = [], [], []
    for names, errors, features in _run(classifier, classifier.net.forward_features, image_list, workers):
        finite = features.isfinite().all(dim=-1).tolist()
        errors = [error or (None if ok else NONFINITE_OUTPUT) for error, ok in zip(errors, finite, strict=True)]
        values.append(features.numpy()[[error is None for error in errors]])
        files += [name for name, error in zip(names, errors, strict=True) if error is None]
        failures += [(name, error) for name, error in zip(names, errors, strict=True) if error is not None]
    return Embeddings(np.concatenate(values), files, failures)


def _find_images(paths: Sequence[str | Path], notes: list[str] | None, follow_links: bool) -> Images:
    if not paths:
        raise UserError("no images: pass at least one file or folder")
    notes = [] if notes is None else notes
    image_list = find_images(paths, notes, follow_links)
    if not len(image_list):
        details = f" ({' '.join(notes)})" if notes else ""
        raise UserError(f"no images in {', '.join(map(str, paths))}{details}; vitrail reads {SUPPORTED_FORMATS}")
    return image_list


def _run(
    classifier: Classifier, forward: Callable[[Tensor], Tensor], images: Images, workers: int | None
) -> Iterator[tuple[list[str], list[str | None], Tensor]]:
    """Yield names, errors and outputs of `forward`, batch by batch."""
    if workers is not None:
        check_integer("workers", workers, "the number of decoding processes", least=0)
    device = device_of(classifier.net)
    size = GPU_BATCH if device.type == "cuda" else BATCH
    data = DataConfig(workers=workers)
    return (
        ([images.name(index) for index in batch.sample.tolist()], row_errors(batch), out)
        for batch, out in forward_batches(forward, images, classifier.preprocess, device, batch_size=size, data=data)
    )
