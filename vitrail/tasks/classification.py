"""Classification: each image has one label."""

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
    MISTAKES,
    RECALL_AND_PRECISION,
    SUSPECTS,
    UNCERTAIN,
    WORTH,
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

FEW_IMAGES = 300  # with fewer, a calibration error is mostly noise
SAME = 1e-3  # share of a temperature, by which a fit to the very same images may miss it


class Classification(CrossEntropy):
    """Where an image has a set of labels, a prediction is right with any of them."""

    name = "classification"
    abstains = True
    # suggested_label: the class that is likelier than the label, where the label is in doubt
    columns = ("name", "label", "prediction", "probability", "label_probability", "suggested_label")

    def correct(self, logits: Tensor, targets: Tensor) -> Tensor:
        """1 where the likeliest class is the first of the targets, else 0."""
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
        least = postprocess.threshold if threshold is None else threshold
        best = probabilities.topk(min(top, probabilities.shape[-1]), dim=-1)
        for indices, values in zip(best.indices.tolist(), best.values.tolist(), strict=True):
            ranked = list(zip(indices, values, strict=True))
            yield ranked, [pair for pair in ranked[:1] if pair[1] >= least]

    def labels_of(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Of a set, the label that ranks first: it decides for top-1 and top-5 alike."""
        return labels if labels.ndim == 1 else torch.where(labels > 0, logits, -torch.inf).argmax(dim=1)

    def score(
        self, logits: np.ndarray, labels: np.ndarray, classes: Sequence[str], postprocess: Postprocess
    ) -> ClassificationScores:
        return score_classification(logits, labels, classes)

    def examples(
        self, logits: np.ndarray, labels: np.ndarray, classes: Sequence[str], postprocess: Postprocess
    ) -> Examples:
        probabilities = softmax(logits)
        wrong, unsure = most_confident_errors(logits, labels, MISTAKES), least_confident(logits, UNCERTAIN)
        suspects = find_label_issues(probabilities, labels)
        predicted = probabilities.argmax(axis=1)

        def of(rows: np.ndarray, named: np.ndarray) -> list[Example]:
            pairs = zip(rows.tolist(), named.tolist(), strict=True)
            return [example(row, one, int(labels[row]), probabilities[row], classes) for row, one in pairs]

        return Examples(
            of(wrong, predicted[wrong]),
            of(unsure, predicted[unsure]),
            of(suspects.row[:SUSPECTS], suspects.suggested[:SUSPECTS]),
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
            for row, own in enumerate(softmax(logits[part]), part.start):
                label, predicted = int(labels[row]), int(own.argmax())
                other = classes[examples.suggested[row]] if row in examples.suggested else ""
                stated = (f"{own[index]:.4f}" for index in (predicted, label))
                yield classes[label], classes[predicted], *stated, other

    def compare(self, first: np.ndarray, second: np.ndarray, labels: np.ndarray) -> PairedComparison:
        right = [
            logits.argmax(axis=1) == self.labels_of(torch.from_numpy(logits), torch.from_numpy(labels)).numpy()
            for logits in (first, second)
        ]
        return compare_correct(right[0], right[1])

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
        """A threshold that was stored before holds for the temperature before alone."""
        asked, stored = tuning.abstention, before.threshold
        if asked is not None and asked.threshold is not None:
            found = {"temperature": tuning.temperature, "threshold": asked.threshold}
            return found, [f"threshold {asked.threshold:.3f}"]
        none = "" if asked is None else f": none makes {100 * asked.accuracy:.4g} % of the answers right"
        if stored and abs(tuning.temperature / before.temperature - 1) < SAME:
            return {"temperature": before.temperature}, [f"threshold {stored:.3f} as before{none}"]
        told = [f"no threshold{none}"] if none or stored else []
        if stored:
            advice = "" if none else " (--target-accuracy finds one)"
            told[0] += f"{', and' if none else ':'} {stored:.3f} held for the temperature before{advice}"
        return {"temperature": tuning.temperature, "threshold": 0.0}, told

    def result(self, scores: ClassificationScores, baseline: Baseline | None = None) -> Result:
        stats = []
        if scores.top5 is not None:
            stats.append((percent(scores.top5), f"top-5 accuracy{_between(scores.top5_interval, percent)}"))
        chance = "" if scores.ece_chance is None else f"; by chance alone, up to {percent(scores.ece_chance)}"
        balanced = _between(scores.balanced_interval, percent)
        stats += [
            (percent(scores.balanced_accuracy), f"balanced accuracy{balanced}: every class counting the same"),
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
        rough = scores.n < FEW_IMAGES and scores.ece_chance is None  # what chance gives: then that is told instead
        return Result(
            scores,
            line=f"top-1 [bold]{scores.top1:.1%}[/] (95 % interval {low:.1%} to {high:.1%}){top5}, balanced "
            f"{scores.balanced_accuracy:.1%}, log-loss {scores.nll:.3f}, calibration error {scores.ece:.1%}",
            cells=cells,
            what="top-1 accuracy",
            levels=[
                Level(*_guess(scores)),
                *([Level(*baseline)] if baseline else []),
                Level("this model", scores.top1, scores.top1_interval),
            ],
            verdict=verdict(scores, baseline),
            stats=stats,
            purpose=f"It gives an image one of {len(scores.per_class):,} classes, with a probability. An image of "
            "something else gets one of these classes too, unless a threshold is set.",
            calibration=f"{calibration_sentence(scores.reliability, rough)} {temperature_sentence(scores)}".rstrip(),
            tuning=[temperature_sentence(scores), abstention_sentence(scores)],
            columns=[Column("recall", "recall"), Column("precision", "precision"), Column("F1", "f1", in_card=False)],
            about_columns=RECALL_AND_PRECISION,
            about_maps="the answer rather than the truth",
            confusion=scores.confusion,
            selective=_selective_prediction(scores),
        )


def example(row: int, predicted: int, truth: int, probabilities: np.ndarray, classes: Sequence[str]) -> Example:
    """With the reasons for what was predicted rather than the truth, or than the runner-up where they are one."""
    others = [int(k) for k in np.argsort(-probabilities, kind="stable")[:2] if k != predicted]
    rather = truth if truth != predicted else others[0] if others else None
    named = [(classes[label], float(probabilities[label])) for label in (predicted, truth)]
    return Example(row, named[0], named[1], predicted, rather)


def verdict(scores: ClassificationScores, baseline: Baseline | None) -> list[str]:
    """How many are right, and whether that beats guessing and the baseline."""
    right = round(scores.top1 * scores.n)
    sentences = [f"It names the right class for {right:,} of {scores.n:,} images."]
    guess, level = _guess(scores)
    better = scores.top1_interval[0] > level  # by far, usually; then the number says enough
    compared = "" if better else _compared(scores, level)
    sentences.append(f"{guess[0].upper()}{guess[1:]} would score {percent(level)}{compared}.")
    if baseline:
        name, level = baseline
        sentences.append(f"A baseline, {name}, scores {percent(level)}{_compared(scores, level)}.")
    return sentences


def temperature_sentence(scores: ClassificationScores) -> str:
    """Whether the calibration error is one, and what a temperature would do about it; empty if neither can be said."""
    if scores.ece_chance is not None and scores.ece <= scores.ece_chance:
        return (
            f"Perfect probabilities would show a calibration error of up to {percent(scores.ece_chance)} on so many "
            f"images by chance: {percent(scores.ece)} is no sign of a fault."
        )
    if scores.tuned is None or scores.ece - scores.tuned.ece <= WORTH:
        return ""
    return (
        f"A temperature of {scores.tuned.temperature:.3g} would take the calibration error from {percent(scores.ece)} "
        f"to {percent(scores.tuned.ece)}, on images it was not fitted on."
    )


def abstention_sentence(scores: ClassificationScores) -> str:
    """What came of the accuracy that was asked for; empty if none was."""
    if scores.tuned is None or scores.tuned.abstention is None:
        return ""
    asked = scores.tuned.abstention
    if asked.threshold is None:
        return f"No threshold makes {percent(asked.accuracy)} of the answers right with 95\u202f% confidence."
    begin = (
        f"Answers from a probability of {asked.threshold:.3f} on, at a temperature of {scores.tuned.temperature:.3g}: "
    )
    if asked.answered is None or asked.right is None:
        return f"{begin}at least {percent(asked.accuracy)} right by these images, too few to check it by halves."
    return (
        f"{begin}{percent(asked.right)} of them are right and {percent(asked.answered)} of the images get one, "
        "as checked by halves."
    )


def _selective_prediction(scores: ClassificationScores) -> SelectivePrediction | None:
    """Nothing where there are too few images to say anything."""
    tuned = scores.tuned
    rows = coverage_rows(tuned.coverage, scores.n) if tuned is not None else []
    if tuned is None or not rows:
        return None
    accuracy = tuned.abstention.accuracy if tuned.abstention is not None else None
    return SelectivePrediction(tuned.coverage, rows, tuned.temperature, accuracy, abstention_sentence(scores))


def _between(interval: tuple[float, float] | None, tell: Callable[[float], str]) -> str:
    return "" if interval is None else f", {tell(interval[0])} to {tell(interval[1])}"


def _guess(scores: ClassificationScores) -> tuple[str, float]:
    """The best that can be had without looking at an image."""
    counts = [one.count for one in scores.per_class]
    if min(counts) == max(counts):
        return "guessing", 1 / len(counts)
    commonest = scores.per_class[int(np.argmax(counts))]
    return f"always answering “{_short(commonest.name)}”", commonest.count / scores.n


def _compared(scores: ClassificationScores, level: float) -> str:
    low, high = scores.top1_interval
    if high < level:
        return ": this model is worse"
    if low <= level:
        return ": the difference is within the uncertainty of this measurement"
    fewer = (scores.top1 - level) / (1 - level)
    return f": this model makes {100 * fewer:.0f}\u202f% fewer mistakes" if fewer < 1 else ""


def _short(name: str, longest: int = 40) -> str:
    return name if len(name) <= longest else name[: longest - 1].rstrip() + "…"
