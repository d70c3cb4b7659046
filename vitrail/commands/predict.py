"""`vitrail predict`: labels for files, folders, archives, tables and data sets; and their features, for Python."""

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
    """One image's outcome: a prediction, or the reason there is none."""

    file: str
    prediction: Prediction | None
    error: str | None


class Embeddings(NamedTuple):
    """Features of images, and the reason for each image without any."""

    values: np.ndarray  # float32 (N, D)
    files: list[str]  # the N images that could be read, in order
    failures: list[tuple[str, str]]  # (file, reason) of the others


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
    """Label every image at some paths. Nothing is printed.

    Parameters
    ----------
    weights
        A weights file, a run folder, "bundled", "hf-hub:owner/name", or a Classifier that `vitrail.load` returned.
    images
        Files, folders, archives, tables and data sets: anything `train` takes, with labels or without.
    top
        How many classes to list for each image.
    threshold
        Below this probability the label is "none of these". If None, the threshold that `vitrail evaluate --write`
        found for these weights; else 0, and 0.5 for weights that give an image any number of labels.
    image_size
        A side in pixels, or (height, width), for weights of other libraries that do not state it.
    follow_links
        Whether links in folders are followed.
    device
        "cpu", "cuda", "mps", or "auto" for the best there is.
    workers
        Processes that decode images, 0 for none beside this one; if None, by the number of images and cores.

    Returns
    -------
    list of Row
        In order, each with `file`, `prediction` (label, probability, top, labels, probabilities) and `error`. For an
        image that cannot be read `prediction` is None and `error` says why.

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
    """The same as `predict`, some rows at a time. `notes` get what was ignored beside the images."""
    classifier.check_options(top, threshold)
    batches = _run(classifier, classifier.net, _found(paths, notes, follow_links), workers)
    return (
        [
            Row(name, None, error) if error else Row(name, answer, None if answer else NONFINITE_OUTPUT)
            for name, error, answer in zip(names, errors, classifier.predictions(logits, top, threshold), strict=True)
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
    """Compute the features of every image at some paths: what the last layer of the classifier sees of it.

    Parameters
    ----------
    weights
        A weights file, a run folder, "bundled", "hf-hub:owner/name", or a Classifier that `vitrail.load` returned.
    images
        Files, folders, archives, tables and data sets: anything `train` takes, with labels or without.
    image_size
        A side in pixels, or (height, width), for weights of other libraries that do not state it.
    follow_links
        Whether links in folders are followed.
    device
        "cpu", "cuda", "mps", or "auto" for the best there is.
    workers
        Processes that decode images, 0 for none beside this one; if None, by the number of images and cores.

    Returns
    -------
    Embeddings
        A tuple of three: `values`, float32 (N, D); `files`, the names of these N images, in order; `failures`, the name
        and the reason for each image without features.

    Examples
    --------
    >>> values, files, failures = vitrail.embed("runs/photos", "photos/")
    """
    classifier = as_classifier(weights, image_size, device)
    found = _found(image_paths(images), None, follow_links)
    values, files, failures = [], [], []
    for names, errors, features in _run(classifier, classifier.net.forward_features, found, workers):
        finite = features.isfinite().all(dim=-1).tolist()
        errors = [error or (None if sound else NONFINITE_OUTPUT) for error, sound in zip(errors, finite, strict=True)]
        values.append(features.numpy()[[error is None for error in errors]])
        files += [name for name, error in zip(names, errors, strict=True) if error is None]
        failures += [(name, error) for name, error in zip(names, errors, strict=True) if error is not None]
    return Embeddings(np.concatenate(values), files, failures)


def _found(paths: Sequence[str | Path], notes: list[str] | None, follow_links: bool) -> Images:
    if not paths:
        raise UserError("no images are given: name at least one file or folder")
    notes = [] if notes is None else notes
    found = find_images(paths, notes, follow_links)
    if not len(found):
        there = f" ({' '.join(notes)})" if notes else ""
        raise UserError(f"no images in {', '.join(map(str, paths))}{there}; vitrail reads {SUPPORTED_FORMATS}")
    return found


def _run(
    classifier: Classifier, forward: Callable[[Tensor], Tensor], found: Images, workers: int | None
) -> Iterator[tuple[list[str], list[str | None], Tensor]]:
    """Batch by batch: the images' names, why one could not be read, and what `forward` gives."""
    if workers is not None:
        check_integer("workers", workers, "the number of decoding processes", least=0)
    device = device_of(classifier.net)
    size = GPU_BATCH if device.type == "cuda" else BATCH
    data = DataConfig(workers=workers)
    return (
        ([found.name(index) for index in batch.sample.tolist()], row_errors(batch), out)
        for batch, out in forward_batches(forward, found, classifier.preprocess, device, batch_size=size, data=data)
    )
