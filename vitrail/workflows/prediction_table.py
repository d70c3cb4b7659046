"""A table of what a network answered to each image it was measured on: for those who want to look at all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from vitrail.atomic import whole_file
from vitrail.data.dataset import Samples
from vitrail.data.sources.manifest import BETWEEN
from vitrail.errors import os_errors_as
from vitrail.metrics.accuracy import chunks, softmax
from vitrail.metrics.multilabel import THRESHOLD, sigmoid
from vitrail.spreadsheet import csv_table
from vitrail.workflows.measure import Measurement

# rather: the class that is likelier than the label, where that is doubted
TITLES = ("name", "label", "answer", "probability", "label probability", "rather")
TAG_TITLES = ("name", "labels", "answers")


def write_answers(path: Path, found: Measurement, samples: Samples, thresholds: Sequence[float] = ()) -> None:
    """One row an image, in the order of the data. `thresholds`: from which on one of several labels is given."""
    several = found.outputs.labels.ndim == 2
    rows = _tags(found, samples, thresholds) if several else _labels(found, samples)
    with os_errors_as(f"cannot write the answers {path}"), whole_file(path) as temporary:
        temporary.write_bytes(csv_table(TAG_TITLES if several else TITLES, rows))


def _labels(found: Measurement, samples: Samples) -> Iterator[tuple[str, ...]]:
    out, classes, rather = found.outputs, samples.classes, dict(found.doubted)
    for part in chunks(*out.values.shape):
        chances = softmax(out.values[part].numpy())
        for row, own in enumerate(chances, part.start):
            label, answer = int(out.labels[row]), int(own.argmax())
            other = classes[rather[row]] if row in rather else ""
            sure = (f"{own[index]:.4f}" for index in (answer, label))
            yield samples.name(int(out.sample[row])), classes[label], classes[answer], *sure, other


def _tags(found: Measurement, samples: Samples, thresholds: Sequence[float]) -> Iterator[tuple[str, ...]]:
    out, least = found.outputs, np.asarray(thresholds or [THRESHOLD] * len(samples.classes))

    def named(marked: np.ndarray) -> str:
        return BETWEEN.join(samples.classes[index] for index in np.flatnonzero(marked))

    for row in range(len(out.values)):
        answers = sigmoid(out.values[row].numpy().astype(np.float64)) >= least
        yield samples.name(int(out.sample[row])), named(out.labels[row].numpy()), named(answers)
