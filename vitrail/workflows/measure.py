"""Weights and held-out images -> scores, and the pictures that explain them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from vitrail.config import DataConfig, Preprocess
from vitrail.data.dataset import Samples
from vitrail.distributed import ALONE, Ranks
from vitrail.inference.device import repeatable
from vitrail.inference.forward import Outputs
from vitrail.interrupt import Interrupts
from vitrail.metrics.accuracy import Scores, confident_mistakes, least_certain, score, softmax
from vitrail.metrics.calibration import Reliability, reliability
from vitrail.metrics.label_errors import suspected_labels
from vitrail.metrics.multilabel import THRESHOLD, TagScores, score_tags, sigmoid, tag_reliability, worst_tags
from vitrail.report.page import Picture
from vitrail.workflows.outputs import outputs_of
from vitrail.workflows.pictures import Asked, Pictures, asked_of

MISTAKES, UNCERTAIN, SUSPECTS = 12, 6, 12  # pictures in a report; half as many of the first two where they have maps


@dataclass(frozen=True)
class Measurement:
    """What a network scores on one split, on which images, and some of those as pictures."""

    sentence: str  # what was measured on
    outputs: Outputs
    scores: Scores | TagScores
    reliability: Reliability
    mistakes: list[Picture]  # the most confident first
    uncertain: list[Picture]  # the least certain first, right or wrong
    suspects: list[Picture]  # with the class that is likelier than their label; the most doubtful first
    doubted: list[tuple[int, int]]  # all of them: row of the outputs, and that class


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
    return judge(net, out, split, samples, spec, data, several=several)


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
    net: nn.Module,
    out: Outputs,
    split: str,
    samples: Samples,
    spec: Preprocess,
    data: DataConfig,
    *,
    several: bool,
    thresholds: Sequence[float] = (),
) -> Measurement:
    """Score the logits that `net` gave, and find the pictures that explain them.

    `several`: they give an image any number of labels, each from its threshold on. Those that give one label are right,
    where an image has a set of them, with any of the set.
    """
    logits, labels = out.values.numpy(), out.labels.numpy()
    left_out = f"; {len(out.failures):,} could not be read" if out.failures else ""
    sentence = f"Measured on {len(labels):,} image{'s' * (len(labels) != 1)} of the {split}{left_out}."
    if labels.ndim == 2 and several:
        least = np.array(thresholds or [THRESHOLD] * len(samples.classes))
        return _judge_tags(sentence, out, Pictures(net, out, samples, spec, data), least)
    out = with_one_label(out)
    labels, classes = out.labels.numpy(), samples.classes
    probabilities = softmax(logits)
    pictures, answers = Pictures(net, out, samples, spec, data), probabilities.argmax(axis=1)
    wrong = confident_mistakes(logits, labels, pictures.most(MISTAKES))
    unsure = least_certain(logits, pictures.most(UNCERTAIN))
    suspects = suspected_labels(probabilities, labels)

    def asked(rows: np.ndarray, said: np.ndarray) -> list[Asked]:
        return [
            asked_of(row, other, int(labels[row]), probabilities[row], classes)
            for row, other in zip(rows, said, strict=True)
        ]

    return Measurement(
        sentence,
        out,
        score(logits, labels, classes),
        reliability(probabilities, labels),
        pictures.explained(asked(wrong, answers[wrong])),
        pictures.explained(asked(unsure, answers[unsure])),
        pictures.plain(asked(suspects.row[:SUSPECTS], suspects.rather[:SUSPECTS])),
        list(zip(suspects.row.tolist(), suspects.rather.tolist(), strict=True)),
    )


def with_one_label(out: Outputs) -> Outputs:
    """Where any label of a set is right, the one that ranks first decides, for top-1 and top-5 alike."""
    if out.labels.ndim == 1:
        return out
    best = torch.where(out.labels > 0, out.values, -torch.inf).argmax(dim=1)
    return replace(out, labels=best)


def _judge_tags(sentence: str, out: Outputs, pictures: Pictures, thresholds: np.ndarray) -> Measurement:
    """The same for images with any number of labels."""
    logits, truth, classes = out.values.numpy(), out.labels.numpy(), pictures.samples.classes
    chances = sigmoid(logits.astype(np.float64))
    worst = []
    for row, label in worst_tags(logits, truth, pictures.most(MISTAKES), thresholds):
        yes, no = (
            (classes[label], float(chances[row, label])),
            (f"not {classes[label]}", float(1 - chances[row, label])),
        )
        said, true = (no, yes) if truth[row, label] else (yes, no)
        worst.append(Asked(row, said, true, label))
    scores = score_tags(logits, truth, classes, thresholds=thresholds)
    reliable = tag_reliability(logits, truth, thresholds)
    return Measurement(sentence, out, scores, reliable, pictures.explained(worst), [], [], [])
