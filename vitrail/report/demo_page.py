"""The page of `vitrail demo`: one network from pre-trained and from random weights, on the same images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vitrail.metrics.accuracy import ClassificationScores
from vitrail.report.page import ReportImage, page_environment, write_text_file


@dataclass(frozen=True, eq=False)
class DemoRun:
    """One of the two trained networks."""

    name: str
    starting_weights: str
    scores: ClassificationScores
    report: str  # link, relative to the page


@dataclass(frozen=True, eq=False)
class DemoFacts:
    """The contents of the page."""

    subtitle: str
    measured_on: str  # a sentence
    verdict: Sequence[str]  # sentences
    runs: Sequence[DemoRun]  # the better one first
    images: Sequence[Sequence[ReportImage]]  # for each image, one per run
    commands: Sequence[str]


def write_demo_page(path: Path, facts: DemoFacts) -> None:
    write_text_file(path, page_environment().get_template("demo.html").render(facts=facts), "the page")
