"""Plots in the colours of the page, as SVG to embed or as standalone files.

An embedded plot takes its text colour from the page (`currentColor`) and its other colours from CSS variables with a
fallback, so it works on a light and on a dark page. The colours are blue, vermilion and green of the Okabe-Ito palette,
which colour-blind readers can distinguish.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vitrail.atomic import atomic_write
from vitrail.report.svg import inline_svg
from vitrail.terminal import is_printable

# Plots are drawn with these exact hex values, which PAGE_COLOURS replaces in the SVG. Cells of the confusion matrix
# have their own colours, since they contain white text.
INK, BLUE, RED, GREEN, CELL_BLUE, CELL_RED = "#010203", "#0072b2", "#d55e00", "#009e73", "#0072b1", "#d55e01"
PAGE_COLOURS = {
    INK: "currentColor",
    BLUE: f"var(--plot-blue, {BLUE})",
    RED: f"var(--plot-red, {RED})",
    GREEN: f"var(--plot-green, {GREEN})",
    CELL_BLUE: f"var(--cell-blue, {CELL_BLUE})",
    CELL_RED: f"var(--cell-red, {CELL_RED})",
}
BACKGROUND = '<rect class="page" width="100%" height="100%"/>'
# A standalone file includes the colours of the page, without CSS variables, which not every program supports.
STANDALONE_STYLE = f"""<style>svg {{ color: #201d1a }} .page {{ fill: #fbfaf6 }}
@media screen and (prefers-color-scheme: dark) {{ svg {{ color: #e9e4d9 }} .page {{ fill: #15161a }}
[style*="stroke: {BLUE}"] {{ stroke: #5b9be6 !important }} [style*="fill: {BLUE}"] {{ fill: #5b9be6 !important }}
[style*="stroke: {RED}"] {{ stroke: #f0884f !important }} [style*="fill: {RED}"] {{ fill: #f0884f !important }}
[style*="stroke: {GREEN}"] {{ stroke: #4fbf98 !important }}
[style*="fill: {GREEN}"] {{ fill: #4fbf98 !important }} }}</style>
{BACKGROUND}"""


def render_svg(paint: Callable[[Figure], None], width: int, height: int, alt: str, tight: bool = False) -> str:
    """Draw a figure of `width` x `height` CSS pixels and return its SVG; with `tight`, labels may extend it."""
    with style():
        figure = Figure(figsize=(width / 72, height / 72), layout=None if tight else "constrained")
        paint(figure)
        buffer = io.StringIO()
        options = {"bbox_inches": "tight", "pad_inches": 0.05} if tight else {}
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None}, **options)
    return inline_svg(buffer.getvalue(), alt, PAGE_COLOURS)


@dataclass(frozen=True)
class Plot:
    """A plot that is not yet drawn. `width` and `height` are CSS pixels."""

    alt: str
    width: int
    height: int
    paint: Callable[[Figure], None]

    def save(self, *paths: Path) -> str:
        """Draw the plot into .svg or .png files. Returns the SVG to embed in a page."""
        with style():
            figure = Figure(figsize=(self.width / 72, self.height / 72), layout="constrained")
            self.paint(figure)
            return inline_svg(save(figure, *paths), self.alt, PAGE_COLOURS)


def save(figure: Figure, *paths: Path) -> str:
    """Write a figure to .svg or .png files. Returns the SVG as matplotlib wrote it."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    document = buffer.getvalue()
    figure.set_layout_engine("none")  # keep the layout of the first savefig
    for path in paths:
        with atomic_write(path) as temporary:
            if path.suffix == ".png":
                figure.savefig(temporary, format="png", dpi=180, facecolor="#ffffff")
            else:
                opening, tag, rest = document.partition("<metadata>")
                temporary.write_text(
                    opening + STANDALONE_STYLE + tag + rest.replace(INK, "currentColor"), encoding="utf-8"
                )
    return document


def short_name(name: str, longest: int) -> str:
    """Shorten a class name for an axis; characters that XML does not allow become a dot."""
    clean = "".join(letter if is_printable(letter) else "·" for letter in str(name))
    return clean if len(clean) <= longest else clean[: longest - 1].rstrip() + "…"


def draw_level(axes: Axes, level: float, text: str, *, above: bool, side: Literal["left", "right"]) -> None:
    """Draw a labelled dashed line across the plot."""
    axes.axhline(level, color=RED, linewidth=1.5, linestyle=(0, (5, 3)))
    left = side == "left"
    axes.annotate(
        text,
        (0 if left else 1, level),
        xycoords=("axes fraction", "data"),
        xytext=(4 if left else -4, 4 if above else -4),
        textcoords="offset points",
        ha=side,
        va="bottom" if above else "top",
        color=RED,
    )


@contextmanager
def style() -> Iterator[None]:
    """Apply the style of all plots, whatever the matplotlib settings of the user."""
    faint = {"grid.color": INK, "grid.alpha": 0.12, "grid.linewidth": 0.8, "axes.grid": True, "axes.axisbelow": True}
    ink = dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor"), INK)
    spines = {"axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.8}
    text = {"font.size": 12, "axes.titlesize": 13, "axes.labelsize": 12, "xtick.labelsize": 11, "ytick.labelsize": 11}
    svg = {"svg.fonttype": "none", "svg.hashsalt": "vitrail", "text.parse_math": False, "text.usetex": False}
    settings = {**faint, **ink, **spines, **text, **svg}
    defaults = {k: v for k, v in matplotlib.rcParamsDefault.items() if not k.startswith(("backend", "interactive"))}
    with matplotlib.rc_context({**defaults, **settings}), warnings.catch_warnings():
        # The browser has glyphs that matplotlib's font lacks.
        warnings.filterwarnings("ignore", message=".*[Gg]lyph.*missing")
        yield
