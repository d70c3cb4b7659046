"""Measure a network on one split: predictions, scores, and example images for the report.

In: a network and the images of a split. Out: a `Measurement`, and the table predictions.csv.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from vitrail.atomic import atomic_write
from vitrail.config import DataConfig, Preprocess
from vitrail.config.postprocess import Postprocess
from vitrail.data.dataset import Samples
from vitrail.distributed import SINGLE_PROCESS, Ranks
from vitrail.errors import os_errors_as
from vitrail.inference.device import deterministic
from vitrail.inference.runner import Outputs, network_outputs
from vitrail.interrupt import Interrupts
from vitrail.metrics.scores import Scores
from vitrail.report.page import ReportFacts, ReportImage
from vitrail.spreadsheet import csv_bytes
from vitrail.tasks.result import MAX_MISTAKES, MAX_UNCERTAIN, Baseline, Examples, Result
from vitrail.tasks.task import PredictionTask
from vitrail.terminal import escape
from vitrail.workflows.report_images import ReportImages


@dataclass(frozen=True)
class Measurement:
    """The scores of a network on one split, its outputs, and example images."""

    task: PredictionTask
    sentence: str  # which images were measured
    outputs: Outputs
    scores: Scores
    examples: Examples
    mistakes: list[ReportImage]
    uncertain: list[ReportImage]
    suspects: list[ReportImage]

    @property
    def result(self) -> Result:
        return self.task.result(self.scores)

    def facts(self, baseline: Baseline | None = None, **facts: Any) -> ReportFacts:
        """The facts of a report page: this measurement and `facts`."""
        return ReportFacts(
            result=self.task.result(self.scores, baseline),
            split_used=self.sentence,
            confident_errors=self.mistakes,
            least_confident=self.uncertain,
            label_errors=self.suspects,
            num_label_errors=len(self.examples.suggested),
            **facts,
        )


def measure(
    net: nn.Module,
    split: str,
    samples: Samples,
    spec: Preprocess,
    data: DataConfig,
    device: torch.device,
    interrupts: Interrupts,
    *,
    task: PredictionTask,
) -> Measurement:
    """Score a network in float32 on every image of a split. `split` is its description for the report."""
    out = compute_logits(net, samples, spec, data, device, interrupts)
    return score_outputs(net, out, split, samples, spec, data, task=task)


def compute_logits(
    net: nn.Module,
    samples: Samples,
    spec: Preprocess,
    data: DataConfig,
    device: torch.device,
    interrupts: Interrupts,
    ranks: Ranks = SINGLE_PROCESS,
    temperature: float = 1.0,
) -> Outputs:
    """The logits of a network for every image of a split, in float32, divided by `temperature`."""
    net.eval()
    with deterministic(device):
        out = network_outputs(net, samples, spec, data, device, interrupts, ranks)
    return out if temperature == 1 else replace(out, values=out.values / temperature)


def score_outputs(
    net: nn.Module,
    out: Outputs,
    split: str,
    samples: Samples,
    spec: Preprocess,
    data: DataConfig,
    *,
    task: PredictionTask,
    postprocess: Postprocess | None = None,
) -> Measurement:
    """Score the logits of `net`, and choose example images: mistakes, uncertain predictions and suspected labels."""
    unreadable = f"; {len(out.failures):,} could not be read" if out.failures else ""
    sentence = f"Measured on {len(out.labels):,} image{'s' * (len(out.labels) != 1)} of the {split}{unreadable}."
    out = replace(out, labels=task.labels_of(out.values, out.labels))
    measured = out.values.numpy(), out.labels.numpy(), samples.classes, postprocess or Postprocess()
    examples = task.examples(*measured)
    images = ReportImages(net, out, samples, spec, data)
    return Measurement(
        task,
        sentence,
        out,
        task.score(*measured),
        examples,
        images.explained(examples.mistakes[: images.most(MAX_MISTAKES)]),
        images.explained(examples.uncertain[: images.most(MAX_UNCERTAIN)]),
        images.plain(examples.suspects),
    )


def show_scores(console: Console, measurement: Measurement) -> None:
    """Print the scores and which images they were measured on."""
    console.print(measurement.result.summary)
    console.print(f"[dim]{escape(measurement.sentence)}[/]")


def write_predictions(
    path: Path, measurement: Measurement, samples: Samples, postprocess: Postprocess | None = None
) -> None:
    """Write predictions.csv: one row per image, in the order of the dataset."""
    out, task = measurement.outputs, measurement.task
    predicted = task.rows(
        out.values.numpy(), out.labels.numpy(), samples.classes, postprocess or Postprocess(), measurement.examples
    )
    rows = ((samples.name(index), *row) for index, row in zip(out.sample.tolist(), predicted, strict=True))
    with os_errors_as(f"cannot write the predictions {path}"), atomic_write(path) as temporary:
        temporary.write_bytes(csv_bytes(task.columns, rows))
