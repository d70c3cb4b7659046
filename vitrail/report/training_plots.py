"""Plots of training, as SVG to embed in a page or as files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from vitrail.report.canvas import BLUE, GREEN, INK, RED, draw_level, render_svg, save, short_name, style

MAX_CURVE_POINTS = 400
MAX_EVENTS = 3  # events described under the curves
METRIC_NAMES = {"val_top1": "accuracy", "val_accuracy": "accuracy", "val_map": "mean average precision"}
Row = Mapping[str, Any]
_Points = tuple[np.ndarray, np.ndarray]


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
        draw_level(axes, baseline, f"baseline {100 * baseline:.1f}\u202f%", above=above, side="left")
    axes.set_title(title, loc="left")
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, symbol="\u202f%", decimals=0))
    _step_axis(axes, last)


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
