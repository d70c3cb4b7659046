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
    MAX_MISTAKES,
    MIN_IMPROVEMENT,
    RECALL_AND_PRECISION,
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

FEW_IMAGES = 300  # with fewer, the calibration error is mostly noise
FEW_PER_LABEL = 30  # images per label, on average: with fewer, intervals cover the true value in less than 95 %


class Multilabel(CrossEntropy):
    """Each label is predicted on its own: by a threshold per label if the weights have them, else by 0.5."""

    name = "multilabel"
    abstains = False
    columns = ("name", "labels", "predictions")

    def correct(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The fraction of correct decisions over the classes; float32 (B,)."""
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
        thresholds = _thresholds(postprocess, classes) if threshold is None else [threshold] * classes
        best = probabilities.topk(classes, dim=-1)
        for indices, values in zip(best.indices.tolist(), best.values.tolist(), strict=True):
            ranked = list(zip(indices, values, strict=True))
            yield ranked[:top], [(label, p) for label, p in ranked if p >= thresholds[label]]

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
        mistakes = []
        for row, label in worst_decisions(
            logits, labels, MAX_MISTAKES, np.array(_thresholds(postprocess, len(classes)))
        ):
            p = probabilities[row, label]
            present, absent = (classes[label], float(p)), (f"not {classes[label]}", float(1 - p))
            predicted, true = (absent, present) if labels[row, label] else (present, absent)
            mistakes.append(Example(row, predicted, true, label))
        return Examples(mistakes)

    def rows(
        self,
        logits: np.ndarray,
        labels: np.ndarray,
        classes: Sequence[str],
        postprocess: Postprocess,
        examples: Examples,
    ) -> Iterator[tuple[str, ...]]:
        thresholds = np.asarray(_thresholds(postprocess, len(classes)))

        def join(mask: np.ndarray) -> str:
            return LABEL_SEPARATOR.join(classes[index] for index in np.flatnonzero(mask).tolist())

        for row, row_logits in enumerate(logits):
            yield join(labels[row]), join(sigmoid(row_logits.astype(np.float64)) >= thresholds)

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
        thresholds = np.array(_thresholds(postprocess, logits.shape[1]))
        return tune_multilabel(logits, labels, thresholds, postprocess.temperature, groups=groups)

    def to_postprocess(self, tuning: MultilabelTuning, before: Postprocess) -> tuple[dict[str, Any], list[str]]:
        """The temperature and thresholds to store. New thresholds must not be worse when cross-fitted."""
        if tuning.macro_f1 >= tuning.macro_f1_before:
            thresholds, message = tuning.thresholds, f"a threshold for each of {len(tuning.thresholds)} labels"
        else:
            factor = tuning.temperature / before.temperature
            thresholds = rescale_thresholds(np.array(before.thresholds), factor).tolist()
            message = "decisions unchanged, since new thresholds are worse when cross-fitted"
        return {"temperature": tuning.temperature, "thresholds": thresholds}, [message]

    def result(self, scores: MultilabelScores, baseline: Baseline | None = None) -> Result:
        default = all(label.threshold == THRESHOLD for label in scores.per_class)
        thresholds = "at a threshold of 0.5" if default else "at the threshold of each label"
        calibration = calibration_sentence(scores.reliability, scores.n < FEW_IMAGES)
        low, high = scores.mean_ap_interval
        f1 = "–" if scores.micro_f1 is None else f"{scores.micro_f1:.1%}"
        return Result(
            scores,
            summary=f"mean average precision [bold]{scores.mean_ap:.1%}[/] (95 % interval {low:.1%} to {high:.1%}; a "
            f"random ranking: {scores.chance:.1%}), all labels correct for {scores.exact:.1%} of the images",
            cells=[("mAP", f"{scores.mean_ap:.1%}"), ("F1", f1)],
            metric="mean average precision",
            levels=[
                Level("a random order", scores.chance),
                Level("this model", scores.mean_ap, scores.mean_ap_interval),
            ],
            verdict=multilabel_verdict(scores),
            stats=[
                (percent(scores.micro_f1), f"F1 over all labels (micro average), {thresholds}"),
                (percent(scores.exact), "images with all labels correct"),
                (percent(scores.reliability.ece), "calibration error"),
                (f"{scores.nll:.3f}", "log-loss in nats, summed over the labels"),
                (f"{scores.n:,}", f"images with {len(scores.per_class):,} possible labels"),
            ],
            purpose=f"It predicts for each of {len(scores.per_class):,} labels whether an image has it, and no others.",
            calibration=f"{calibration} {thresholds_sentence(scores)}".rstrip(),
            tuning=[thresholds_sentence(scores)],
            columns=[
                Column("average precision", "average_precision", in_card=False),
                Column("recall", "recall"),
                Column("precision", "precision"),
                Column("F1", "f1", in_card=False),
            ],
            column_notes=f"Average precision: how far its images rank above the others. {RECALL_AND_PRECISION}",
            map_target="the label",
        )


class MultilabelValidation(LabelValidation):
    """Keeps the logits of all images, which average precision ranks."""

    def __init__(self, task: Multilabel, name: str):
        super().__init__(task, name)
        self.batches: list[tuple[Tensor, Tensor]] = []

    def add(self, logits: Tensor, targets: Tensor) -> None:
        super().add(logits, targets)
        self.batches.append((logits.cpu(), (targets > 0.5).cpu()))

    def compute(self, ranks: Ranks) -> dict[str, float]:
        row = super().compute(ranks)
        pairs = [pair for batches in ranks.all_gather(self.batches) for pair in batches]
        logits, truth = (torch.cat(column).numpy() for column in zip(*pairs, strict=True))
        return row | {self.name: mean_average_precision(logits, truth)}


def multilabel_verdict(scores: MultilabelScores) -> list[str]:
    """Sentences: how many predictions are correct, and how the ranking compares with chance."""
    correct = round(scores.exact * scores.n)
    sentences = [
        f"All labels are correct for {correct:,} of {scores.n:,} images.",
        "Average precision measures how far images with a label rank above those without it. A random order would "
        f"score {percent(scores.chance)}.",
    ]
    if scores.mean_ap_interval[0] <= scores.chance:
        sentences.append("The difference is within the confidence interval.")
    counts = [label.count for label in scores.per_class if label.count]
    if np.mean(counts) < FEW_PER_LABEL:
        sentences.append(
            f"With only {np.mean(counts):.0f} images per label on average, the confidence interval is too narrow."
        )
    return sentences


def thresholds_sentence(scores: MultilabelScores) -> str:
    """How a threshold for each label would change F1; an empty string if it is unknown or not better."""
    if scores.tuned is None or scores.tuned.macro_f1 - scores.tuned.macro_f1_before <= MIN_IMPROVEMENT:
        return ""
    before, after = percent(scores.tuned.macro_f1_before), percent(scores.tuned.macro_f1)
    return f"With a threshold fitted for each label, mean F1 would increase from {before} to {after} (cross-fitted)."


def _thresholds(postprocess: Postprocess, classes: int) -> Sequence[float]:
    return postprocess.thresholds or [THRESHOLD] * classes
