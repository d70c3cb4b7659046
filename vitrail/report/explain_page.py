"""The page of `vitrail explain` and the figures on it as files: self-contained, light and dark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from markupsafe import Markup

from vitrail.atomic import whole_file
from vitrail.report.canvas import Drawing
from vitrail.report.explain_summary import Trust
from vitrail.report.page import page_environment

FIGURES = "figures"  # the folder beside the page


@dataclass(frozen=True, eq=False)
class Picture:
    """A figure on the page, and the name of its files."""

    file: str
    drawing: Drawing


@dataclass(frozen=True, eq=False)
class Looked:
    """An image with its answer and its figures."""

    name: str
    answer: str
    maps: Picture
    heads: Picture


@dataclass(frozen=True, eq=False)
class ExplainFacts:
    """What the page says. Sections whose facts are missing are left out, with a note that says why."""

    title: str
    subtitle: str
    query: str  # whose view maps of the whole network show
    block_query: str  # and maps of one block
    findings: Sequence[str]
    notes: Sequence[str]  # what could not be shown, and why
    images: Sequence[Looked] = ()
    filters: Picture | None = None
    similarity: Picture | None = None
    distances: Picture | None = None
    distance_images: int = 0
    curves: Picture | None = None
    pasted: Picture | None = None
    trust: Sequence[Trust] = ()
    measured: int = 0
    pasted_sentence: str = ""
    about: Sequence[tuple[str, str]] = field(default=())
    commands: Sequence[str] = ()

    @property
    def pictures(self) -> list[Picture]:
        single = (self.filters, self.similarity, self.distances, self.curves, self.pasted)
        return [one for one in single if one is not None] + [p for one in self.images for p in (one.maps, one.heads)]


def write_explanation(folder: Path, facts: ExplainFacts) -> None:
    """The page as explain.html, and each figure as SVG and PNG beside it."""
    figures = folder / FIGURES
    figures.mkdir(parents=True, exist_ok=True)
    drawn = {}
    for picture in facts.pictures:
        files = [figures / f"{picture.file}{suffix}" for suffix in (".svg", ".png")]
        drawn[picture.file] = Markup(picture.drawing.save(*files))
    text = page_environment().get_template("explain.html").render(facts=facts, folder=FIGURES, drawn=drawn)
    with whole_file(folder / "explain.html") as temporary:
        temporary.write_bytes(text.replace("\0", "\ufffd").encode("utf-8", errors="replace"))
