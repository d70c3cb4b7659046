"""Weights and held-out images -> scores, and the pictures that explain them."""

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
from vitrail.tasks.result import MISTAKES, UNCERTAIN, Baseline, Examples, Result
from vitrail.tasks.task import PredictionTask
from vitrail.terminal import escape
from vitrail.workflows.report_images import ReportImages


@dataclass(frozen=True)
class Measurement:
    """What a network scores on one split, on which images, and some of those as pictures."""

    task: PredictionTask
    sentence: str  # what was measured on
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
        """A report of it, with these other facts."""
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
    """Score a network in float32 on every image of a split; `split` says in words which that is."""
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
    """What a network says of every image of a split, in float32."""
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
    """Score the logits that `net` gave, and find the pictures that explain them."""
    left_out = f"; {len(out.failures):,} could not be read" if out.failures else ""
    sentence = f"Measured on {len(out.labels):,} image{'s' * (len(out.labels) != 1)} of the {split}{left_out}."
    out = replace(out, labels=task.labels_of(out.values, out.labels))
    measured = out.values.numpy(), out.labels.numpy(), samples.classes, postprocess or Postprocess()
    examples = task.examples(*measured)
    pictures = ReportImages(net, out, samples, spec, data)
    return Measurement(
        task,
        sentence,
        out,
        task.score(*measured),
        examples,
        pictures.explained(examples.mistakes[: pictures.most(MISTAKES)]),
        pictures.explained(examples.uncertain[: pictures.most(UNCERTAIN)]),
        pictures.plain(examples.suspects),
    )


def show_scores(console: Console, found: Measurement) -> None:
    console.print(found.result.line)
    console.print(f"[dim]{escape(found.sentence)}[/]")


def write_predictions(path: Path, found: Measurement, samples: Samples, postprocess: Postprocess | None = None) -> None:
    """One row an image, in the order of the data."""
    out, task = found.outputs, found.task
    predicted = task.rows(
        out.values.numpy(), out.labels.numpy(), samples.classes, postprocess or Postprocess(), found.examples
    )
    rows = ((samples.name(index), *row) for index, row in zip(out.sample.tolist(), predicted, strict=True))
    with os_errors_as(f"cannot write the answers {path}"), atomic_write(path) as temporary:
        temporary.write_bytes(csv_bytes(task.columns, rows))
