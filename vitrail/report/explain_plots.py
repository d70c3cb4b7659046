"""Arrays that explain a network -> pictures: the paper's figures, and maps over images."""

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
from vitrail.report.raster import enlarged, lit, mosaic, rgb

HEAT, GLOW = "viridis", "inferno"  # even in lightness, so that colour-blind readers see the same order
ACROSS = 7  # filters in a row
PANEL = 190  # CSS pixels of a picture beside others
SMALL_PANEL = 84
MOST_TICKS = 8
LINES = {  # colour, dashes and marker: a reader needs only one of them
    "votes": (INK, "-", "D"),
    "relevance": (BLUE, "-", "o"),
    "rollout": (RED, (0, (6, 2)), "s"),
    "last attention": (GREEN, (0, (3, 1.5)), "^"),
    "random": (INK, (0, (1, 2)), "x"),
}


@dataclass(frozen=True, eq=False)
class MapPanel:
    """A map (h, w) to lay over an image; none: the image as it is."""

    title: str
    map: np.ndarray | None


def draw_filters(filters: Filters) -> Plot:
    """The first principal components as colours, each stretched from its smallest to its largest value."""
    tiles = mosaic(filters.components, ACROSS)
    share = filters.explained_variance_ratio.sum()
    title = f"Principal components of {filters.layer}: first {len(filters.components)} ({100 * share:.0f}\u202f%)"

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        _picture(axes, tiles)
        axes.set_title(f"Filters of {filters.layer}, first {len(filters.components)} principal components", loc="left")
        axes.set_xlabel(f"together {100 * share:.1f}\u202f% of the variance; each stretched to the full range")

    rows = -(-len(filters.components) // ACROSS)
    return Plot(title, 560, 70 + 76 * rows, paint)


def draw_similarity(similarity: np.ndarray, title: str = "Similarity of position embeddings") -> Plot:
    """A tile for each patch: the cosine of its position embedding with that of every patch."""
    rows, columns = similarity.shape[:2]

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        _tiles_of_similarity(figure, axes, similarity)
        axes.set_title(title, loc="left")

    width = 470
    return Plot(title, width, round(90 + (width - 110) * rows / columns), paint)


def draw_distances(distances: AttentionDistances, title: str = "Mean attention distance") -> Plot:
    """A dot for each head of each block, and what uniform attention would have."""

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        _heads(axes, distances)
        axes.set_title(title, loc="left")

    return Plot(title, 560, 360, paint)


def draw_maps(image: np.ndarray, panels: Sequence[MapPanel], name: str) -> Plot:
    """An image (H, W, C) uint8 beside itself in grey under maps that glow."""
    height, width = image.shape[:2]

    def paint(figure: Figure) -> None:
        for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            _picture(axes, rgb(image) if panel.map is None else overlay_heatmap(image, panel.map), smooth=True)
            axes.set_title(panel.title, fontsize=12)
        figure.supxlabel(short_name(name, 90), fontsize=11)

    return Plot(f"Maps over {name}", PANEL * len(panels), round(PANEL * height / width) + 64, paint)


def draw_heads(image: np.ndarray, maps: np.ndarray, layers: Sequence[int], heads: Sequence[int], name: str) -> Plot:
    """Maps (layers, heads, h, w) as a table beside their image, each from no share (dark) to its largest (bright)."""
    high, wide = maps.shape[2:]

    def paint(figure: Figure) -> None:
        grid = figure.subplots(len(layers), 1 + len(heads), squeeze=False)
        for axes in grid.flat:
            _bare(axes)
        _picture(grid[0, 0], rgb(image), smooth=True)
        grid[0, 0].set_title("input", fontsize=12)
        for row, layer in enumerate(layers):
            for column, head in enumerate(heads, start=1):
                one = maps[row, column - 1]
                grid[row, column].imshow(one / (one.max() or 1), cmap=HEAT, vmin=0, vmax=1, interpolation="nearest")
                if row == 0:
                    grid[row, column].set_title(f"head {head}", fontsize=12)
            grid[row, 1].set_ylabel(f"block {layer}", rotation=0, ha="right", va="center")

    width = SMALL_PANEL * (1 + len(heads)) + 70
    return Plot(f"Heads over {name}", width, round(SMALL_PANEL * high / wide * len(layers)) + 40, paint)


def draw_faithfulness_curves(curves: Mapping[str, FaithfulnessCurves]) -> Plot:
    """Mean deletion and insertion curves of several maps."""

    def paint(figure: Figure) -> None:
        left, right = figure.subplots(1, 2, sharey=True)
        for axes, kind in ((left, "deletion"), (right, "insertion")):
            for name, one in curves.items():
                colour, dashes, marker = LINES[name]
                values = getattr(one, kind).mean(0)
                style = {"color": colour, "linestyle": dashes, "marker": marker, "markersize": 4.5, "label": name}
                axes.plot(one.shares, values, linewidth=1.8, **style)
            axes.set_xlim(-0.03, 1.06)
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_formatter(PercentFormatter(xmax=1, symbol="\u202f%", decimals=0))
        left.set_title("Deletion: low is faithful", loc="left")
        right.set_title("Insertion: high is faithful", loc="left")
        left.set_ylabel("mean probability of the class")
        left.set_xlabel("patches taken away, highest first")
        right.set_xlabel("patches shown, highest first")
        left.set_ylim(0, None)
        right.legend(frameon=False, labelcolor=INK, handlelength=3)

    return Plot("Deletion and insertion curves", 760, 330, paint)


def draw_pasted(
    images: Sequence[np.ndarray], inside: np.ndarray, maps: np.ndarray, names: Sequence[tuple[str, str]], kind: str
) -> Plot:
    """Images with a pasted picture, its place outlined, above their maps of one kind; names are (pasted,
    background)."""
    (height, width), (rows, columns) = images[0].shape[:2], inside.shape[1:]

    def paint(figure: Figure) -> None:
        grid = figure.subplots(2, len(images), squeeze=False)
        for place, image in enumerate(images):
            _picture(grid[0, place], rgb(image), smooth=True)
            _picture(grid[1, place], overlay_heatmap(image, maps[place]), smooth=True)
            first, second = (short_name(name, 14) for name in names[place])
            grid[0, place].set_title(f"{first}\nin {second}", fontsize=12)
            top, left = np.argwhere(inside[place]).min(0)
            bottom, right = np.argwhere(inside[place]).max(0) + 1
            for axes in grid[:, place]:
                corner = left * width / columns - 0.5, top * height / rows - 0.5
                size = (right - left) * width / columns, (bottom - top) * height / rows
                axes.add_patch(Rectangle(corner, *size, fill=False, edgecolor="#000000", linewidth=3.5))
                axes.add_patch(Rectangle(corner, *size, fill=False, edgecolor="#ffffff", linewidth=1.5))
        grid[0, 0].set_ylabel("input")
        grid[1, 0].set_ylabel(kind)

    side = 142
    return Plot("Pasted pictures", side * len(images) + 20, round(2 * side * height / width) + 50, paint)


def draw_figure_7(filters: Filters, similarity: np.ndarray | None, distances: AttentionDistances) -> Plot:
    """The paper's Figure 7: filters, position similarity (where positions are added) and attention distance."""
    panels = 2 if similarity is None else 3

    def paint(figure: Figure) -> None:
        axes = list(figure.subplots(1, panels))
        _picture(axes[0], mosaic(filters.components, ACROSS))
        axes[0].set_title(f"Filters of {filters.layer}\n(first {len(filters.components)} principal components)")
        if similarity is not None:
            _tiles_of_similarity(figure, axes[1], similarity)
            axes[1].set_title("Position embedding similarity")
        _heads(axes[-1], distances)
        axes[-1].set_title("Attention distance")

    return Plot("Figure 7", 440 * panels, 380, paint)


def draw_figure_6(images: Sequence[np.ndarray], maps: Sequence[np.ndarray], names: Sequence[str]) -> Plot:
    """The paper's Figure 6: images, and the same under attention rollout."""

    def paint(figure: Figure) -> None:
        grid = figure.subplots(len(images), 2, squeeze=False)
        for (left, right), image, map_, name in zip(grid, images, maps, names, strict=True):
            _picture(left, rgb(image), smooth=True)
            _picture(right, lit(image, map_), smooth=True)
            left.set_ylabel(name if len(name) <= 24 else f"…{name[-23:]}", fontsize=11)
        grid[0, 0].set_title("Input")
        grid[0, 1].set_title("Attention")

    height = PANEL * images[0].shape[0] / images[0].shape[1]
    return Plot("Figure 6", 2 * PANEL + 30, round(height * len(images)) + 36, paint)


def draw_side_by_side(kind: str, parts: Sequence[tuple[str, np.ndarray | AttentionDistances]]) -> Plot:
    """Figures 10 and 11: position similarity or attention distance of one network beside another."""

    tops = [_top(part) for _, part in parts if isinstance(part, AttentionDistances)]

    def paint(figure: Figure) -> None:
        for axes, (name, part) in zip(figure.subplots(1, len(parts), squeeze=False)[0], parts, strict=True):
            if isinstance(part, AttentionDistances):
                _heads(axes, part, max(tops))
            else:
                _tiles_of_similarity(figure, axes, part)
            axes.set_title(short_name(name, 40))

    return Plot(kind, 440 * len(parts), 380, paint)


def overlay_heatmap(image: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """An image in dark grey on which a map (h, w) glows, yellow at its highest: seen on dark pixels too, where an image
    that is only dimmed shows nothing."""
    light = enlarged(shares, image.shape[:2])[..., None]
    grey = rgb(image).mean(-1, keepdims=True)
    colour = 255 * colormaps[GLOW](0.85 * light[..., 0])[..., :3]
    return (0.35 * grey * (1 - light / 2) + 0.75 * colour).clip(0, 255).astype(np.uint8)


def _tiles_of_similarity(figure: Figure, axes: Axes, similarity: np.ndarray) -> None:
    rows, columns = similarity.shape[:2]
    gap = max(1, max(rows, columns) // 8)
    spread = np.full((rows * (rows + gap) - gap, columns * (columns + gap) - gap), np.nan)
    for y in range(rows):
        for x in range(columns):
            spread[y * (rows + gap) : y * (rows + gap) + rows, x * (columns + gap) : x * (columns + gap) + columns] = (
                similarity[y, x]
            )
    picture = axes.imshow(spread, cmap=HEAT, vmin=-1, vmax=1, interpolation="nearest")
    _bare(axes)
    for axis, count, size in ((axes.xaxis, columns, columns + gap), (axes.yaxis, rows, rows + gap)):
        shown = range(0, count, -(-count // MOST_TICKS))
        axis.set_ticks([place * size + (size - gap - 1) / 2 for place in shown], [str(place + 1) for place in shown])
    axes.set_xlabel("column of the patch")
    axes.set_ylabel("row of the patch")
    bar = figure.colorbar(picture, ax=axes, shrink=0.9, ticks=[-1, -0.5, 0, 0.5, 1])
    bar.set_label("cosine similarity")
    bar.outline.set_visible(False)


def _top(distances: AttentionDistances) -> float:
    """The end of an axis of distances."""
    return 1.12 * max(distances.uniform, float(distances.renormalised.max()))


def _heads(axes: Axes, distances: AttentionDistances, top: float | None = None) -> None:
    blocks, heads = distances.pixels.shape
    both = bool(distances.elsewhere.max() > 1e-6)
    places = np.repeat(np.arange(blocks), heads)
    shift = 0.16 if both else 0.0
    axes.scatter(places - shift, distances.pixels.ravel(), s=30, color=BLUE, alpha=0.75, linewidths=0, label="a head")
    if both:
        ring: dict[str, Any] = {"marker": "D", "facecolors": "none", "edgecolors": RED, "linewidths": 1.2}
        label = "a head, of its attention to patches alone"
        axes.scatter(places + shift, distances.renormalised.ravel(), s=26, label=label, **ring)
    level = f"uniform attention, {distances.uniform:.1f} px"
    axes.axhline(distances.uniform, color=INK, linewidth=1.2, linestyle=(0, (4, 3)), label=level, zorder=1)
    axes.legend(frameon=False, labelcolor=INK, fontsize=11, loc="best", handletextpad=0.4)
    axes.set_ylim(0, _top(distances) if top is None else top)
    axes.set_xlim(-0.6, blocks - 0.4)
    axes.xaxis.set_major_locator(MaxNLocator(12, integer=True))
    axes.set_xlabel("block")
    axes.set_ylabel("mean attention distance (pixels)")


def _picture(axes: Axes, image: np.ndarray, smooth: bool = False) -> None:
    axes.imshow(image, interpolation="bilinear" if smooth and max(image.shape[:2]) > 100 else "nearest")
    _bare(axes)


def _bare(axes: Axes) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    axes.grid(False)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
