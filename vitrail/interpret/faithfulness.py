"""Does a map show what the network goes by? Take away the patches it ranks first, or show only those, and watch the
probability (deletion and insertion, Petsiuk et al. 2018)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vitrail.interpret.attention import eval_mode
from vitrail.models.vit import VisionTransformer

STEPS = 10  # points of a curve after its first
NOTABLE = 0.01  # of a probability: smaller differences count as none, however certain


@dataclass(frozen=True, eq=False)
class FaithfulnessCurves:
    """The probability of the explained class, (images, points), while patches go or come in the order of a map."""

    shares: np.ndarray  # (points,): of the patches that are gone, or there
    deletion: np.ndarray  # steep, if the map shows what the network goes by
    insertion: np.ndarray

    @property
    def deletion_area(self) -> np.ndarray:
        """(images,): the mean probability while patches go; small is faithful."""
        return np.trapezoid(self.deletion, self.shares, axis=1)

    @property
    def insertion_area(self) -> np.ndarray:
        """(images,): the mean probability while patches come; large is faithful."""
        return np.trapezoid(self.insertion, self.shares, axis=1)


@torch.no_grad()
def deletion_insertion(
    net: VisionTransformer,
    pixels: Tensor,
    maps: np.ndarray,
    classes: Sequence[int],
    *,
    chances: Callable[[Tensor], Tensor] | None = None,
    steps: int = STEPS,
    between: Callable[[int], None] | None = None,
) -> FaithfulnessCurves:
    """Curves for normalised pixels (B, C, H, W) and maps (B, h, w) of the same images.

    A patch that is gone has the mean colour of its image. Patches of equal rank go in a random order, which is the
    same in every call. `chances` makes probabilities of logits (if not given, a softmax). `between` hears of each
    forward.
    """
    config = net.config
    count = config.grid[0] * config.grid[1]
    steps = min(steps, count)
    ties = np.random.default_rng(0).random((len(maps), count))
    order = np.lexsort((ties, -maps.reshape(len(maps), -1)), axis=-1)
    rank = torch.from_numpy(order.argsort(axis=1)).to(pixels.device)  # (B, h*w)
    counts = np.round(np.linspace(0, count, steps + 1)).astype(int)
    grey = pixels.mean((2, 3), keepdim=True)
    chosen = torch.as_tensor(classes, device=pixels.device)[:, None]

    def probability(there: Tensor) -> np.ndarray:
        """(B,): with the patches that are there, (B, h*w) bool."""
        mask = there.unflatten(1, config.grid)[:, None]
        mask = mask.repeat_interleave(config.cell[0], 2).repeat_interleave(config.cell[1], 3)
        logits = net(torch.where(mask, pixels, grey)).float()
        found = logits.softmax(-1) if chances is None else chances(logits)
        if between is not None:
            between(len(pixels))
        return found.gather(1, chosen)[:, 0].cpu().numpy()

    with eval_mode(net):
        middle = counts[1:-1].tolist()
        whole, nothing = probability(rank >= 0), probability(rank < 0)
        deletion = [whole, *(probability(rank >= k) for k in middle), nothing]
        insertion = [nothing, *(probability(rank < k) for k in middle), whole]
    return FaithfulnessCurves(counts / count, np.stack(deletion, axis=1), np.stack(insertion, axis=1))


def random_maps(maps: np.ndarray, seed: int = 1) -> np.ndarray:
    """Maps of the same shape that know nothing: what a faithful map has to beat."""
    return np.random.default_rng(seed).random(maps.shape)


@dataclass(frozen=True)
class PairedGain:
    """How much better a number is than its reference on the same images, with its 95 % interval."""

    value: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        if abs(self.value) < NOTABLE:
            return "no clear difference"
        return "better" if self.low > 0 else "worse" if self.high < 0 else "no clear difference"


def paired_gain(better: np.ndarray, reference: np.ndarray) -> PairedGain:
    """The mean of paired differences, (images,) each; the interval is a bootstrap over images."""
    difference = better - reference
    drawn = np.random.default_rng(0).integers(0, len(difference), (2000, len(difference)))
    low, high = np.quantile(difference[drawn].mean(1), [0.025, 0.975])
    return PairedGain(float(difference.mean()), float(low), float(high))
