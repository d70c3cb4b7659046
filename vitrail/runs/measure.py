"""Weights and held-out images -> scores, and the pictures that explain them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from vitrail.config import DataConfig, Preprocess
from vitrail.evaluate.calibration import Reliability, reliability
from vitrail.evaluate.metrics import Scores, confident_mistakes, least_certain, score, softmax
from vitrail.images.decode import BadImage
from vitrail.images.sources import Dataset, Samples
from vitrail.infer.forward import Outputs
from vitrail.report.page import Picture
from vitrail.runs.outputs import outputs_of, reader_of
from vitrail.train.interrupt import Interrupts

SHOWN = 12  # pictures of mistakes in a report


@dataclass(frozen=True)
class Measurement:
    """What a network scores on one split, and on which images."""

    split: str
    samples: Samples
    outputs: Outputs
    scores: Scores
    reliability: Reliability
    probabilities: np.ndarray  # (N, K)

    @property
    def sentence(self) -> str:
        left_out = f"; {len(self.outputs.failures):,} could not be read" if self.outputs.failures else ""
        return f"Measured on {self.scores.n:,} images of the {self.split}{left_out}."


def measure(
    net: nn.Module,
    split: str,
    samples: Samples,
    dataset: Dataset,
    spec: Preprocess,
    data: DataConfig,
    device: torch.device,
    interrupts: Interrupts,
) -> Measurement:
    """Score a network in float32 on every image of a split."""
    net.eval()
    out = outputs_of(net, samples, dataset, spec, data, device, interrupts)
    logits, labels = out.values.numpy(), out.labels.numpy()
    probabilities = softmax(logits)
    return Measurement(
        split,
        samples,
        out,
        score(logits, labels, dataset.classes),
        reliability(probabilities, labels),
        probabilities,
    )


def mistakes(found: Measurement, dataset: Dataset, spec: Preprocess, data: DataConfig) -> list[Picture]:
    """The most confident mistakes as pictures."""
    rows = confident_mistakes(found.outputs.values.numpy(), found.outputs.labels.numpy(), SHOWN)
    return _pictures(rows.tolist(), found, dataset, spec, data)


def uncertain(found: Measurement, dataset: Dataset, spec: Preprocess, data: DataConfig) -> list[Picture]:
    """The images the network is least sure of, right or wrong."""
    rows = least_certain(found.outputs.values.numpy(), SHOWN // 2)
    return _pictures(rows.tolist(), found, dataset, spec, data)


def _pictures(
    rows: list[int], found: Measurement, dataset: Dataset, spec: Preprocess, data: DataConfig
) -> list[Picture]:
    reader = reader_of(found.samples, dataset, spec, data)
    pictures = []
    for row in rows:
        sample: Tensor = found.outputs.sample[row]
        index, truth = int(sample), int(found.outputs.labels[row])
        predicted = int(found.probabilities[row].argmax())
        try:
            image = reader.image(index)
        except BadImage:
            continue
        name = found.samples.name(index)
        own, other = float(found.probabilities[row, truth]), float(found.probabilities[row, predicted])
        pictures.append(Picture(image, name, dataset.classes[truth], dataset.classes[predicted], other, own))
    return pictures
