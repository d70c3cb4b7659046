"""The page of `vitrail explain` and the figures on it as files: self-contained, light and dark."""

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
from vitrail.report.canvas import PAPER, Plot
from vitrail.report.explain_summary import MapScore
from vitrail.report.page import page_environment
from vitrail.terminal import printable_text

FIGURES = "figures"  # the folder beside the page
PAGE, NUMBERS = "explain.html", "explain.json"
SUFFIXES = (".svg", ".png")
OWN_FILE = re.compile(rf"{FIGURES}/[a-z0-9-]+\.(svg|png)")  # no other name is removed, whatever a list says


@dataclass(frozen=True, eq=False)
class PageFigure:
    """A figure on the page, and the name of its files."""

    file: str
    drawing: Plot


@dataclass(frozen=True, eq=False)
class ExplainedImage:
    """An image with its answer and its figures."""

    name: str
    answer: str
    maps: PageFigure
    heads: PageFigure


@dataclass(frozen=True, eq=False)
class ExplainFacts:
    """What the page says. Sections whose facts are missing are left out, with a note that says why."""

    title: str
    subtitle: str
    query: str  # whose view maps of the whole network show
    block_query: str  # and maps of one block
    votes: bool  # whether maps of a class show votes of patches, and not relevance
    findings: Sequence[str]
    notes: Sequence[str]  # what could not be shown, and why
    images: Sequence[ExplainedImage] = ()
    filters: PageFigure | None = None
    similarity: PageFigure | None = None
    distances: PageFigure | None = None
    distance_images: int = 0
    curves: PageFigure | None = None
    pasted: PageFigure | None = None
    trust: Sequence[MapScore] = ()
    measured: int = 0
    pasted_sentence: str = ""
    about: Sequence[tuple[str, str]] = field(default=())
    commands: Sequence[str] = ()

    @property
    def files(self) -> list[str]:
        """Where figures are written, from the folder of the page."""
        return [f"{FIGURES}/{picture.file}{suffix}" for picture in self.pictures for suffix in SUFFIXES]

    @property
    def pictures(self) -> list[PageFigure]:
        single = (self.filters, self.similarity, self.distances, self.curves, self.pasted)
        return [one for one in single if one is not None] + [p for one in self.images for p in (one.maps, one.heads)]


def write_explanation(folder: Path, facts: ExplainFacts, numbers: dict[str, Any]) -> None:
    """The page, each figure as SVG and PNG beside it, and the numbers, which list the files of figures. Those that an
    earlier explanation listed, and this one does not have, are removed."""
    check_figures(folder, facts.pictures)
    (folder / FIGURES).mkdir(parents=True, exist_ok=True)
    drawn = {}
    for picture in facts.pictures:
        files = [folder / FIGURES / f"{picture.file}{suffix}" for suffix in SUFFIXES]
        drawn[picture.file] = Markup(picture.drawing.save(*files))
    text = page_environment().get_template(PAGE).render(facts=facts, folder=FIGURES, drawn=drawn)
    with atomic_write(folder / PAGE) as temporary:
        temporary.write_bytes(printable_text(text.replace("\0", "\ufffd")).encode("utf-8", errors="replace"))
    for name in _earlier(folder) - set(facts.files):
        (folder / name).unlink(missing_ok=True)
    with atomic_write(folder / NUMBERS) as temporary:
        temporary.write_text(strict_json.dumps(numbers, indent=1) + "\n", encoding="utf-8")


def check_figures(folder: Path, pictures: Sequence[PageFigure] = ()) -> None:
    """That no figure of somebody else's is replaced, and nothing is written through a link."""
    if (folder / FIGURES).is_symlink():
        raise UserError(f"{folder / FIGURES} is a link: choose another --out")
    for picture in pictures:
        paths = [folder / FIGURES / f"{picture.file}{suffix}" for suffix in SUFFIXES]
        drawn = next((path for path in paths if os.path.lexists(path)), None)
        own = paths[0].is_file() and PAPER in paths[0].read_text(encoding="utf-8", errors="replace")
        if drawn is not None and not own:
            raise UserError(f"{drawn} was not written by vitrail and would be replaced: choose another --out")


def _earlier(folder: Path) -> set[str]:
    """Files of figures that an earlier explanation wrote here."""
    try:
        listed = strict_json.loads((folder / NUMBERS).read_text(encoding="utf-8"))["figures"]
        return {name for name in listed if OWN_FILE.fullmatch(name)}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return set()  # there was none, or it is not ours
