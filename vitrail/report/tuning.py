"""What tuning found, in words and in rows: temperature, thresholds of labels, and answering less."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vitrail.metrics.abstain import FEWEST, Coverage, lower_bound
from vitrail.metrics.accuracy import Scores
from vitrail.metrics.multilabel import TagScores
from vitrail.report.summary import percent

WORTH = 0.005  # of a calibration error or of F1, that tuning has to change to be worth a line
SHARES = (1.0, 0.9, 0.75, 0.5, 0.25, 0.1)  # of the images, that a table tells of


@dataclass(frozen=True)
class Answered:
    """What answering only the surest images gives."""

    share: float
    right: float
    at_least: float  # with 95 % confidence
    threshold: float


def answered_rows(curve: Coverage, images: int) -> list[Answered]:
    """For round shares of the images, as long as enough of them are answered to say anything."""
    places = [int(np.searchsorted(curve.coverage, share - 1e-9)) for share in SHARES]
    kept = [place for place in dict.fromkeys(places) if curve.coverage[place] * images >= FEWEST]
    return [
        Answered(
            float(curve.coverage[place]),
            float(curve.accuracy[place]),
            lower_bound(round(curve.accuracy[place] * answered), answered),
            float(curve.threshold[place]),
        )
        for place in kept
        for answered in [round(curve.coverage[place] * images)]
    ]


def temperature_sentence(scores: Scores) -> str:
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


def abstention_sentence(scores: Scores) -> str:
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


def thresholds_sentence(scores: TagScores) -> str:
    """What thresholds of their own would do for several labels; empty if they were not sought, or do nothing."""
    if scores.tuned is None or scores.tuned.macro_f1 - scores.tuned.macro_f1_before <= WORTH:
        return ""
    before, after = percent(scores.tuned.macro_f1_before), percent(scores.tuned.macro_f1)
    return (
        f"With thresholds fitted to each label, mean F1 would go from {before} to {after}, on images that they were "
        "not fitted on."
    )
