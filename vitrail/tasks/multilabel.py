"""Multilabel classification: each image has any number of labels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrail.config.postprocess import Postprocess
from vitrail.data.sources.manifest import LABEL_SEPARATOR
from vitrail.distributed import Ranks
from vitrail.metrics.multilabel import (
    THRESHOLD,
    MultilabelScores,
    mean_average_precision,
    rescale_thresholds,
    score_multilabel,
    sigmoid,
    worst_decisions,
)
from vitrail.metrics.significance import PairedComparison, compare_multilabel
from vitrail.metrics.tuning import MultilabelTuning, tune_multilabel
from vitrail.tasks.cross_entropy import CrossEntropy, LabelValidation
from vitrail.tasks.result import (
    MISTAKES,
    RECALL_AND_PRECISION,
    WORTH,
    Baseline,
    Column,
    Example,
    Examples,
    Level,
    Result,
    calibration_sentence,
    percent,
)
from vitrail.tasks.task import Ranking

FEW_IMAGES = 300  # with fewer, a calibration error is mostly noise
FEW_OF_A_LABEL = 30  # images that have it, on average: with fewer, intervals hold the truth in less than 95 %


class Multilabel(CrossEntropy):
    """Each label is decided for itself, by a threshold of its own if the weights have them."""

    name = "multilabel"
    abstains = False
    columns = ("name", "labels", "predictions")

    def correct(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The share of classes that are decided correctly."""
        return ((logits > 0) == (targets > 0.5)).float().mean(-1)

    def hard_targets(self, logits: Tensor, probabilities: Tensor) -> Tensor:
        return (probabilities > 0.5).float()

    def validation(self) -> MultilabelValidation:
        return MultilabelValidation(self, "val_map")

    def probabilities(self, logits: Tensor) -> Tensor:
        return logits.sigmoid()

    def predictions(
        self, probabilities: Tensor, top: int, threshold: float | None, postprocess: Postprocess
    ) -> Iterator[tuple[Ranking, Ranking]]:
        classes = probabilities.shape[-1]
        least = _thresholds(postprocess, classes) if threshold is None else [threshold] * classes
        best = probabilities.topk(classes, dim=-1)
        for indices, values in zip(best.indices.tolist(), best.values.tolist(), strict=True):
            ranked = list(zip(indices, values, strict=True))
            yield ranked[:top], [(label, p) for label, p in ranked if p >= least[label]]

    def labels_of(self, logits: Tensor, labels: Tensor) -> Tensor:
        return labels

    def score(
        self, logits: np.ndarray, labels: np.ndarray, classes: Sequence[str], postprocess: Postprocess
    ) -> MultilabelScores:
        thresholds = np.array(_thresholds(postprocess, len(classes)))
        return score_multilabel(logits, labels, classes, thresholds=thresholds)

    def examples(
        self, logits: np.ndarray, labels: np.ndarray, classes: Sequence[str], postprocess: Postprocess
    ) -> Examples:
        probabilities = sigmoid(logits.astype(np.float64))
        worst = []
        for row, label in worst_decisions(logits, labels, MISTAKES, np.array(_thresholds(postprocess, len(classes)))):
            p = probabilities[row, label]
            yes, no = (classes[label], float(p)), (f"not {classes[label]}", float(1 - p))
            predicted, true = (no, yes) if labels[row, label] else (yes, no)
            worst.append(Example(row, predicted, true, label))
        return Examples(worst)

    def rows(
        self,
        logits: np.ndarray,
        labels: np.ndarray,
        classes: Sequence[str],
        postprocess: Postprocess,
        examples: Examples,
    ) -> Iterator[tuple[str, ...]]:
        least = np.asarray(_thresholds(postprocess, len(classes)))

        def named(marked: np.ndarray) -> str:
            return LABEL_SEPARATOR.join(classes[index] for index in np.flatnonzero(marked).tolist())

        for row, own in enumerate(logits):
            yield named(labels[row]), named(sigmoid(own.astype(np.float64)) >= least)

    def compare(self, first: np.ndarray, second: np.ndarray, labels: np.ndarray) -> PairedComparison:
        return compare_multilabel(first, second, labels)

    def tune(
        self,
        logits: np.ndarray,
        labels: np.ndarray,
        postprocess: Postprocess,
        accuracy: float | None,
        groups: np.ndarray | None,
    ) -> MultilabelTuning:
        now = np.array(_thresholds(postprocess, logits.shape[1]))
        return tune_multilabel(logits, labels, now, postprocess.temperature, groups=groups)

    def to_postprocess(self, tuning: MultilabelTuning, before: Postprocess) -> tuple[dict[str, Any], list[str]]:
        """Thresholds that do worse on images they were not fitted on are not taken."""
        if tuning.macro_f1 >= tuning.macro_f1_before:
            found, told = tuning.thresholds, f"a threshold for each of {len(tuning.thresholds)} labels"
        else:
            found = rescale_thresholds(np.array(before.thresholds), tuning.temperature / before.temperature).tolist()
            told = "labels decided as before: thresholds fitted on one half of the images do worse on the other"
        return {"temperature": tuning.temperature, "thresholds": found}, [told]

    def result(self, scores: MultilabelScores, baseline: Baseline | None = None) -> Result:
        halves = all(one.threshold == THRESHOLD for one in scores.per_class)
        at = "at a probability of one half" if halves else "each label at its own threshold"
        calibration = calibration_sentence(scores.reliability, scores.n < FEW_IMAGES)
        low, high = scores.mean_ap_interval
        f1 = "–" if scores.micro_f1 is None else f"{scores.micro_f1:.1%}"
        return Result(
            scores,
            line=f"mean average precision [bold]{scores.mean_ap:.1%}[/] (95 % interval {low:.1%} to {high:.1%}; a "
            f"random ranking: {scores.chance:.1%}), every label right for {scores.exact:.1%} of the images",
            cells=[("mAP", f"{scores.mean_ap:.1%}"), ("F1", f1)],
            what="mean average precision",
            levels=[
                Level("a random order", scores.chance),
                Level("this model", scores.mean_ap, scores.mean_ap_interval),
            ],
            verdict=verdict(scores),
            stats=[
                (percent(scores.micro_f1), f"F1 of all decisions for a label, {at}"),
                (percent(scores.exact), "images with every label right"),
                (percent(scores.reliability.ece), "calibration error"),
                (f"{scores.nll:.3f}", "log-loss in nats, summed over the labels"),
                (f"{scores.n:,}", f"images with {len(scores.per_class):,} possible labels"),
            ],
            purpose=f"It says of each of {len(scores.per_class):,} labels whether an image has it. "
            "It knows no other labels.",
            calibration=f"{calibration} {thresholds_sentence(scores)}".rstrip(),
            tuning=[thresholds_sentence(scores)],
            columns=[
                Column("average precision", "average_precision", in_card=False),
                Column("recall", "recall"),
                Column("precision", "precision"),
                Column("F1", "f1", in_card=False),
            ],
            about_columns=f"Average precision: how well its images rank before the others. {RECALL_AND_PRECISION}",
            about_maps="the label",
        )


class MultilabelValidation(LabelValidation):
    """Average precision ranks all images, so their logits are kept."""

    def __init__(self, task: Multilabel, name: str):
        super().__init__(task, name)
        self.found: list[tuple[Tensor, Tensor]] = []

    def keep(self, logits: Tensor, targets: Tensor) -> None:
        super().keep(logits, targets)
        self.found.append((logits.cpu(), (targets > 0.5).cpu()))

    def compute(self, ranks: Ranks) -> dict[str, float]:
        row = super().compute(ranks)
        pairs = [pair for part in ranks.all_gather(self.found) for pair in part]
        logits, truth = (torch.cat(column).numpy() for column in zip(*pairs, strict=True))
        return row | {self.name: mean_average_precision(logits, truth)}


def verdict(scores: MultilabelScores) -> list[str]:
    """How many are right, and what the ranking is worth."""
    right = round(scores.exact * scores.n)
    sentences = [
        f"It gets every label right for {right:,} of {scores.n:,} images.",
        "Average precision says how well the images that have a label rank before those that do not: a random order "
        f"would score {percent(scores.chance)}.",
    ]
    if scores.mean_ap_interval[0] <= scores.chance:
        sentences.append("The difference is within the uncertainty of this measurement.")
    counts = [one.count for one in scores.per_class if one.count]
    if np.mean(counts) < FEW_OF_A_LABEL:
        sentences.append(
            f"A label has {np.mean(counts):.0f} images on average: with so few the interval is too narrow."
        )
    return sentences


def thresholds_sentence(scores: MultilabelScores) -> str:
    """What thresholds of their own would do for the labels; empty if they were not sought, or do nothing."""
    if scores.tuned is None or scores.tuned.macro_f1 - scores.tuned.macro_f1_before <= WORTH:
        return ""
    before, after = percent(scores.tuned.macro_f1_before), percent(scores.tuned.macro_f1)
    return (
        f"With thresholds fitted to each label, mean F1 would go from {before} to {after}, on images that they were "
        "not fitted on."
    )


def _thresholds(postprocess: Postprocess, classes: int) -> Sequence[float]:
    return postprocess.thresholds or [THRESHOLD] * classes
