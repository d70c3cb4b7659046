"""Plots of evaluation, as SVG to embed in a page."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator, PercentFormatter

from vitrail.metrics.calibration import Reliability
from vitrail.metrics.selective import MIN_ANSWERED, RiskCoverageCurve, clopper_pearson_lower
from vitrail.report.canvas import BLUE, CELL_BLUE, CELL_RED, INK, RED, draw_level, render_svg, short_name

MAX_CLASSES_WITH_COUNTS = 20  # with more classes, a count does not fit its cell
MAX_CLASSES = 40  # with more classes, only the most confused ones are shown
# Maximum number of classes: cell size in pixels
CELL_SIZES = {4: 64, 12: 38, MAX_CLASSES_WITH_COUNTS: 30, MAX_CLASSES: 18}


def confusion_matrix(confusion: np.ndarray, classes: Sequence[str]) -> str:
    """Plot the confusion matrix of `most_confused_classes`, normalised over each row."""
    shown = most_confused_classes(confusion)
    totals = np.maximum(1, confusion.sum(axis=1))[shown, None]
    counts = confusion[np.ix_(shown, shown)]
    labels = [short_name(classes[i], 20) for i in shown]
    cell = next(size for limit, size in CELL_SIZES.items() if len(shown) <= limit)
    side = len(shown) * cell
    return render_svg(
        lambda figure: _matrix(figure, counts, counts / totals, labels), side, side, "Confusion matrix", tight=True
    )


def most_confused_classes(confusion: np.ndarray) -> np.ndarray:
    """Return the classes that the confusion matrix shows: all, or those in the most frequent errors."""
    if len(confusion) <= MAX_CLASSES:
        return np.arange(len(confusion))
    classes = dict.fromkeys(int(i) for pair in confused_pairs(confusion) for i in pair)
    return np.sort(np.array(list(classes)[:MAX_CLASSES_WITH_COUNTS], dtype=int))


def confused_pairs(confusion: np.ndarray) -> np.ndarray:
    """Return (true class, predicted class) of every kind of error, by number, then by fraction of the true class."""
    pairs = np.argwhere((confusion > 0) & ~np.eye(len(confusion), dtype=bool))
    count = confusion[pairs[:, 0], pairs[:, 1]]
    fraction = count / np.maximum(1, confusion.sum(axis=1))[pairs[:, 0]]
    return pairs[np.lexsort((-fraction, -count))]


def reliability_diagram(reliability: Reliability) -> str:
    """Plot accuracy against predicted probability, with the fraction of images per bin below."""
    return render_svg(lambda figure: _reliability(figure, reliability), 380, 420, "Reliability diagram")


def coverage_plot(coverage: RiskCoverageCurve, images: int, target: float | None = None) -> str:
    """Plot accuracy against coverage, the fraction of images with a prediction, with its 95 % lower bound.

    `target` is the target accuracy, drawn as a line.
    """
    return render_svg(lambda figure: _coverage(figure, coverage, images, target), 440, 320, "Coverage curve")


def _coverage(figure: Figure, coverage: RiskCoverageCurve, images: int, target: float | None) -> None:
    axes = figure.subplots()
    points = coverage.to_dict()
    fraction, accuracy = np.array(points["coverage"]), np.array(points["accuracy"])
    enough = fraction * images >= min(MIN_ANSWERED, images)  # an accuracy over fewer predictions is too uncertain
    fraction, accuracy = fraction[enough], accuracy[enough]
    predictions = np.rint(fraction * images).astype(int)
    pairs = zip(np.rint(accuracy * predictions).astype(int).tolist(), predictions.tolist(), strict=True)
    lower = np.array([clopper_pearson_lower(correct, total) for correct, total in pairs])
    axes.fill_between(fraction, lower, accuracy, color=BLUE, alpha=0.2, linewidth=0)
    axes.plot(fraction, accuracy, color=BLUE, linewidth=2)
    levels = [*accuracy, *lower, *([] if target is None else [target])]
    margin = max(0.02, 0.08 * (max(levels) - min(levels)))
    axes.set(xlim=(0, 1), ylim=(max(0, min(levels) - margin), min(1.005, max(levels) + margin)))
    if target is not None:
        above = target < axes.get_ylim()[1] - 2 * margin
        draw_level(axes, target, f"target {100 * target:.1f}\u202f%", above=above, side="right")
    axes.set_title("Accuracy", loc="left")
    axes.set_xlabel("coverage: fraction of images with a prediction")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(PercentFormatter(xmax=1, symbol="\u202f%", decimals=0))


def _matrix(figure: Figure, counts: np.ndarray, fractions: np.ndarray, labels: Sequence[str]) -> None:
    axes = figure.add_axes((0, 0, 1, 1))
    size = len(counts)
    for row, column in np.argwhere(counts > 0):
        fraction = float(fractions[row, column])
        colour = CELL_BLUE if row == column else CELL_RED
        axes.add_patch(Rectangle((column, row), 1, 1, facecolor=colour, alpha=max(0.06, fraction), linewidth=0))
        if size <= MAX_CLASSES_WITH_COUNTS:
            ink = "#ffffff" if fraction > 0.75 else INK
            axes.text(column + 0.5, row + 0.52, str(counts[row, column]), ha="center", va="center", color=ink)
    axes.set(xlim=(0, size), ylim=(size, 0), xlabel="predicted class", ylabel="true class")
    axes.set_xticks(np.arange(size) + 0.5, labels, rotation=45, ha="right", rotation_mode="anchor")
    axes.set_yticks(np.arange(size) + 0.5, labels)
    axes.hlines(np.arange(size + 1), 0, size, color=INK, linewidth=0.5, alpha=0.25)
    axes.vlines(np.arange(size + 1), 0, size, color=INK, linewidth=0.5, alpha=0.25)
    axes.tick_params(length=0, pad=5)
    axes.spines[:].set_visible(False)
    axes.grid(False)


def _reliability(figure: Figure, reliability: Reliability) -> None:
    top, bottom = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [4, 1]})
    filled = reliability.count > 0
    left, width = reliability.edges[:-1][filled], np.diff(reliability.edges)[filled]
    accuracy, confidence = reliability.accuracy[filled], reliability.confidence[filled]
    top.plot([0, 1], [0, 1], color=INK, linewidth=1, linestyle=(0, (2, 3)), alpha=0.7)
    top.bar(left, accuracy, width, align="edge", color=BLUE, alpha=0.35, linewidth=0)
    top.vlines(
        confidence, accuracy, confidence, color=RED, linewidth=1.5
    )  # the gap that the calibration error averages
    top.plot(confidence, accuracy, color=BLUE, marker="o", markersize=4.5, linestyle="none", clip_on=False)
    top.set(xlim=(0, 1), ylim=(0, 1.02))
    top.set_title("Accuracy by predicted probability", loc="left")
    fraction = reliability.count[filled] / reliability.count.sum()
    bottom.bar(left, fraction, width * 0.9, align="edge", color=INK, alpha=0.45, linewidth=0)
    bottom.set_ylabel("images", labelpad=4)
    bottom.set_xlabel("probability of the predicted class")
    bottom.yaxis.set_major_locator(MaxNLocator(2))
    for axis in (top.yaxis, bottom.yaxis, bottom.xaxis):
        axis.set_major_formatter(PercentFormatter(xmax=1, symbol="\u202f%", decimals=0))
