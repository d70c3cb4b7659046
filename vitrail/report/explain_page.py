"""The page of `vitrail explain`, and its figures as files."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from markupsafe import Markup

from vitrail import strict_json
from vitrail.atomic import atomic_write
from vitrail.errors import UserError
from vitrail.report.canvas import BACKGROUND, Plot
from vitrail.report.explain_summary import MapScore
from vitrail.report.page import page_environment, write_text_file

FIGURES = "figures"  # the folder next to the page
PAGE, NUMBERS = "explain.html", "explain.json"
SUFFIXES = (".svg", ".png")
FIGURE_FILE = re.compile(rf"{FIGURES}/[a-z0-9-]+\.(svg|png)")  # files with other names are never removed


@dataclass(frozen=True, eq=False)
class PageFigure:
    """A figure of the page and the name of its files, without suffix."""

    file: str
    plot: Plot


@dataclass(frozen=True, eq=False)
class ExplainedImage:
    """An image with its prediction and its figures."""

    name: str
    prediction: str
    maps: PageFigure
    heads: PageFigure


@dataclass(frozen=True, eq=False)
class ExplainFacts:
    """The contents of the page. A section without contents is omitted; a note says why."""

    title: str
    subtitle: str
    query: str  # the token that maps of the whole network are computed for
    block_query: str  # the token that maps of one block are computed for
    uses_votes: bool  # class maps show the votes of patches, not relevance
    findings: Sequence[str]
    notes: Sequence[str]  # what could not be computed, and why
    images: Sequence[ExplainedImage] = ()
    filters: PageFigure | None = None
    similarity: PageFigure | None = None
    distances: PageFigure | None = None
    distance_images: int = 0
    curves: PageFigure | None = None
    pasted: PageFigure | None = None
    map_scores: Sequence[MapScore] = ()
    measured: int = 0  # images that the maps were measured on
    pasted_sentence: str = ""
    about: Sequence[tuple[str, str]] = field(default=())
    commands: Sequence[str] = ()

    @property
    def files(self) -> list[str]:
        """Paths of all figure files, relative to the page."""
        return [f"{FIGURES}/{figure.file}{suffix}" for figure in self.figures for suffix in SUFFIXES]

    @property
    def figures(self) -> list[PageFigure]:
        single = (self.filters, self.similarity, self.distances, self.curves, self.pasted)
        of_images = [figure for image in self.images for figure in (image.maps, image.heads)]
        return [figure for figure in single if figure is not None] + of_images


def write_explanation(folder: Path, facts: ExplainFacts, numbers: dict[str, Any]) -> None:
    """Write the page, each figure as SVG and PNG, and the numbers as JSON with a list of the figure files.

    Figure files that an earlier explanation listed and this one does not write are removed.
    """
    check_figures(folder, facts.figures)
    (folder / FIGURES).mkdir(parents=True, exist_ok=True)
    svgs = {}
    for figure in facts.figures:
        files = [folder / FIGURES / f"{figure.file}{suffix}" for suffix in SUFFIXES]
        svgs[figure.file] = Markup(figure.plot.save(*files))
    text = page_environment().get_template(PAGE).render(facts=facts, folder=FIGURES, svgs=svgs)
    write_text_file(folder / PAGE, text, "the page")
    for name in _earlier_figures(folder) - set(facts.files):
        (folder / name).unlink(missing_ok=True)
    with atomic_write(folder / NUMBERS) as temporary:
        temporary.write_text(strict_json.dumps(numbers, indent=1) + "\n", encoding="utf-8")


def check_figures(folder: Path, figures: Sequence[PageFigure] = ()) -> None:
    """Raise an error if a figure would replace a file that vitrail did not write, or be written through a link."""
    if (folder / FIGURES).is_symlink():
        raise UserError(f"{folder / FIGURES} is a link: choose another --out")
    for figure in figures:
        paths = [folder / FIGURES / f"{figure.file}{suffix}" for suffix in SUFFIXES]
        existing = next((path for path in paths if os.path.lexists(path)), None)
        is_vitrail = paths[0].is_file() and BACKGROUND in paths[0].read_text(encoding="utf-8", errors="replace")
        if existing is not None and not is_vitrail:
            raise UserError(f"{existing} was not written by vitrail and would be replaced: choose another --out")


def _earlier_figures(folder: Path) -> set[str]:
    """Return the figure files that an earlier explanation listed."""
    try:
        listed = strict_json.loads((folder / NUMBERS).read_text(encoding="utf-8"))["figures"]
        return {name for name in listed if FIGURE_FILE.fullmatch(name)}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return set()  # no earlier explanation, or another program's file
