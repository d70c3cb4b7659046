"""Classification: each image has one class."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.config.postprocess import Postprocess
from vitrail.metrics.accuracy import (
    ClassificationScores,
    least_confident,
    most_confident_errors,
    row_chunks,
    score_classification,
    softmax,
)
from vitrail.metrics.label_errors import find_label_issues
from vitrail.metrics.significance import PairedComparison, compare_correct
from vitrail.metrics.tuning import Tuning, tune
from vitrail.tasks.cross_entropy import CrossEntropy, LabelValidation
from vitrail.tasks.result import (
    MAX_MISTAKES,
    MAX_SUSPECTS,
    MAX_UNCERTAIN,
    MIN_IMPROVEMENT,
    RECALL_AND_PRECISION,
    Baseline,
    Column,
    Example,
    Examples,
    Level,
    Result,
    SelectivePrediction,
    calibration_sentence,
    coverage_rows,
    percent,
)
from vitrail.tasks.task import Ranking

FEW_IMAGES = 300  # with fewer, the calibration error is mostly noise
SAME_TEMPERATURE = 1e-3  # relative difference between two fits on the same images


class Classification(CrossEntropy):
    """Each image has one class. If an image has several labels, a prediction of any of them is correct."""

    name = "classification"
    abstains = True
    # suggested_label: filled for likely label errors
    columns = ("name", "label", "prediction", "probability", "label_probability", "suggested_label")

    def correct(self, logits: Tensor, targets: Tensor) -> Tensor:
        """1 if the most probable class is that of the largest target, else 0; float32 (B,)."""
        return (logits.argmax(-1) == targets.argmax(-1)).float()

    def hard_targets(self, logits: Tensor, probabilities: Tensor) -> Tensor:
        return F.one_hot(logits.argmax(-1), logits.shape[-1]).float()

    def validation(self) -> LabelValidation:
        return LabelValidation(self, "val_top1")

    def probabilities(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1)

    def predictions(
        self, probabilities: Tensor, top: int, threshold: float | None, postprocess: Postprocess
    ) -> Iterator[tuple[Ranking, Ranking]]:
        threshold = postprocess.threshold if threshold is None else threshold
        best = probabilities.topk(min(top, probabilities.shape[-1]), dim=-1)
        for indices, values in zip(best.indices.tolist(), best.values.tolist(), strict=True):
            ranked = list(zip(indices, values, strict=True))
            yield ranked, [pair for pair in ranked[:1] if pair[1] >= threshold]

    def labels_of(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Replace a set of labels by the one with the largest logit, which decides top-1 and top-5 accuracy."""
        return labels if labels.ndim == 1 else torch.where(labels > 0, logits, -torch.inf).argmax(dim=1)

    def score(
        self, logits: np.ndarray, labels: np.ndarray, classes: Sequence[str], postprocess: Postprocess
    ) -> ClassificationScores:
        return score_classification(logits, labels, classes)

    def examples(
        self, logits: np.ndarray, labels: np.ndarray, classes: Sequence[str], postprocess: Postprocess
    ) -> Examples:
        probabilities = softmax(logits)
        mistakes, uncertain = (
            most_confident_errors(logits, labels, MAX_MISTAKES),
            least_confident(logits, MAX_UNCERTAIN),
        )
        suspects = find_label_issues(probabilities, labels)
        predicted = probabilities.argmax(axis=1)

        def make(rows: np.ndarray, shown: np.ndarray) -> list[Example]:
            pairs = zip(rows.tolist(), shown.tolist(), strict=True)
            return [example(row, label, int(labels[row]), probabilities[row], classes) for row, label in pairs]

        return Examples(
            make(mistakes, predicted[mistakes]),
            make(uncertain, predicted[uncertain]),
            make(suspects.row[:MAX_SUSPECTS], suspects.suggested[:MAX_SUSPECTS]),
            dict(zip(suspects.row.tolist(), suspects.suggested.tolist(), strict=True)),
        )

    def rows(
        self,
        logits: np.ndarray,
        labels: np.ndarray,
        classes: Sequence[str],
        postprocess: Postprocess,
        examples: Examples,
    ) -> Iterator[tuple[str, ...]]:
        for part in row_chunks(*logits.shape):
            for row, probabilities in enumerate(softmax(logits[part]), part.start):
                label, predicted = int(labels[row]), int(probabilities.argmax())
                suggested = classes[examples.suggested[row]] if row in examples.suggested else ""
                formatted = (f"{probabilities[index]:.4f}" for index in (predicted, label))
                yield classes[label], classes[predicted], *formatted, suggested

    def compare(self, first: np.ndarray, second: np.ndarray, labels: np.ndarray) -> PairedComparison:
        correct = [
            logits.argmax(axis=1) == self.labels_of(torch.from_numpy(logits), torch.from_numpy(labels)).numpy()
            for logits in (first, second)
        ]
        return compare_correct(correct[0], correct[1])

    def tune(
        self,
        logits: np.ndarray,
        labels: np.ndarray,
        postprocess: Postprocess,
        accuracy: float | None,
        groups: np.ndarray | None,
    ) -> Tuning:
        return tune(logits, labels, accuracy, postprocess.temperature, groups=groups)

    def to_postprocess(self, tuning: Tuning, before: Postprocess) -> tuple[dict[str, Any], list[str]]:
        """The temperature and threshold to store. A stored threshold is only kept if the temperature stays the same."""
        abstention, stored = tuning.abstention, before.threshold
        if abstention is not None and abstention.threshold is not None:
            changes = {"temperature": tuning.temperature, "threshold": abstention.threshold}
            return changes, [f"threshold {abstention.threshold:.3f}"]
        unmet = "" if abstention is None else f"no threshold reaches an accuracy of {100 * abstention.accuracy:.4g} %"
        if stored and abs(tuning.temperature / before.temperature - 1) < SAME_TEMPERATURE:
            kept = f"threshold {stored:.3f} (unchanged{': ' + unmet if unmet else ''})"
            return {"temperature": before.temperature}, [kept]
        message = []
        if stored:
            reason = unmet or "--target-accuracy fits a new one"
            message = [f"threshold {stored:.3f} removed, since it was for the previous temperature ({reason})"]
        elif unmet:
            message = [unmet]
        return {"temperature": tuning.temperature, "threshold": 0.0}, message

    def result(self, scores: ClassificationScores, baseline: Baseline | None = None) -> Result:
        stats = []
        if scores.top5 is not None:
            stats.append((percent(scores.top5), f"top-5 accuracy{_between(scores.top5_interval, percent)}"))
        chance = "" if scores.ece_chance is None else f"; up to {percent(scores.ece_chance)} by chance alone"
        balanced = _between(scores.balanced_interval, percent)
        stats += [
            (percent(scores.balanced_accuracy), f"balanced accuracy{balanced}: mean recall of the classes"),
            (percent(scores.ece), f"calibration error{chance}"),
            (f"{scores.nll:.3f}", f"log-loss in nats{_between(scores.nll_interval, lambda value: f'{value:.3f}')}"),
            (f"{scores.n:,}", f"images in {len(scores.per_class):,} classes"),
        ]
        low, high = scores.top1_interval
        top5 = f", top-5 {scores.top5:.1%}" if scores.top5 is not None else ""
        cells = [
            ("top-1", f"{scores.top1:.1%}"),
            ("balanced", f"{scores.balanced_accuracy:.1%}"),
            ("log-loss", f"{scores.nll:.3f}"),
            ("cal. error", f"{scores.ece:.1%}"),
        ]
        few_images = scores.n < FEW_IMAGES and scores.ece_chance is None  # else the error by chance is stated
        calibration = calibration_sentence(scores.reliability, few_images)
        return Result(
            scores,
            summary=f"top-1 [bold]{scores.top1:.1%}[/] (95 % interval {low:.1%} to {high:.1%}){top5}, balanced "
            f"{scores.balanced_accuracy:.1%}, log-loss {scores.nll:.3f}, calibration error {scores.ece:.1%}",
            cells=cells,
            metric="top-1 accuracy",
            levels=[
                Level(*_guessing(scores)),
                *([Level(*baseline)] if baseline else []),
                Level("this model", scores.top1, scores.top1_interval),
            ],
            verdict=classification_verdict(scores, baseline),
            stats=stats,
            purpose=f"The model predicts one of {len(scores.per_class):,} classes for an image, with a probability. It "
            "also predicts one of these classes for an image of something else, unless you set a threshold.",
            calibration=f"{calibration} {temperature_sentence(scores)}".rstrip(),
            tuning=[temperature_sentence(scores), abstention_sentence(scores)],
            columns=[Column("recall", "recall"), Column("precision", "precision"), Column("F1", "f1", in_card=False)],
            column_notes=RECALL_AND_PRECISION,
            map_target="the prediction rather than the true class",
            confusion=scores.confusion,
            selective=_selective_prediction(scores),
        )


def example(row: int, predicted: int, truth: int, probabilities: np.ndarray, classes: Sequence[str]) -> Example:
    """An example with a map of the predicted class against the true class, or if they are the same, the runner-up."""
    others = [int(k) for k in np.argsort(-probabilities, kind="stable")[:2] if k != predicted]
    contrast = truth if truth != predicted else others[0] if others else None
    shown, true = ((classes[label], float(probabilities[label])) for label in (predicted, truth))
    return Example(row, shown, true, predicted, contrast)


def classification_verdict(scores: ClassificationScores, baseline: Baseline | None) -> list[str]:
    """Sentences: how many predictions are correct, compared with guessing and the baseline."""
    correct = round(scores.top1 * scores.n)
    sentences = [f"The model predicts the correct class for {correct:,} of {scores.n:,} images."]
    guess, level = _guessing(scores)
    compared = "" if scores.top1_interval[0] > level else _compare(scores, level)
    sentences.append(f"{guess[0].upper()}{guess[1:]} would score {percent(level)}{compared}.")
    if baseline:
        name, level = baseline
        sentences.append(f"The baseline, {name}, scores {percent(level)}{_compare(scores, level)}.")
    return sentences


def temperature_sentence(scores: ClassificationScores) -> str:
    """Whether the calibration error is more than chance, and how a temperature would change it; or an empty string."""
    if scores.ece_chance is not None and scores.ece <= scores.ece_chance:
        return (
            f"With this number of images, perfect probabilities can have a calibration error of up to "
            f"{percent(scores.ece_chance)} by chance. So {percent(scores.ece)} does not show miscalibration."
        )
    if scores.tuned is None or scores.ece - scores.tuned.ece <= MIN_IMPROVEMENT:
        return ""
    return (
        f"A temperature of {scores.tuned.temperature:.3g} would reduce the calibration error from "
        f"{percent(scores.ece)} to {percent(scores.tuned.ece)} (cross-fitted)."
    )


def abstention_sentence(scores: ClassificationScores) -> str:
    """The threshold for the target accuracy, and what it gives; an empty string without a target."""
    if scores.tuned is None or scores.tuned.abstention is None:
        return ""
    abstention = scores.tuned.abstention
    if abstention.threshold is None:
        return f"No threshold gives an accuracy of {percent(abstention.accuracy)} with 95\u202f% confidence."
    begin = (
        f"With a threshold of {abstention.threshold:.3f} on the probability, at temperature "
        f"{scores.tuned.temperature:.3g}, "
    )
    if abstention.answered is None or abstention.right is None:
        return (
            f"{begin}at least {percent(abstention.accuracy)} of the predictions on these images are correct. "
            "There are too few images to measure this on images that were not used for the fit."
        )
    return (
        f"{begin}{percent(abstention.answered)} of the images get a prediction, and {percent(abstention.right)} of "
        "these are correct (cross-fitted)."
    )


def _selective_prediction(scores: ClassificationScores) -> SelectivePrediction | None:
    """None if there are too few images."""
    tuned = scores.tuned
    rows = coverage_rows(tuned.coverage, scores.n) if tuned is not None else []
    if tuned is None or not rows:
        return None
    accuracy = tuned.abstention.accuracy if tuned.abstention is not None else None
    return SelectivePrediction(tuned.coverage, rows, tuned.temperature, accuracy, abstention_sentence(scores))


def _between(interval: tuple[float, float] | None, format_value: Callable[[float], str]) -> str:
    return "" if interval is None else f", {format_value(interval[0])} to {format_value(interval[1])}"


def _guessing(scores: ClassificationScores) -> tuple[str, float]:
    """The best strategy that ignores the image, and its accuracy."""
    counts = [class_scores.count for class_scores in scores.per_class]
    if min(counts) == max(counts):
        return "guessing", 1 / len(counts)
    most_common = scores.per_class[int(np.argmax(counts))]
    return f"always predicting “{_shorten(most_common.name)}”", most_common.count / scores.n


def _compare(scores: ClassificationScores, level: float) -> str:
    low, high = scores.top1_interval
    if high < level:
        return ": this model is worse"
    if low <= level:
        return ": the difference is within the confidence interval"
    reduction = (scores.top1 - level) / (1 - level)
    return f": this model makes {100 * reduction:.0f}\u202f% fewer errors" if reduction < 1 else ""


def _shorten(name: str, max_length: int = 40) -> str:
    return name if len(name) <= max_length else name[: max_length - 1].rstrip() + "…"
