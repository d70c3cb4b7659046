"""The headline of a report: the one number, what it is measured against, and what it means in plain English."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from vitrail.metrics.accuracy import Scores
from vitrail.metrics.calibration import Reliability
from vitrail.metrics.multilabel import THRESHOLD, TagScores

THIN_SPACE = "\u202f"  # does not break
FEW_IMAGES = 300  # with fewer, a calibration error is mostly noise
FEW_OF_A_LABEL = 30  # images that have it, on average: with fewer, intervals hold the truth in less than 95 %
MANY_SUSPECTS = 0.1  # share of the labels: beyond, the network is likelier wrong than they are

Baseline = tuple[str, float]  # what it is, and its value of the headline number on the same images


@dataclass(frozen=True)
class Level:
    """One line of the headline's scale."""

    name: str
    value: float
    interval: tuple[float, float] | None = None


@dataclass(frozen=True)
class Summary:
    number: float
    interval: tuple[float, float]
    what: str  # the number is
    levels: list[Level]
    verdict: list[str]  # sentences
    stats: list[tuple[str, str]]  # (value, what it is)


def summarise(scores: Scores | TagScores, reliability: Reliability, baseline: Baseline | None) -> Summary:
    if isinstance(scores, TagScores):
        return _of_tags(scores, reliability)
    return _of_classes(scores, baseline)


def _of_classes(scores: Scores, baseline: Baseline | None) -> Summary:
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
    levels = [Level(*_guess(scores))]
    if baseline:
        levels.append(Level(*baseline))
    levels.append(Level("this model", scores.top1, scores.top1_interval))
    return Summary(scores.top1, scores.top1_interval, "top-1 accuracy", levels, verdict(scores, baseline), stats)


def verdict(scores: Scores, baseline: Baseline | None) -> list[str]:
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


def _of_tags(scores: TagScores, reliability: Reliability) -> Summary:
    halves = all(one.threshold == THRESHOLD for one in scores.per_class)
    at = "at a probability of one half" if halves else "each label at its own threshold"
    stats = [
        (percent(scores.micro_f1), f"F1 of all decisions for a label, {at}"),
        (percent(scores.exact), "images with every label right"),
        (percent(reliability.ece), "calibration error"),
        (f"{scores.nll:.3f}", "log-loss in nats, summed over the labels"),
        (f"{scores.n:,}", f"images with {len(scores.per_class):,} possible labels"),
    ]
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
    levels = [
        Level("a random order", scores.chance),
        Level("this model", scores.mean_ap, scores.mean_ap_interval),
    ]
    return Summary(scores.mean_ap, scores.mean_ap_interval, "mean average precision", levels, sentences, stats)


def suspicion_sentence(suspected: int, images: int, accuracy: float) -> str:
    """How many labels are doubted, and what to make of it."""
    few = suspected <= MANY_SUSPECTS * images
    begin = f"The network doubts the label of {suspected:,} of {images:,} images. "
    if few:
        return begin + "Those it doubts most come first."
    return (
        f"{begin}Measured test sets have some 3{THIN_SPACE}% of wrong labels, and a network that is right for "
        f"{percent(accuracy)} doubts many that are right: look at the first ones, and trust the count little."
    )


def calibration_sentence(found: Reliability, scores: Scores | TagScores) -> str:
    if found.ece < 0.0005:
        return "When it states a probability, that is off by less than 0.1 percentage points on average."
    if abs(found.overconfidence) < found.ece / 2:
        direction = "sometimes too high and sometimes too low"
    else:
        direction = "mostly too high" if found.overconfidence > 0 else "mostly too low"
    known = isinstance(scores, Scores) and scores.ece_chance is not None  # what chance gives: then that is told instead
    rough = " With so few images this number is rough." if scores.n < FEW_IMAGES and not known else ""
    return (
        f"When it states a probability, that is off by {100 * found.ece:.1f} percentage points on average, "
        f"{direction}.{rough}"
    )


def percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f}{THIN_SPACE}%"


def _between(interval: tuple[float, float] | None, tell: Callable[[float], str]) -> str:
    return "" if interval is None else f", {tell(interval[0])} to {tell(interval[1])}"


def _guess(scores: Scores) -> tuple[str, float]:
    """The best that can be had without looking at an image."""
    counts = [one.count for one in scores.per_class]
    if min(counts) == max(counts):
        return "guessing", 1 / len(counts)
    commonest = scores.per_class[int(np.argmax(counts))]
    return f"always answering “{_short(commonest.name)}”", commonest.count / scores.n


def _compared(scores: Scores, level: float) -> str:
    low, high = scores.top1_interval
    if high < level:
        return ": this model is worse"
    if low <= level:
        return ": the difference is within the uncertainty of this measurement"
    fewer = (scores.top1 - level) / (1 - level)
    return f": this model makes {100 * fewer:.0f}{THIN_SPACE}% fewer mistakes" if fewer < 1 else ""


def _short(name: str, longest: int = 40) -> str:
    return name if len(name) <= longest else name[: longest - 1].rstrip() + "…"
