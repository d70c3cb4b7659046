"""A table of what a network answered to each image it was measured on: for those who want to look at all of them."""

from __future__ import annotations

from pathlib import Path

from vitrail.atomic import atomic_write
from vitrail.config.postprocess import Postprocess
from vitrail.data.dataset import Samples
from vitrail.errors import os_errors_as
from vitrail.spreadsheet import csv_bytes
from vitrail.workflows.measure import Measurement


def write_predictions(path: Path, found: Measurement, samples: Samples, postprocess: Postprocess | None = None) -> None:
    """One row an image, in the order of the data."""
    out, task = found.outputs, found.task
    predicted = task.rows(
        out.values.numpy(), out.labels.numpy(), samples.classes, postprocess or Postprocess(), found.examples
    )
    rows = ((samples.name(index), *row) for index, row in zip(out.sample.tolist(), predicted, strict=True))
    with os_errors_as(f"cannot write the answers {path}"), atomic_write(path) as temporary:
        temporary.write_bytes(csv_bytes(task.columns, rows))
