"""The final scores of any task as plain data, with the text about them. Reports, cards and the terminal render it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vitrail.metrics.calibration import Reliability
from vitrail.metrics.scores import Interval, Scores
from vitrail.metrics.selective import MIN_ANSWERED, RiskCoverageCurve, clopper_pearson_lower

THIN_SPACE = "\u202f"  # narrow no-break space
MIN_IMPROVEMENT = 0.005  # of the calibration error or of F1: tuning that improves less is not mentioned
MAX_MISTAKES, MAX_UNCERTAIN, MAX_SUSPECTS = 12, 6, 12  # examples in a report
COVERAGES = (1.0, 0.9, 0.75, 0.5, 0.25, 0.1)  # rows of the table of selective prediction

RECALL_AND_PRECISION = (
    "Recall: of the images of a class, the fraction predicted as that class. "
    "Precision: of the predictions of a class, the fraction that is correct."
)

Baseline = tuple[str, float]  # its name, and its headline score on the same images


@dataclass(frozen=True)
class Level:
    """A score to compare the headline score with."""

    name: str
    value: float
    interval: Interval | None = None


@dataclass(frozen=True)
class Column:
    """A column of the table of classes. `key` is an attribute of the items of `Scores.per_class`."""

    heading: str
    key: str
    in_card: bool = True


@dataclass(frozen=True)
class CoverageRow:
    """Accuracy if only the images with a probability of at least `threshold` get a prediction."""

    coverage: float  # fraction of the images
    accuracy: float
    accuracy_lower_bound: float  # 95 % confidence, one-sided
    threshold: float


@dataclass(frozen=True, eq=False)
class SelectivePrediction:
    """Selective prediction (abstention): accuracy against the fraction of images with a prediction."""

    coverage: RiskCoverageCurve
    rows: Sequence[CoverageRow]
    temperature: float
    accuracy: float | None  # the target, if there is one
    sentence: str  # how the target was met


@dataclass(frozen=True, eq=False)
class Result:
    """The scores of a network, and their description."""

    scores: Scores
    summary: str  # one line for the terminal, with the headline score in bold
    cells: Sequence[tuple[str, str]]  # (heading, value) in a table that compares networks
    metric: str  # name of the headline score
    levels: Sequence[Level]  # for comparison with the headline score; the network itself comes last
    verdict: Sequence[str]  # sentences
    stats: Sequence[tuple[str, str]]  # (value, name)
    purpose: str  # what the network predicts and what it does not, in sentences
    calibration: str  # sentences
    tuning: Sequence[str]  # sentences on the effect of tuned temperature and thresholds
    columns: Sequence[Column]  # of the table of classes, sorted by the first
    column_notes: str  # definitions of the columns, in sentences
    map_target: str = "the prediction"  # what a map of an example supports
    confusion: np.ndarray | None = None  # (K, K): rows are the truth, columns the prediction
    selective: SelectivePrediction | None = None

    @property
    def classes(self) -> list[Any]:
        """The scores of every class, lowest first."""
        key = self.columns[0].key

        def sort_key(class_scores: Any) -> tuple[bool, float, str]:
            value = getattr(class_scores, key)
            return value is None, value or 0.0, class_scores.name

        return sorted(self.scores.per_class, key=sort_key)


@dataclass(frozen=True)
class Example:
    """An image to show."""

    row: int  # of the logits
    predicted: tuple[str, float]  # label and its probability
    truth: tuple[str, float]
    map_class: int  # the class to draw a map for
    contrast_class: int | None = None  # the class to contrast it with


@dataclass(frozen=True)
class Examples:
    """Images to show in a report."""

    mistakes: Sequence[Example]  # the most confident first
    uncertain: Sequence[Example] = ()  # the least confident first, correct or not
    suspects: Sequence[Example] = ()  # likely label errors, the most likely first
    suggested: Mapping[int, int] = field(default_factory=dict)  # row -> suggested class, for all likely label errors


def coverage_rows(curve: RiskCoverageCurve, images: int) -> list[CoverageRow]:
    """The curve at round coverages, if at least MIN_ANSWERED images get a prediction."""
    points = [int(np.searchsorted(curve.coverage, coverage - 1e-9)) for coverage in COVERAGES]
    kept = [point for point in dict.fromkeys(points) if curve.coverage[point] * images >= MIN_ANSWERED]
    rows = []
    for point in kept:
        answered = round(curve.coverage[point] * images)
        lower_bound = clopper_pearson_lower(round(curve.accuracy[point] * answered), answered)
        coverage, accuracy = float(curve.coverage[point]), float(curve.accuracy[point])
        rows.append(CoverageRow(coverage, accuracy, lower_bound, float(curve.threshold[point])))
    return rows


def calibration_sentence(reliability: Reliability, few_images: bool) -> str:
    """How far the probabilities are off. `few_images` adds that this is a rough estimate."""
    if reliability.ece < 0.0005:
        return "Its probabilities are off by less than 0.1 percentage points on average."
    if abs(reliability.overconfidence) < reliability.ece / 2:
        direction = "sometimes too high and sometimes too low"
    else:
        direction = "mostly too high" if reliability.overconfidence > 0 else "mostly too low"
    note = " With so few images this is a rough estimate." if few_images else ""
    return f"Its probabilities are off by {100 * reliability.ece:.1f} percentage points on average, {direction}.{note}"


def percent(fraction: float | None) -> str:
    """Format a fraction as a percentage; None as a dash."""
    return "–" if fraction is None else f"{100 * fraction:.1f}{THIN_SPACE}%"
