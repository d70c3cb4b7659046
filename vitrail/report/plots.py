"""Numbers of training and evaluation -> SVG pictures to set inside a page."""

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

COUNTS_UP_TO = 20  # classes: beyond, a count no longer fits its cell
WHOLE_UP_TO = 40  # classes: beyond, only the most confused are shown
CELL_SIZES = {4: 64, 12: 38, COUNTS_UP_TO: 30, WHOLE_UP_TO: 18}  # classes shown at most: pixels of a cell
CURVE_POINTS = 400
EVENTS_TOLD = 3  # whose text stands under the curves
METRICS = {"val_top1": "accuracy", "val_accuracy": "accuracy", "val_map": "mean average precision"}  # in words
Row = Mapping[str, Any]


def learning_curves(history: Sequence[Row], baseline: float | None) -> list[str]:
    """Loss (with the learning rate in a strip below) and what else was measured on validation images against steps: one
    SVG per panel, so that a narrow page can stack them. A panel without data is left out."""
    panels = []
    losses, rates, held_out = (_series(history, key) for key in ("loss", "lr", "val_loss"))
    keys = dict.fromkeys([*METRICS, *(key for row in history for key in row if key.startswith("val_"))])
    measured = {key: _series(history, key) for key in keys if key != "val_loss"}
    last = max([1, *(steps[-1] for steps, _ in (losses, held_out, *measured.values()) if steps.size)])
    if losses[0].size or held_out[0].size:
        paint = partial(_loss_panel, losses, held_out, rates, last)
        panels.append(render_svg(paint, 440, 320, "Loss by step"))
    for key, points in measured.items():
        if points[0].size:
            title = f"Validation {METRICS.get(key, key.removeprefix('val_'))}"
            panels.append(
                render_svg(partial(_accuracy_panel, points, baseline, last, title), 440, 320, f"{title} by step")
            )
    return panels


def draw_training_curves(history: Sequence[Row], path: Path) -> None:
    """One picture of a run, by the ending of `path` an .svg or a .png: loss, accuracy, learning rate and speed against
    steps, with a dotted line wherever something happened. Panels without data are left out; without any, no file."""
    panels = {
        "Loss": ("loss", "val_loss"),
        "Accuracy": ("accuracy", *METRICS),
        "Learning rate": ("lr",),
        "Images a second": ("images_per_second",),
    }
    found = {title: {key: _series(history, key) for key in keys} for title, keys in panels.items()}
    found = {title: {key: c for key, c in curves.items() if c[0].size} for title, curves in found.items()}
    found = {title: curves for title, curves in found.items() if curves}
    if not found:
        return
    with style():
        figure = Figure(figsize=(8.9, 3.1 * math.ceil(len(found) / 2)), layout="constrained")
        _curves(figure, found, [row for row in history if "event" in row])
        save(figure, path)


def confusion_matrix(confusion: np.ndarray, classes: Sequence[str]) -> str:
    """Truth by prediction of the classes in `most_confused`, each row shaded by its shares."""
    shown = most_confused(confusion)
    totals = np.maximum(1, confusion.sum(axis=1))[shown, None]
    counts = confusion[np.ix_(shown, shown)]
    labels = [short_name(classes[i], 20) for i in shown]
    cell = next(size for most, size in CELL_SIZES.items() if len(shown) <= most)
    side = len(shown) * cell
    return render_svg(
        lambda figure: _matrix(figure, counts, counts / totals, labels), side, side, "Confusion matrix", tight=True
    )


def most_confused(confusion: np.ndarray) -> np.ndarray:
    """The classes a matrix is drawn for: all, or with too many those in the most frequent confusions, if any."""
    if len(confusion) <= WHOLE_UP_TO:
        return np.arange(len(confusion))
    chosen = dict.fromkeys(int(i) for pair in confusions(confusion) for i in pair)
    return np.sort(np.array(list(chosen)[:COUNTS_UP_TO], dtype=int))


def confusions(confusion: np.ndarray) -> np.ndarray:
    """(truth, predicted) of every kind of mistake, most frequent first, then by its share of the true class."""
    pairs = np.argwhere((confusion > 0) & ~np.eye(len(confusion), dtype=bool))
    count = confusion[pairs[:, 0], pairs[:, 1]]
    share = count / np.maximum(1, confusion.sum(axis=1))[pairs[:, 0]]
    return pairs[np.lexsort((-share, -count))]


def reliability_diagram(reliability: Reliability) -> str:
    """Accuracy against stated probability, with the share of images per bin below."""
    return render_svg(lambda figure: _reliability(figure, reliability), 380, 420, "Reliability diagram")


def coverage_plot(coverage: RiskCoverageCurve, images: int, asked: float | None = None) -> str:
    """Share of right answers against the share of images that get one, the surest first, shaded down to what it is at
    least with 95 % confidence; `asked` is a line."""
    return render_svg(lambda figure: _coverage(figure, coverage, images, asked), 440, 320, "Coverage curve")


def _coverage(figure: Figure, coverage: RiskCoverageCurve, images: int, asked: float | None) -> None:
    axes = figure.subplots()
    points = coverage.to_dict()
    share, right = np.array(points["coverage"]), np.array(points["accuracy"])
    told = share * images >= min(MIN_ANSWERED, images)  # fewer answers say nothing
    share, right = share[told], right[told]
    answered = np.rint(share * images).astype(int)
    pairs = zip(np.rint(right * answered).astype(int).tolist(), answered.tolist(), strict=True)
    least = np.array([clopper_pearson_lower(one, many) for one, many in pairs])
    axes.fill_between(share, least, right, color=BLUE, alpha=0.2, linewidth=0)
    axes.plot(share, right, color=BLUE, linewidth=2)
    levels = [*right, *least, *([] if asked is None else [asked])]
    room = max(0.02, 0.08 * (max(levels) - min(levels)))
    axes.set(xlim=(0, 1), ylim=(max(0, min(levels) - room), min(1.005, max(levels) + room)))
    if asked is not None:
        above = asked < axes.get_ylim()[1] - 2 * room
        _level(axes, asked, f"asked for {100 * asked:.1f}\u202f%", above=above, side="right")
    axes.set_title("Share of answers that are right", loc="left")
    axes.set_xlabel("share of images that are answered, the surest first")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(PercentFormatter(xmax=1, symbol="\u202f%", decimals=0))


def _loss_panel(losses: _Points, held_out: _Points, rates: _Points, last: int, figure: Figure) -> None:
    heights = [5, 1] if rates[0].size else [1]
    axes = figure.subplots(len(heights), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    top = axes[0]
    _many_points(top, losses, "training")
    if held_out[0].size:
        top.plot(*held_out, color=RED, linewidth=1.5, marker="o", markersize=3.5, label="validation")
        above = {"loc": "lower right", "bbox_to_anchor": (1, 1), "ncols": 2, "borderaxespad": 0.0}  # of the curves
        top.legend(frameon=False, labelcolor=INK, handlelength=1.4, **above)
    everything = np.concatenate([losses[1], held_out[1]])
    top.set_ylim(0, np.quantile(everything, 0.99) * 1.1 or 1)  # a first spike does not flatten the rest
    top.set_title("Loss", loc="left")
    if rates[0].size:
        axes[1].plot(*_thinned(rates), color=GREEN, linewidth=1.5)
        axes[1].set_ylim(0, rates[1].max() * 1.15 or 1)
        axes[1].set_yticks([rates[1].max()], [f"{rates[1].max():.0e}".replace("e-0", "e-")])
        axes[1].set_ylabel("lr", rotation=0, ha="right", va="center")
    _step_axis(axes[-1], last)


def _curves(figure: Figure, panels: Mapping[str, Mapping[str, _Points]], events: Sequence[Row]) -> None:
    ends = [int(steps[-1]) for curves in panels.values() for steps, _ in curves.values()]
    last = max(1, *ends, *(int(row["step"]) for row in events))
    grid = figure.subplots(math.ceil(len(panels) / 2), min(2, len(panels)), squeeze=False)
    for axes, (title, curves) in zip(grid.flat, panels.items(), strict=False):
        for key, points in curves.items():
            if key == "lr":
                axes.plot(*_thinned(points), color=GREEN, linewidth=2)
            elif key.startswith("val_"):
                name = "held-out" if key not in METRICS or METRICS[key] == title.lower() else f"held-out {METRICS[key]}"
                axes.plot(*points, color=RED, linewidth=1.5, marker="o", markersize=3.5, label=name)
            else:
                _many_points(axes, points, "training")
        for step in {int(row["step"]) for row in events}:
            axes.axvline(step, color=INK, linewidth=1, linestyle=(0, (1, 2)), alpha=0.8, zorder=1)
        values = np.concatenate([values for _, values in curves.values()])
        axes.set_ylim(0, np.quantile(values, 0.99) * 1.1 or 1)  # a first spike does not flatten the rest
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 1000 else f"{value:g}")
        if title == "Accuracy":
            axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g}\u202f%")
        if any(key.startswith("val_") for key in curves):
            axes.legend(frameon=False, labelcolor=INK, handlelength=1.4)
        axes.set_title(title, loc="left")
        _step_axis(axes, last)
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    figure.supxlabel("\n".join(_told(events)), x=0.01, ha="left", fontsize=11)


def _told(events: Sequence[Row]) -> list[str]:
    """The first events in words, and how many more there are."""
    lines = [f"step {int(row['step']):,}: {short_name(row['event'], 90)}" for row in events[:EVENTS_TOLD]]
    more = len(events) - EVENTS_TOLD
    return [*lines, f"and {more:,} more in metrics.jsonl"] if more > 0 else lines


def _many_points(axes: Axes, points: _Points, label: str) -> None:
    """A curve with a point for every few steps: its running mean, and the points themselves faintly behind."""
    steps, values = _thinned(points)
    if len(steps) > 40:
        axes.plot(steps, values, color=BLUE, linewidth=1, alpha=0.3)
        axes.plot(steps, _running_mean(values), color=BLUE, linewidth=2, label=label)
    else:
        axes.plot(steps, values, color=BLUE, linewidth=2, label=label)


def _accuracy_panel(accuracy: _Points, baseline: float | None, last: int, title: str, figure: Figure) -> None:
    axes = figure.subplots()
    steps, values = accuracy
    axes.plot(steps, values, color=BLUE, linewidth=2, marker="o", markersize=3.5)
    levels = [*values, *([] if baseline is None else [baseline])]
    room = max(0.02, (max(levels) - min(levels)) * 0.15)
    axes.set_ylim(max(0, min(levels) - room), min(1.02, max(levels) + room))
    if baseline is not None:
        above = values[0] <= baseline  # at the left, on the side where the curve is not
        _level(axes, baseline, f"baseline {100 * baseline:.1f}\u202f%", above=above, side="left")
    axes.set_title(title, loc="left")
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, symbol="\u202f%", decimals=0))
    _step_axis(axes, last)


def _level(axes: Axes, level: float, text: str, *, above: bool, side: Literal["left", "right"]) -> None:
    """A dashed line across, and what it is."""
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


def _matrix(figure: Figure, counts: np.ndarray, shares: np.ndarray, labels: Sequence[str]) -> None:
    axes = figure.add_axes((0, 0, 1, 1))
    k = len(counts)
    for row, column in np.argwhere(counts > 0):
        share = float(shares[row, column])
        colour = CELL_BLUE if row == column else CELL_RED
        axes.add_patch(Rectangle((column, row), 1, 1, facecolor=colour, alpha=max(0.06, share), linewidth=0))
        if k <= COUNTS_UP_TO:
            ink = "#ffffff" if share > 0.75 else INK
            axes.text(column + 0.5, row + 0.52, str(counts[row, column]), ha="center", va="center", color=ink)
    axes.set(xlim=(0, k), ylim=(k, 0), xlabel="predicted", ylabel="truth")
    axes.set_xticks(np.arange(k) + 0.5, labels, rotation=45, ha="right", rotation_mode="anchor")
    axes.set_yticks(np.arange(k) + 0.5, labels)
    axes.hlines(np.arange(k + 1), 0, k, color=INK, linewidth=0.5, alpha=0.25)
    axes.vlines(np.arange(k + 1), 0, k, color=INK, linewidth=0.5, alpha=0.25)
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
    top.vlines(confidence, accuracy, confidence, color=RED, linewidth=1.5)  # the gap that the error averages
    top.plot(confidence, accuracy, color=BLUE, marker="o", markersize=4.5, linestyle="none", clip_on=False)
    top.set(xlim=(0, 1), ylim=(0, 1.02))
    top.set_title("Share right, by stated probability", loc="left")
    share = reliability.count[filled] / reliability.count.sum()
    bottom.bar(left, share, width * 0.9, align="edge", color=INK, alpha=0.45, linewidth=0)
    bottom.set_ylabel("images", labelpad=4)
    bottom.set_xlabel("stated probability of the predicted class")
    bottom.yaxis.set_major_locator(MaxNLocator(2))
    for axis in (top.yaxis, bottom.yaxis, bottom.xaxis):
        axis.set_major_formatter(PercentFormatter(xmax=1, symbol="\u202f%", decimals=0))


_Points = tuple[np.ndarray, np.ndarray]


def _series(history: Sequence[Row], key: str) -> _Points:
    """(steps, values) of one measure, in order; the last row of a step wins, as after a resumed run."""
    points: dict[int, float] = {}
    for row in history:
        step, value = row.get("step"), row.get(key)
        if isinstance(step, int | float) and isinstance(value, int | float) and math.isfinite(value):
            points[int(step)] = float(value)
    return np.array(sorted(points)), np.array([points[step] for step in sorted(points)])


def _thinned(points: _Points) -> _Points:
    """At most CURVE_POINTS points, each the mean of its neighbours."""
    steps, values = points
    groups = np.array_split(np.arange(len(steps)), min(len(steps), CURVE_POINTS)) if len(steps) else []
    return np.array([steps[g].mean() for g in groups]), np.array([values[g].mean() for g in groups])


def _running_mean(values: np.ndarray) -> np.ndarray:
    """Each value averaged with its neighbours, over a twentieth of the curve."""
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
