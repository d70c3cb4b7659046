"""The page of `vitrail demo`: one network twice, after pre-training and from random weights, on the same images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vitrail.metrics.accuracy import ClassificationScores
from vitrail.report.page import ReportImage, page_environment, write_whole


@dataclass(frozen=True, eq=False)
class Half:
    """One of the two networks."""

    name: str
    about: str  # what it started from
    scores: ClassificationScores
    report: str  # beside the page


@dataclass(frozen=True, eq=False)
class DemoFacts:
    subtitle: str
    measured_on: str  # a sentence
    verdict: Sequence[str]  # sentences
    halves: Sequence[Half]  # the better first
    pictures: Sequence[Sequence[ReportImage]]  # of each image one for each half
    commands: Sequence[str]


def write_demo_page(path: Path, facts: DemoFacts) -> None:
    write_whole(path, page_environment().get_template("demo.html").render(facts=facts), "the page")
