"""Pointing game: does a map find the image that was pasted into another one and changed its prediction?"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.config import Size
from vitrail.interpret.attention import eval_mode
from vitrail.models.vit import VisionTransformer

TRIES = 16  # pairs tried for each wanted image
BATCH = 32
Z = 1.959964  # two-sided 95 % quantile of the normal distribution

Cell = tuple[slice, slice]  # rows and columns of patches


@dataclass(frozen=True, eq=False)
class PastedImages:
    """Backgrounds with another image pasted into one quarter, which changes the prediction to the class of that image.

    A grey box at the same place does not give that class: something in the pasted image is needed for the prediction.
    """

    pixels: Tensor  # (M, C, H, W), normalised
    inside: np.ndarray  # (M, h, w) bool: patches of the pasted image; every patch is inside equally often
    classes: np.ndarray  # (M,): prediction for the whole, and for the pasted image alone
    backgrounds: np.ndarray  # (M,): prediction for the background
    tried: int  # pairs with different predictions that were tried
    changed: int  # of these, pairs whose prediction became the class of the pasted image
    hidden: int  # of these, pairs where a grey box gives that class too, because it hides evidence against it

    @property
    def chance(self) -> float:
        """Hit rate of a map with one constant patch."""
        return float(self.inside.mean()) if len(self.inside) else 0.0


def quarters(grid: Size) -> list[Cell]:
    """The four quarters of a grid of patches, as slices. They cover every patch once; a side of 1 is not divided."""
    rows, columns = ([slice(0, n // 2), slice(n // 2, n)] if n > 1 else [slice(0, 1)] for n in grid)
    return [(row, column) for row in rows for column in columns]


@torch.no_grad()
def paste_images(net: VisionTransformer, pixels: Tensor, number: int = 64, seed: int = 0) -> PastedImages:
    """Paste shrunk images into a quarter of images with another prediction, about `number` of them.

    Keeps those where the prediction becomes that of the pasted image, but not if the quarter is filled with the mean
    colour of the background instead. Keeps the same number for each quarter, so that a constant map scores at chance.
    """
    config = net.config
    cells = quarters(config.grid)
    per_cell, count = -(-number // len(cells)), len(pixels)
    rng = np.random.default_rng(seed)
    draws = rng.choice(count * count * len(cells), min(count * count * len(cells), number * TRIES), replace=False)
    kept: list[list[tuple[Tensor, int, int]]] = [[] for _ in cells]  # (pixels, class, background class)
    tried = changed = hidden = 0
    with eval_mode(net):
        predicted = np.concatenate([_predict(net, batch) for batch in pixels.split(BATCH)])
        source, background, quarter = np.unravel_index(draws, (count, count, len(cells)))
        differ = predicted[source] != predicted[background]
        triples = np.stack([source, background, quarter], axis=1)[differ]
        for start in range(0, len(triples), BATCH):
            batch = triples[start : start + BATCH]
            batch = batch[[len(kept[cell]) < per_cell for cell in batch[:, 2]]]
            if not len(batch):
                continue
            pasted = torch.stack([_paste(pixels[a], pixels[b], cells[cell], config.cell) for a, b, cell in batch])
            flipped = np.flatnonzero(_predict(net, pasted) == predicted[batch[:, 0]])
            tried, changed = tried + len(batch), changed + len(flipped)
            if not len(flipped):
                continue
            grey = torch.stack([_paste(None, pixels[b], cells[cell], config.cell) for _, b, cell in batch[flipped]])
            grey_suffices = _predict(net, grey) == predicted[batch[flipped, 0]]
            hidden += int(grey_suffices.sum())
            for row in flipped[~grey_suffices]:
                first, second, cell = batch[row]
                kept[cell].append((pasted[row], int(predicted[first]), int(predicted[second])))
    return _balanced(pixels, kept, cells, config.grid, min(per_cell, *map(len, kept)), (tried, changed, hidden))


def pointing_game(maps: np.ndarray, inside: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Score maps (M, h, w): whether the maximum is inside the box, and the fraction of the map inside; (M,) each.

    Ties count as a random choice among them.
    """
    flat, box = maps.reshape(len(maps), -1), inside.reshape(len(maps), -1)
    highest = flat == flat.max(1, keepdims=True)
    hits = (highest & box).sum(1) / highest.sum(1)
    total = flat.sum(1)
    fraction = np.where(total > 0, (flat * box).sum(1) / np.where(total > 0, total, 1), box.mean(1))
    return hits, fraction


def hit_rate(hits: np.ndarray) -> tuple[float, float, float]:
    """Mean of (M,) hits, with the 95 % Wilson interval (low, high)."""
    rate, n = float(hits.mean()), len(hits)
    centre = rate + Z**2 / (2 * n)
    spread = Z * float(np.sqrt(rate * (1 - rate) / n + (Z / (2 * n)) ** 2))
    return rate, (centre - spread) / (1 + Z**2 / n), (centre + spread) / (1 + Z**2 / n)


def _predict(net: VisionTransformer, pixels: Tensor) -> np.ndarray:
    return net(pixels).argmax(1).cpu().numpy()


def _paste(image: Tensor | None, background: Tensor, cell: Cell, patch: Size) -> Tensor:
    """A background (C, H, W) with `image` resized into `cell`; None: filled with the mean colour of the background."""
    result = background.clone()
    rows, columns = (slice(s.start * side, s.stop * side) for s, side in zip(cell, patch, strict=True))
    if image is None:
        result[:, rows, columns] = background.mean((1, 2), keepdim=True)
    else:
        size = rows.stop - rows.start, columns.stop - columns.start
        result[:, rows, columns] = F.interpolate(image[None], size, mode="bilinear", antialias=True)[0]
    return result


def _balanced(
    pixels: Tensor,
    kept: list[list[tuple[Tensor, int, int]]],
    cells: list[Cell],
    grid: Size,
    per_cell: int,
    counts: tuple[int, int, int],
) -> PastedImages:
    """The first `per_cell` images of every quarter, quarters in turn."""
    order = [(row, cell) for row in range(per_cell) for cell in range(len(cells))]
    inside = np.zeros((len(order), *grid), bool)
    for number, (_, cell) in enumerate(order):
        inside[number][cells[cell]] = True
    chosen = [kept[cell][row] for row, cell in order]
    pasted = torch.stack([image for image, _, _ in chosen]) if chosen else pixels[:0]
    classes = np.array([label for _, label, _ in chosen], int)
    backgrounds = np.array([label for _, _, label in chosen], int)
    return PastedImages(pasted, inside, classes, backgrounds, *counts)
