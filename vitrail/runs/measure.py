"""Weights and held-out images -> scores, and the pictures that explain them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from vitrail.config import DataConfig, Preprocess
from vitrail.evaluate.calibration import Reliability, reliability
from vitrail.evaluate.metrics import Scores, confident_mistakes, least_certain, score, softmax
from vitrail.evaluate.tags import THRESHOLD, TagScores, score_tags, sigmoid, tag_reliability, worst_tags
from vitrail.images.dataset import Samples
from vitrail.images.decode import BadImage
from vitrail.infer.forward import Outputs
from vitrail.report.page import Picture
from vitrail.runs.outputs import outputs_of, reader_of
from vitrail.training.interrupt import Interrupts
from vitrail.training.parallel import ALONE, Ranks
from vitrail.training.precision import repeatable

MISTAKES, UNCERTAIN = 12, 6  # pictures in a report


@dataclass(frozen=True)
class Measurement:
    """What a network scores on one split, on which images, and some of those as pictures."""

    sentence: str  # what was measured on
    outputs: Outputs
    scores: Scores | TagScores
    reliability: Reliability
    mistakes: list[Picture]  # the most confident first
    uncertain: list[Picture]  # the least certain first, right or wrong


def measure(
    net: nn.Module,
    split: str,
    samples: Samples,
    spec: Preprocess,
    data: DataConfig,
    device: torch.device,
    interrupts: Interrupts,
    *,
    several: bool,
) -> Measurement:
    """Score a network in float32 on every image of a split; `split` says in words which that is."""
    out = logits_of(net, samples, spec, data, device, interrupts)
    return judge(out, split, samples, spec, data, several=several)


def logits_of(
    net: nn.Module,
    samples: Samples,
    spec: Preprocess,
    data: DataConfig,
    device: torch.device,
    interrupts: Interrupts,
    ranks: Ranks = ALONE,
    temperature: float = 1.0,
) -> Outputs:
    """What a network says of every image of a split, in float32."""
    net.eval()
    with repeatable(device):
        out = outputs_of(net, samples, spec, data, device, interrupts, ranks)
    return out if temperature == 1 else replace(out, values=out.values / temperature)


def judge(
    out: Outputs,
    split: str,
    samples: Samples,
    spec: Preprocess,
    data: DataConfig,
    *,
    several: bool,
    thresholds: Sequence[float] = (),
) -> Measurement:
    """Score logits, and find the pictures that explain them.

    `several`: they give an image any number of labels, each from its threshold on. Those that give one label are right,
    where an image has a set of them, with any of the set.
    """
    logits, labels = out.values.numpy(), out.labels.numpy()
    left_out = f"; {len(out.failures):,} could not be read" if out.failures else ""
    sentence = f"Measured on {len(labels):,} images of the {split}{left_out}."
    if labels.ndim == 2 and several:
        least = np.array(thresholds or [THRESHOLD] * len(samples.classes))
        return _judge_tags(sentence, out, samples, spec, data, least)
    out = with_one_label(out)
    labels = out.labels.numpy()
    scores = score(logits, labels, samples.classes)
    probabilities = softmax(logits)
    pictures = _Pictures(samples, out, probabilities, spec, data)
    return Measurement(
        sentence,
        out,
        scores,
        reliability(probabilities, labels),
        pictures.of(confident_mistakes(logits, labels, MISTAKES).tolist()),
        pictures.of(least_certain(logits, UNCERTAIN).tolist()),
    )


def with_one_label(out: Outputs) -> Outputs:
    """Where any label of a set is right, the one that ranks first decides, for top-1 and top-5 alike."""
    if out.labels.ndim == 1:
        return out
    best = torch.where(out.labels > 0, out.values, -torch.inf).argmax(dim=1)
    return replace(out, labels=best)


def _judge_tags(
    sentence: str, out: Outputs, samples: Samples, spec: Preprocess, data: DataConfig, thresholds: np.ndarray
) -> Measurement:
    """The same for images with any number of labels."""
    logits, truth, classes = out.values.numpy(), out.labels.numpy(), samples.classes
    probabilities = sigmoid(logits.astype(np.float64))
    reader = reader_of(samples, spec, data)
    pictures = []
    for row, label in worst_tags(logits, truth, MISTAKES):
        index, chance = int(out.sample[row]), float(probabilities[row, label])
        yes, no = (classes[label], chance), (f"not {classes[label]}", 1 - chance)
        said, true = (no, yes) if truth[row, label] else (yes, no)
        try:
            pictures.append(Picture(reader.image(index), samples.name(index), true[0], said[0], said[1], true[1]))
        except BadImage:  # it was readable a moment ago
            continue
    scores = score_tags(logits, truth, classes, thresholds=thresholds)
    return Measurement(sentence, out, scores, tag_reliability(logits, truth), pictures, [])


class _Pictures:
    """Rows of the outputs as pictures with what was said of them."""

    def __init__(self, samples: Samples, out: Outputs, probabilities: np.ndarray, spec: Preprocess, data: DataConfig):
        self.samples, self.out, self.probabilities = samples, out, probabilities
        self.reader = reader_of(samples, spec, data)

    def of(self, rows: Sequence[int]) -> list[Picture]:
        found = (self._picture(row) for row in rows)
        return [picture for picture in found if picture is not None]

    def _picture(self, row: int) -> Picture | None:
        index, truth = int(self.out.sample[row]), int(self.out.labels[row])
        predicted = int(self.probabilities[row].argmax())
        try:
            image = self.reader.image(index)
        except BadImage:  # it was readable a moment ago
            return None
        classes, chances = self.samples.classes, self.probabilities[row]
        return Picture(
            image,
            self.samples.name(index),
            classes[truth],
            classes[predicted],
            float(chances[predicted]),
            float(chances[truth]),
        )
