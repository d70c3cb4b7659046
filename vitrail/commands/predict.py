"""`vitrail predict`: labels for files, folders, archives, tables and data sets; and their features, for Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch import Tensor

from vitrail.config import DataConfig, Size
from vitrail.data.formats import READ_HERE
from vitrail.data.sources.images import Images, find_images
from vitrail.errors import UserError, check_whole
from vitrail.inference.classifier import NOT_FINITE, Classifier, Prediction, load
from vitrail.inference.device import device_of
from vitrail.inference.runner import errors_of, run

BATCH = 32
GPU_BATCH = 128


@dataclass(frozen=True)
class Row:
    """One image's outcome: a prediction, or the reason there is none."""

    file: str
    prediction: Prediction | None
    error: str | None


class Embeddings(NamedTuple):
    """Features of images, and of those without any the reason."""

    values: np.ndarray  # float32 (N, D)
    files: list[str]  # (N,)
    failures: list[tuple[str, str]]  # (file, reason)


def predict(
    weights: str | Path,
    images: str | Path | Sequence[str | Path],
    *,
    top: int = 1,
    threshold: float | None = None,
    image_size: Size | None = None,
    follow_links: bool = True,
    device: str = "auto",
    workers: int | None = None,
) -> list[Row]:
    """Label every image at some paths.

    Parameters
    ----------
    weights
        A file, a run folder, "bundled", or "hf-hub:owner/name".
    images
        Files, folders, archives, tables and data sets: anything `train` takes, with labels or without.
    top
        How many classes to list for each image.
    threshold
        Below this probability the label is "none of these"; if None, what `evaluate --write` found.
    image_size
        (height, width), for weights of other libraries that do not state it.
    follow_links
        Whether links in folders are followed.
    device
        "cpu", "cuda", or "auto".
    workers
        Processes that decode images, 0 for none beside this one; if None, by the number of images and cores.

    Returns
    -------
    list of Row
        In order. An image that cannot be read has a row with the reason.
    """
    classifier = load(weights, image_size=image_size, device=device)
    paths = [images] if isinstance(images, str | Path) else images
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
    classifier.check_asked(top, threshold)
    batches = _run(classifier, classifier.net, _found(paths, notes, follow_links), workers)
    return (
        [
            Row(name, None, error) if error else Row(name, answer, None if answer else NOT_FINITE)
            for name, error, answer in zip(names, errors, classifier.predictions(logits, top, threshold), strict=True)
        ]
        for names, errors, logits in batches
    )


def embed(
    weights: str | Path,
    images: str | Path | Sequence[str | Path],
    *,
    image_size: Size | None = None,
    follow_links: bool = True,
    device: str = "auto",
    workers: int | None = None,
) -> Embeddings:
    """The features of every image at some paths: what the last layer of a classifier sees of it. For the parameters see
    `predict`."""
    classifier = load(weights, image_size=image_size, device=device)
    found = _found([images] if isinstance(images, str | Path) else images, None, follow_links)
    forward: Callable[[Tensor], Tensor] = classifier.net.forward_features  # type: ignore[assignment]
    values, files, failures = [], [], []
    for names, errors, features in _run(classifier, forward, found, workers):
        finite = features.isfinite().all(dim=-1).tolist()
        errors = [error or (None if sound else NOT_FINITE) for error, sound in zip(errors, finite, strict=True)]
        values.append(features.numpy()[[error is None for error in errors]])
        files += [name for name, error in zip(names, errors, strict=True) if error is None]
        failures += [(name, error) for name, error in zip(names, errors, strict=True) if error is not None]
    return Embeddings(np.concatenate(values), files, failures)


def _found(paths: Sequence[str | Path], notes: list[str] | None, follow_links: bool) -> Images:
    notes = [] if notes is None else notes
    found = find_images(paths, notes, follow_links)
    if not len(found):
        there = f" ({' '.join(notes)})" if notes else ""
        raise UserError(f"no images in {', '.join(map(str, paths))}{there}; vitrail reads {READ_HERE}")
    return found


def _run(
    classifier: Classifier, forward: Callable[[Tensor], Tensor], found: Images, workers: int | None
) -> Iterator[tuple[list[str], list[str | None], Tensor]]:
    """Batch by batch: the images' names, why one could not be read, and what `forward` gives."""
    if workers is not None:
        check_whole("workers", workers, "how many processes decode images", least=0)
    device = device_of(classifier.net)
    size = GPU_BATCH if device.type == "cuda" else BATCH
    data = DataConfig(workers=workers)
    return (
        ([found.name(index) for index in batch.sample.tolist()], errors_of(batch), out)
        for batch, out in run(forward, found, classifier.preprocess, device, batch_size=size, data=data)
    )
