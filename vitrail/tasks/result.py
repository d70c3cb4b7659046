"""Final scores as plain data: what a report shows of them, whatever the task. A page, a card and the terminal only
render it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vitrail.metrics.calibration import Reliability
from vitrail.metrics.scores import Interval, Scores
from vitrail.metrics.selective import MIN_ANSWERED, RiskCoverageCurve, clopper_pearson_lower

THIN_SPACE = "\u202f"  # does not break
WORTH = 0.005  # of a calibration error or of F1, that tuning has to change to be worth a line
MISTAKES, UNCERTAIN, SUSPECTS = 12, 6, 12  # examples in a report, at most
SHARES = (1.0, 0.9, 0.75, 0.5, 0.25, 0.1)  # of the images, that a table tells of

RECALL_AND_PRECISION = (
    "Recall: share of a class's images that were found. Precision: share of the answers naming it that were right."
)

Baseline = tuple[str, float]  # what it is, and its value of the headline number on the same images


@dataclass(frozen=True)
class Level:
    """One line of the headline's scale."""

    name: str
    value: float
    interval: Interval | None = None


@dataclass(frozen=True)
class Column:
    """A number of every class; `key` names it in `Scores.per_class`."""

    heading: str
    key: str
    in_card: bool = True


@dataclass(frozen=True)
class CoverageRow:
    """What answering only the surest images gives."""

    share: float
    right: float
    at_least: float  # with 95 % confidence
    threshold: float


@dataclass(frozen=True, eq=False)
class SelectivePrediction:
    """Accuracy against the share of images that get a prediction."""

    coverage: RiskCoverageCurve
    rows: Sequence[CoverageRow]
    temperature: float
    accuracy: float | None  # that was asked for
    sentence: str  # what came of it


@dataclass(frozen=True, eq=False)
class Result:
    """The scores of a network, and what there is to say of them."""

    scores: Scores
    line: str  # of the terminal, with the headline in bold
    cells: Sequence[tuple[str, str]]  # (heading, number) of a table that compares networks
    what: str  # the headline is
    levels: Sequence[Level]  # to see the headline against; the network itself comes last
    verdict: Sequence[str]  # sentences
    stats: Sequence[tuple[str, str]]  # (value, what it is)
    purpose: str  # what the network predicts, and what it does not
    calibration: str  # sentences
    tuning: Sequence[str]  # sentences on what temperature and thresholds would change
    columns: Sequence[Column]  # of the table of classes, which is sorted by the first
    about_columns: str  # what they mean, in sentences
    about_maps: str = "the answer"  # what a map of the network's reasons speaks for
    confusion: np.ndarray | None = None  # (K, K): rows are the truth, columns the prediction
    selective: SelectivePrediction | None = None

    @property
    def classes(self) -> list[Any]:
        """The scores of every class, the weakest first."""
        key = self.columns[0].key

        def worst_first(one: Any) -> tuple[bool, float, str]:
            value = getattr(one, key)
            return value is None, value or 0.0, one.name

        return sorted(self.scores.per_class, key=worst_first)


@dataclass(frozen=True)
class Example:
    """An image to show, by its row of the logits."""

    row: int
    predicted: tuple[str, float]  # with its probability
    truth: tuple[str, float]
    why: int  # the class whose map is wanted
    rather: int | None = None  # and the one it is set against


@dataclass(frozen=True)
class Examples:
    """Images to look at, of each kind as many as a report shows at most."""

    mistakes: Sequence[Example]  # the most confident first
    uncertain: Sequence[Example] = ()  # the least certain first, right or wrong
    suspects: Sequence[Example] = ()  # whose label is doubted, with the likelier class; the most doubtful first
    suggested: Mapping[int, int] = field(default_factory=dict)  # of all rows whose label is doubted, that class


def coverage_rows(curve: RiskCoverageCurve, images: int) -> list[CoverageRow]:
    """For round shares of the images, as long as enough of them are answered to say anything."""
    places = [int(np.searchsorted(curve.coverage, share - 1e-9)) for share in SHARES]
    kept = [place for place in dict.fromkeys(places) if curve.coverage[place] * images >= MIN_ANSWERED]
    return [
        CoverageRow(
            float(curve.coverage[place]),
            float(curve.accuracy[place]),
            clopper_pearson_lower(round(curve.accuracy[place] * answered), answered),
            float(curve.threshold[place]),
        )
        for place in kept
        for answered in [round(curve.coverage[place] * images)]
    ]


def calibration_sentence(found: Reliability, rough: bool) -> str:
    """How far stated probabilities are off; `rough`: images are few, and nothing else says so."""
    if found.ece < 0.0005:
        return "When it states a probability, that is off by less than 0.1 percentage points on average."
    if abs(found.overconfidence) < found.ece / 2:
        direction = "sometimes too high and sometimes too low"
    else:
        direction = "mostly too high" if found.overconfidence > 0 else "mostly too low"
    more = " With so few images this number is rough." if rough else ""
    return (
        f"When it states a probability, that is off by {100 * found.ece:.1f} percentage points on average, "
        f"{direction}.{more}"
    )


def percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f}{THIN_SPACE}%"
