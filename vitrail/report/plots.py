"""Plots of training and evaluation, as SVG to embed in a page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator, PercentFormatter

from vitrail.metrics.calibration import Reliability
from vitrail.metrics.selective import MIN_ANSWERED, RiskCoverageCurve, clopper_pearson_lower
from vitrail.report.canvas import BLUE, CELL_BLUE, CELL_RED, GREEN, INK, RED, render_svg, save, short_name, style

MAX_CLASSES_WITH_COUNTS = 20  # with more classes, a count does not fit its cell
MAX_CLASSES = 40  # with more classes, only the most confused ones are shown
# Maximum number of classes: cell size in pixels
CELL_SIZES = {4: 64, 12: 38, MAX_CLASSES_WITH_COUNTS: 30, MAX_CLASSES: 18}
MAX_CURVE_POINTS = 400
MAX_EVENTS = 3  # events described under the curves
METRIC_NAMES = {"val_top1": "accuracy", "val_accuracy": "accuracy", "val_map": "mean average precision"}
Row = Mapping[str, Any]


def learning_curves(history: Sequence[Row], baseline: float | None) -> list[str]:
    """Plot loss, learning rate and every validation score against steps.

    Returns one SVG per panel, so that a narrow page can stack them. Panels without data are omitted.
    """
    panels = []
    loss, lr, val_loss = (_series(history, key) for key in ("loss", "lr", "val_loss"))
    keys = dict.fromkeys([*METRIC_NAMES, *(key for row in history for key in row if key.startswith("val_"))])
    scores = {key: _series(history, key) for key in keys if key != "val_loss"}
    last = max([1, *(steps[-1] for steps, _ in (loss, val_loss, *scores.values()) if steps.size)])
    if loss[0].size or val_loss[0].size:
        paint = partial(_loss_panel, loss, val_loss, lr, last)
        panels.append(render_svg(paint, 440, 320, "Loss by step"))
    for key, points in scores.items():
        if points[0].size:
            title = f"Validation {METRIC_NAMES.get(key, key.removeprefix('val_'))}"
            panels.append(
                render_svg(partial(_score_panel, points, baseline, last, title), 440, 320, f"{title} by step")
            )
    return panels


def draw_training_curves(history: Sequence[Row], path: Path) -> None:
    """Plot loss, accuracy, learning rate and throughput of a run against steps, into an .svg or .png file.

    A dotted line marks each event. Panels without data are omitted; if all are empty, no file is written.
    """
    panels = {
        "Loss": ("loss", "val_loss"),
        "Accuracy": ("accuracy", *METRIC_NAMES),
        "Learning rate": ("lr",),
        "Images per second": ("images_per_second",),
    }
    series = {title: {key: _series(history, key) for key in keys} for title, keys in panels.items()}
    series = {title: {key: c for key, c in curves.items() if c[0].size} for title, curves in series.items()}
    series = {title: curves for title, curves in series.items() if curves}
    if not series:
        return
    with style():
        figure = Figure(figsize=(8.9, 3.1 * math.ceil(len(series) / 2)), layout="constrained")
        _training_panels(figure, series, [row for row in history if "event" in row])
        save(figure, path)


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

    `target` is the accuracy that was asked for, drawn as a line.
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
        _level(axes, target, f"target {100 * target:.1f}\u202f%", above=above, side="right")
    axes.set_title("Accuracy", loc="left")
    axes.set_xlabel("coverage: fraction of images with a prediction")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(PercentFormatter(xmax=1, symbol="\u202f%", decimals=0))


def _loss_panel(loss: _Points, val_loss: _Points, lr: _Points, last: int, figure: Figure) -> None:
    heights = [5, 1] if lr[0].size else [1]
    axes = figure.subplots(len(heights), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    top = axes[0]
    _training_curve(top, loss, "training")
    if val_loss[0].size:
        top.plot(*val_loss, color=RED, linewidth=1.5, marker="o", markersize=3.5, label="validation")
        above = {"loc": "lower right", "bbox_to_anchor": (1, 1), "ncols": 2, "borderaxespad": 0.0}  # above the curves
        top.legend(frameon=False, labelcolor=INK, handlelength=1.4, **above)
    values = np.concatenate([loss[1], val_loss[1]])
    top.set_ylim(0, np.quantile(values, 0.99) * 1.1 or 1)  # so that an initial spike does not flatten the curve
    top.set_title("Loss", loc="left")
    if lr[0].size:
        axes[1].plot(*_thinned(lr), color=GREEN, linewidth=1.5)
        axes[1].set_ylim(0, lr[1].max() * 1.15 or 1)
        axes[1].set_yticks([lr[1].max()], [f"{lr[1].max():.0e}".replace("e-0", "e-")])
        axes[1].set_ylabel("lr", rotation=0, ha="right", va="center")
    _step_axis(axes[-1], last)


def _training_panels(figure: Figure, panels: Mapping[str, Mapping[str, _Points]], events: Sequence[Row]) -> None:
    ends = [int(steps[-1]) for curves in panels.values() for steps, _ in curves.values()]
    last = max(1, *ends, *(int(row["step"]) for row in events))
    grid = figure.subplots(math.ceil(len(panels) / 2), min(2, len(panels)), squeeze=False)
    for axes, (title, curves) in zip(grid.flat, panels.items(), strict=False):
        for key, points in curves.items():
            if key == "lr":
                axes.plot(*_thinned(points), color=GREEN, linewidth=2)
            elif key.startswith("val_"):
                name = METRIC_NAMES.get(key, "")
                name = "validation" if name in ("", title.lower()) else f"validation {name}"
                axes.plot(*points, color=RED, linewidth=1.5, marker="o", markersize=3.5, label=name)
            else:
                _training_curve(axes, points, "training")
        for step in {int(row["step"]) for row in events}:
            axes.axvline(step, color=INK, linewidth=1, linestyle=(0, (1, 2)), alpha=0.8, zorder=1)
        values = np.concatenate([values for _, values in curves.values()])
        axes.set_ylim(0, np.quantile(values, 0.99) * 1.1 or 1)  # so that an initial spike does not flatten the curve
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 1000 else f"{value:g}")
        if title == "Accuracy":
            axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g}\u202f%")
        if any(key.startswith("val_") for key in curves):
            axes.legend(frameon=False, labelcolor=INK, handlelength=1.4)
        axes.set_title(title, loc="left")
        _step_axis(axes, last)
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    figure.supxlabel("\n".join(_event_lines(events)), x=0.01, ha="left", fontsize=11)


def _event_lines(events: Sequence[Row]) -> list[str]:
    """Describe the first events, and count the others."""
    lines = [f"step {int(row['step']):,}: {short_name(row['event'], 90)}" for row in events[:MAX_EVENTS]]
    more = len(events) - MAX_EVENTS
    return [*lines, f"and {more:,} more in metrics.jsonl"] if more > 0 else lines


def _training_curve(axes: Axes, points: _Points, label: str) -> None:
    """Draw a training curve. If it has many points, draw its running mean over the faint points."""
    steps, values = _thinned(points)
    if len(steps) > 40:
        axes.plot(steps, values, color=BLUE, linewidth=1, alpha=0.3)
        axes.plot(steps, _running_mean(values), color=BLUE, linewidth=2, label=label)
    else:
        axes.plot(steps, values, color=BLUE, linewidth=2, label=label)


def _score_panel(scores: _Points, baseline: float | None, last: int, title: str, figure: Figure) -> None:
    axes = figure.subplots()
    steps, values = scores
    axes.plot(steps, values, color=BLUE, linewidth=2, marker="o", markersize=3.5)
    levels = [*values, *([] if baseline is None else [baseline])]
    margin = max(0.02, (max(levels) - min(levels)) * 0.15)
    axes.set_ylim(max(0, min(levels) - margin), min(1.02, max(levels) + margin))
    if baseline is not None:
        above = values[0] <= baseline  # keep the label off the start of the curve
        _level(axes, baseline, f"baseline {100 * baseline:.1f}\u202f%", above=above, side="left")
    axes.set_title(title, loc="left")
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, symbol="\u202f%", decimals=0))
    _step_axis(axes, last)


def _level(axes: Axes, level: float, text: str, *, above: bool, side: Literal["left", "right"]) -> None:
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


_Points = tuple[np.ndarray, np.ndarray]


def _series(history: Sequence[Row], key: str) -> _Points:
    """Return (steps, values) of one metric, in order. A resumed run repeats steps: the last row of a step counts."""
    points: dict[int, float] = {}
    for row in history:
        step, value = row.get("step"), row.get(key)
        if isinstance(step, int | float) and isinstance(value, int | float) and math.isfinite(value):
            points[int(step)] = float(value)
    return np.array(sorted(points)), np.array([points[step] for step in sorted(points)])


def _thinned(points: _Points) -> _Points:
    """Average neighbouring points, down to MAX_CURVE_POINTS."""
    steps, values = points
    groups = np.array_split(np.arange(len(steps)), min(len(steps), MAX_CURVE_POINTS)) if len(steps) else []
    return np.array([steps[g].mean() for g in groups]), np.array([values[g].mean() for g in groups])


def _running_mean(values: np.ndarray) -> np.ndarray:
    """Return the moving average over a twentieth of the curve."""
    half = max(1, len(values) // 40)
    total = np.concatenate([[0.0], values.cumsum()])
    low = np.maximum(np.arange(len(values)) - half, 0)
    high = np.minimum(np.arange(len(values)) + half + 1, len(values))
    return (total[high] - total[low]) / (high - low)


def _step_axis(axes: Axes, last: int) -> None:
    axes.set_xlim(0, last * 1.02)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_xlabel("step")
