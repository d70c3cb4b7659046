"""Does a map find what spoke for a class? Images whose answer is changed by a picture pasted into a quarter of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.config import Size
from vitrail.interpret.attention import eval_mode
from vitrail.models.vit import VisionTransformer

TRIES = 16  # pastings tried for each that is wanted
BATCH = 32
SURE = 1.959964  # standard deviations: 95 %, two-sided

Cell = tuple[slice, slice]  # rows and columns of patches


@dataclass(frozen=True, eq=False)
class PastedImages:
    """Images that another picture, pasted into a quarter of them, made another class for the network. A grey box in its
    place does not: something in the picture is needed for the answer."""

    pixels: Tensor  # (M, C, H, W), normalised
    inside: np.ndarray  # (M, h, w) bool: the patches of the picture; every patch is inside equally often
    classes: np.ndarray  # (M,): what the network says of them, and of the pasted picture alone
    backgrounds: np.ndarray  # (M,): what it says of the background
    tried: int  # pastings of pictures of another class
    changed: int  # of these, answers that became the picture's class
    hidden: int  # of these, answers that a grey box changes to the same class: what it hides had stood against it

    @property
    def chance(self) -> float:
        """How often a map finds the picture that lights the same patch in every image, whichever it is."""
        return float(self.inside.mean()) if len(self.inside) else 0.0


def quarters(grid: Size) -> list[Cell]:
    """The four parts that a grid of patches has when it is cut in the middle: every patch is in one of them. Sides that
    are odd are cut beside their middle patch, and one patch cannot be cut."""
    rows, columns = ([slice(0, n // 2), slice(n // 2, n)] if n > 1 else [slice(0, 1)] for n in grid)
    return [(row, column) for row in rows for column in columns]


@torch.no_grad()
def paste_images(net: VisionTransformer, pixels: Tensor, wanted: int = 64, seed: int = 0) -> PastedImages:
    """Shrink one image to a quarter of another that is of another class for the network, and paste it there.

    Kept are those where the answer becomes that of the pasted picture, and does not where the quarter has the mean
    colour of the background instead. Of each quarter equally many are kept, however often a network goes by what is
    there: so no map finds more than its share by lighting one place.
    """
    config = net.config
    cells = quarters(config.grid)
    each, count = -(-wanted // len(cells)), len(pixels)
    rng = np.random.default_rng(seed)
    draws = rng.choice(count * count * len(cells), min(count * count * len(cells), wanted * TRIES), replace=False)
    kept: list[list[tuple[Tensor, int, int]]] = [[] for _ in cells]
    tried = changed = hidden = 0
    with eval_mode(net):
        answers = np.concatenate([_answers(net, part) for part in pixels.split(BATCH)])
        picture, background, place = np.unravel_index(draws, (count, count, len(cells)))
        other = answers[picture] != answers[background]
        triples = np.stack([picture, background, place], axis=1)[other]
        for start in range(0, len(triples), BATCH):
            part = triples[start : start + BATCH]
            part = part[[len(kept[cell]) < each for cell in part[:, 2]]]
            if not len(part):
                continue
            made = torch.stack([_pasted(pixels[a], pixels[b], cells[cell], config.cell) for a, b, cell in part])
            turned = np.flatnonzero(_answers(net, made) == answers[part[:, 0]])
            tried, changed = tried + len(part), changed + len(turned)
            if not len(turned):
                continue
            grey = torch.stack([_pasted(None, pixels[b], cells[cell], config.cell) for _, b, cell in part[turned]])
            alone = _answers(net, grey) == answers[part[turned, 0]]
            hidden += int(alone.sum())
            for row in turned[~alone]:
                first, second, cell = part[row]
                kept[cell].append((made[row], int(answers[first]), int(answers[second])))
    return _balanced(pixels, kept, cells, config.grid, min(each, *map(len, kept)), (tried, changed, hidden))


def pointing_game(maps: np.ndarray, inside: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For maps (M, h, w): whether the highest patch is inside the box, and the share of the map that is; (M,) each.
    A map that is the same everywhere scores what a random patch would."""
    flat, box = maps.reshape(len(maps), -1), inside.reshape(len(maps), -1)
    highest = flat == flat.max(1, keepdims=True)
    hits = (highest & box).sum(1) / highest.sum(1)
    total = flat.sum(1)
    share = np.where(total > 0, (flat * box).sum(1) / np.where(total > 0, total, 1), box.mean(1))
    return hits, share


def hit_rate(hits: np.ndarray) -> tuple[float, float, float]:
    """The mean of (M,) hits, and Wilson's 95 % interval, which does not vanish where all or none were found."""
    share, n = float(hits.mean()), len(hits)
    centre = share + SURE**2 / (2 * n)
    spread = SURE * float(np.sqrt(share * (1 - share) / n + (SURE / (2 * n)) ** 2))
    return share, (centre - spread) / (1 + SURE**2 / n), (centre + spread) / (1 + SURE**2 / n)


def _answers(net: VisionTransformer, pixels: Tensor) -> np.ndarray:
    return net(pixels).argmax(1).cpu().numpy()


def _pasted(picture: Tensor | None, background: Tensor, cell: Cell, patch: Size) -> Tensor:
    """A background (C, H, W) whose `cell` shows a whole picture, shrunk; none: the mean colour of the background."""
    made = background.clone()
    rows, columns = (slice(s.start * side, s.stop * side) for s, side in zip(cell, patch, strict=True))
    if picture is None:
        made[:, rows, columns] = background.mean((1, 2), keepdim=True)
    else:
        size = rows.stop - rows.start, columns.stop - columns.start
        made[:, rows, columns] = F.interpolate(picture[None], size, mode="bilinear", antialias=True)[0]
    return made


def _balanced(
    pixels: Tensor,
    kept: list[list[tuple[Tensor, int, int]]],
    cells: list[Cell],
    grid: Size,
    each: int,
    counts: tuple[int, int, int],
) -> PastedImages:
    """`each` images of every cell, the cells in turn."""
    places = [(row, cell) for row in range(each) for cell in range(len(cells))]
    inside = np.zeros((len(places), *grid), bool)
    for number, (_, cell) in enumerate(places):
        inside[number][cells[cell]] = True
    chosen = [kept[cell][row] for row, cell in places]
    made = torch.stack([one[0] for one in chosen]) if chosen else pixels[:0]
    classes, backgrounds = (np.array([one[which] for one in chosen], int) for which in (1, 2))
    return PastedImages(made, inside, classes, backgrounds, *counts)
