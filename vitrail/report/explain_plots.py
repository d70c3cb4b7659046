"""Plots that explain a network: the figures of the paper, and maps over images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator, PercentFormatter

from vitrail.interpret.distance import AttentionDistances
from vitrail.interpret.faithfulness import FaithfulnessCurves
from vitrail.interpret.filters import Filters
from vitrail.report.canvas import BLUE, GREEN, INK, RED, Plot, short_name
from vitrail.report.raster import dim_by_map, tile_filters, to_rgb, upsample_map

HEAT, OVERLAY = "viridis", "inferno"  # perceptually uniform colormaps, also for colour-blind readers
FILTERS_PER_ROW = 7
PANEL = 190  # CSS pixels of one image in a row
SMALL_PANEL = 84
MAX_TICKS = 8
LINE_STYLES = {  # colour, line style and marker, each of which identifies the map
    "votes": (INK, "-", "D"),
    "relevance": (BLUE, "-", "o"),
    "rollout": (RED, (0, (6, 2)), "s"),
    "last attention": (GREEN, (0, (3, 1.5)), "^"),
    "random": (INK, (0, (1, 2)), "x"),
}


@dataclass(frozen=True, eq=False)
class MapPanel:
    """A map (h, w) to lay over an image. None: the image itself."""

    title: str
    map: np.ndarray | None


def draw_filters(filters: Filters) -> Plot:
    """Plot the first principal components of the filters as colours, each scaled to its range."""
    tiles = tile_filters(filters.components, FILTERS_PER_ROW)
    variance = filters.explained_variance_ratio.sum()
    title = f"Principal components of {filters.layer}: first {len(filters.components)} ({100 * variance:.0f}\u202f%)"

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        _show_image(axes, tiles)
        axes.set_title(f"Filters of {filters.layer}, first {len(filters.components)} principal components", loc="left")
        axes.set_xlabel(f"{100 * variance:.1f}\u202f% of the variance in total; each filter is scaled to its range")

    rows = -(-len(filters.components) // FILTERS_PER_ROW)
    return Plot(title, 560, 70 + 76 * rows, paint)


def draw_similarity(similarity: np.ndarray, title: str = "Similarity of position embeddings") -> Plot:
    """Plot a tile per patch: the cosine similarity of its position embedding with those of all patches."""
    rows, columns = similarity.shape[:2]

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        _draw_similarity(figure, axes, similarity)
        axes.set_title(title, loc="left")

    width = 470
    return Plot(title, width, round(90 + (width - 110) * rows / columns), paint)


def draw_distances(distances: AttentionDistances, title: str = "Mean attention distance") -> Plot:
    """Plot a dot per head and block, and a line for uniform attention."""

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        _draw_distances(axes, distances)
        axes.set_title(title, loc="left")

    return Plot(title, 560, 360, paint)


def draw_maps(image: np.ndarray, panels: Sequence[MapPanel], name: str) -> Plot:
    """Plot an image (H, W, C) uint8 next to the same image under each map."""
    height, width = image.shape[:2]

    def paint(figure: Figure) -> None:
        for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            _show_image(axes, to_rgb(image) if panel.map is None else overlay_heatmap(image, panel.map), smooth=True)
            axes.set_title(panel.title, fontsize=12)
        figure.supxlabel(short_name(name, 90), fontsize=11)

    return Plot(f"Maps over {name}", PANEL * len(panels), round(PANEL * height / width) + 64, paint)


def draw_heads(image: np.ndarray, maps: np.ndarray, layers: Sequence[int], heads: Sequence[int], name: str) -> Plot:
    """Plot attention maps (layers, heads, h, w) as a grid next to their image, each scaled to its maximum."""
    high, wide = maps.shape[2:]

    def paint(figure: Figure) -> None:
        grid = figure.subplots(len(layers), 1 + len(heads), squeeze=False)
        for axes in grid.flat:
            _hide_axes(axes)
        _show_image(grid[0, 0], to_rgb(image), smooth=True)
        grid[0, 0].set_title("input", fontsize=12)
        for row, layer in enumerate(layers):
            for column, head in enumerate(heads, start=1):
                attention = maps[row, column - 1]
                grid[row, column].imshow(
                    attention / (attention.max() or 1), cmap=HEAT, vmin=0, vmax=1, interpolation="nearest"
                )
                if row == 0:
                    grid[row, column].set_title(f"head {head}", fontsize=12)
            grid[row, 1].set_ylabel(f"block {layer}", rotation=0, ha="right", va="center")

    width = SMALL_PANEL * (1 + len(heads)) + 70
    return Plot(f"Heads over {name}", width, round(SMALL_PANEL * high / wide * len(layers)) + 40, paint)


def draw_faithfulness_curves(curves: Mapping[str, FaithfulnessCurves]) -> Plot:
    """Plot the mean deletion and insertion curves of several maps."""

    def paint(figure: Figure) -> None:
        left, right = figure.subplots(1, 2, sharey=True)
        for axes, kind in ((left, "deletion"), (right, "insertion")):
            for name, curve in curves.items():
                colour, dashes, marker = LINE_STYLES[name]
                values = getattr(curve, kind).mean(0)
                style = {"color": colour, "linestyle": dashes, "marker": marker, "markersize": 4.5, "label": name}
                axes.plot(curve.fractions, values, linewidth=1.8, **style)
            axes.set_xlim(-0.03, 1.06)
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_formatter(PercentFormatter(xmax=1, symbol="\u202f%", decimals=0))
        left.set_title("Deletion (lower is better)", loc="left")
        right.set_title("Insertion (higher is better)", loc="left")
        left.set_ylabel("mean probability of the class")
        left.set_xlabel("patches deleted, highest first")
        right.set_xlabel("patches inserted, highest first")
        left.set_ylim(0, None)
        right.legend(frameon=False, labelcolor=INK, handlelength=3)

    return Plot("Deletion and insertion curves", 760, 330, paint)


def draw_pasted(
    images: Sequence[np.ndarray], inside: np.ndarray, maps: np.ndarray, names: Sequence[tuple[str, str]], kind: str
) -> Plot:
    """Plot images with an outlined pasted image above their maps of one kind.

    `inside` (n, rows, columns) marks the pasted patches; `names` are (class of the pasted image, of the background).
    """
    (height, width), (rows, columns) = images[0].shape[:2], inside.shape[1:]

    def paint(figure: Figure) -> None:
        grid = figure.subplots(2, len(images), squeeze=False)
        for index, image in enumerate(images):
            _show_image(grid[0, index], to_rgb(image), smooth=True)
            _show_image(grid[1, index], overlay_heatmap(image, maps[index]), smooth=True)
            pasted, background = (short_name(name, 14) for name in names[index])
            grid[0, index].set_title(f"{pasted}\nin {background}", fontsize=12)
            top, left = np.argwhere(inside[index]).min(0)
            bottom, right = np.argwhere(inside[index]).max(0) + 1
            for axes in grid[:, index]:
                corner = left * width / columns - 0.5, top * height / rows - 0.5
                size = (right - left) * width / columns, (bottom - top) * height / rows
                axes.add_patch(Rectangle(corner, *size, fill=False, edgecolor="#000000", linewidth=3.5))
                axes.add_patch(Rectangle(corner, *size, fill=False, edgecolor="#ffffff", linewidth=1.5))
        grid[0, 0].set_ylabel("input")
        grid[1, 0].set_ylabel(kind)

    side = 142
    return Plot("Pasted images", side * len(images) + 20, round(2 * side * height / width) + 50, paint)


def draw_figure_7(filters: Filters, similarity: np.ndarray | None, distances: AttentionDistances) -> Plot:
    """Plot Figure 7 of the paper: filters, position similarity (if there is one) and attention distance."""
    panels = 2 if similarity is None else 3

    def paint(figure: Figure) -> None:
        axes = list(figure.subplots(1, panels))
        _show_image(axes[0], tile_filters(filters.components, FILTERS_PER_ROW))
        axes[0].set_title(f"Filters of {filters.layer}\n(first {len(filters.components)} principal components)")
        if similarity is not None:
            _draw_similarity(figure, axes[1], similarity)
            axes[1].set_title("Position embedding similarity")
        _draw_distances(axes[-1], distances)
        axes[-1].set_title("Attention distance")

    return Plot("Figure 7", 440 * panels, 380, paint)


def draw_figure_6(images: Sequence[np.ndarray], maps: Sequence[np.ndarray], names: Sequence[str]) -> Plot:
    """Plot Figure 6 of the paper: images, and the same images under attention rollout."""

    def paint(figure: Figure) -> None:
        grid = figure.subplots(len(images), 2, squeeze=False)
        for (left, right), image, map_, name in zip(grid, images, maps, names, strict=True):
            _show_image(left, to_rgb(image), smooth=True)
            _show_image(right, dim_by_map(image, map_), smooth=True)
            left.set_ylabel(name if len(name) <= 24 else f"…{name[-23:]}", fontsize=11)
        grid[0, 0].set_title("Input")
        grid[0, 1].set_title("Attention")

    height = PANEL * images[0].shape[0] / images[0].shape[1]
    return Plot("Figure 6", 2 * PANEL + 30, round(height * len(images)) + 36, paint)


def draw_side_by_side(kind: str, parts: Sequence[tuple[str, np.ndarray | AttentionDistances]]) -> Plot:
    """Plot Figure 10 or 11 of the paper: position similarity or attention distance of several networks."""

    tops = [_y_limit(part) for _, part in parts if isinstance(part, AttentionDistances)]

    def paint(figure: Figure) -> None:
        for axes, (name, part) in zip(figure.subplots(1, len(parts), squeeze=False)[0], parts, strict=True):
            if isinstance(part, AttentionDistances):
                _draw_distances(axes, part, max(tops))
            else:
                _draw_similarity(figure, axes, part)
            axes.set_title(short_name(name, 40))

    return Plot(kind, 440 * len(parts), 380, paint)


def overlay_heatmap(image: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Overlay a dark grey version of an image with a map (h, w), yellow at its maximum.

    Unlike `dim_by_map`, it also shows the map on dark pixels.
    """
    heat = upsample_map(values, image.shape[:2])[..., None]
    grey = to_rgb(image).mean(-1, keepdims=True)
    colour = 255 * colormaps[OVERLAY](0.85 * heat[..., 0])[..., :3]
    return (0.35 * grey * (1 - heat / 2) + 0.75 * colour).clip(0, 255).astype(np.uint8)


def _draw_similarity(figure: Figure, axes: Axes, similarity: np.ndarray) -> None:
    rows, columns = similarity.shape[:2]
    gap = max(1, max(rows, columns) // 8)
    spread = np.full((rows * (rows + gap) - gap, columns * (columns + gap) - gap), np.nan)
    for y in range(rows):
        for x in range(columns):
            spread[y * (rows + gap) : y * (rows + gap) + rows, x * (columns + gap) : x * (columns + gap) + columns] = (
                similarity[y, x]
            )
    mesh = axes.imshow(spread, cmap=HEAT, vmin=-1, vmax=1, interpolation="nearest")
    _hide_axes(axes)
    for axis, count, size in ((axes.xaxis, columns, columns + gap), (axes.yaxis, rows, rows + gap)):
        shown = range(0, count, -(-count // MAX_TICKS))
        axis.set_ticks([place * size + (size - gap - 1) / 2 for place in shown], [str(place + 1) for place in shown])
    axes.set_xlabel("patch column")
    axes.set_ylabel("patch row")
    bar = figure.colorbar(mesh, ax=axes, shrink=0.9, ticks=[-1, -0.5, 0, 0.5, 1])
    bar.set_label("cosine similarity")
    bar.outline.set_visible(False)


def _y_limit(distances: AttentionDistances) -> float:
    """Return the upper limit of the distance axis."""
    return 1.12 * max(distances.uniform, float(distances.renormalised.max()))


def _draw_distances(axes: Axes, distances: AttentionDistances, top: float | None = None) -> None:
    blocks, heads = distances.pixels.shape
    both = bool(distances.elsewhere.max() > 1e-6)
    x = np.repeat(np.arange(blocks), heads)
    shift = 0.16 if both else 0.0
    axes.scatter(x - shift, distances.pixels.ravel(), s=30, color=BLUE, alpha=0.75, linewidths=0, label="one head")
    if both:
        ring: dict[str, Any] = {"marker": "D", "facecolors": "none", "edgecolors": RED, "linewidths": 1.2}
        label = "one head, attention to patches only"
        axes.scatter(x + shift, distances.renormalised.ravel(), s=26, label=label, **ring)
    level = f"uniform attention, {distances.uniform:.1f} px"
    axes.axhline(distances.uniform, color=INK, linewidth=1.2, linestyle=(0, (4, 3)), label=level, zorder=1)
    axes.legend(frameon=False, labelcolor=INK, fontsize=11, loc="best", handletextpad=0.4)
    axes.set_ylim(0, _y_limit(distances) if top is None else top)
    axes.set_xlim(-0.6, blocks - 0.4)
    axes.xaxis.set_major_locator(MaxNLocator(12, integer=True))
    axes.set_xlabel("block")
    axes.set_ylabel("mean attention distance (pixels)")


def _show_image(axes: Axes, image: np.ndarray, smooth: bool = False) -> None:
    axes.imshow(image, interpolation="bilinear" if smooth and max(image.shape[:2]) > 100 else "nearest")
    _hide_axes(axes)


def _hide_axes(axes: Axes) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    axes.grid(False)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
