"""Faithfulness of maps: deletion and insertion curves (Petsiuk et al. 2018)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vitrail.interpret.attention import eval_mode
from vitrail.models.vit import VisionTransformer

STEPS = 10  # points of a curve after the first
MIN_GAIN = 0.01  # smaller differences of a probability are reported as no clear difference


@dataclass(frozen=True, eq=False)
class FaithfulnessCurves:
    """Probability of the explained class, (images, points), while patches are deleted or inserted."""

    fractions: np.ndarray  # (points,): fraction of patches deleted or inserted
    deletion: np.ndarray
    insertion: np.ndarray

    @property
    def deletion_area(self) -> np.ndarray:
        """(images,): area under the deletion curve; lower is better."""
        return np.trapezoid(self.deletion, self.fractions, axis=1)

    @property
    def insertion_area(self) -> np.ndarray:
        """(images,): area under the insertion curve; higher is better."""
        return np.trapezoid(self.insertion, self.fractions, axis=1)


@torch.no_grad()
def deletion_insertion(
    net: VisionTransformer,
    pixels: Tensor,
    maps: np.ndarray,
    classes: Sequence[int],
    *,
    to_probabilities: Callable[[Tensor], Tensor] | None = None,
    steps: int = STEPS,
    progress: Callable[[int], None] | None = None,
) -> FaithfulnessCurves:
    """Deletion and insertion curves of maps (B, h, w) for normalised pixels (B, C, H, W).

    A deleted patch gets the mean colour of its image. Ties in a map are broken at random, the same way in every call.
    `to_probabilities` maps logits to probabilities (default: softmax). `progress` gets the number of images of each
    forward pass.
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

    def probability(shown: Tensor) -> np.ndarray:
        """(B,) probabilities with only the patches `shown`, (B, h*w) bool."""
        mask = shown.unflatten(1, config.grid)[:, None]
        mask = mask.repeat_interleave(config.cell[0], 2).repeat_interleave(config.cell[1], 3)
        logits = net(torch.where(mask, pixels, grey)).float()
        probabilities = logits.softmax(-1) if to_probabilities is None else to_probabilities(logits)
        if progress is not None:
            progress(len(pixels))
        return probabilities.gather(1, chosen)[:, 0].cpu().numpy()

    with eval_mode(net):
        middle = counts[1:-1].tolist()
        all_shown, none_shown = probability(rank >= 0), probability(rank < 0)
        deletion = [all_shown, *(probability(rank >= k) for k in middle), none_shown]
        insertion = [none_shown, *(probability(rank < k) for k in middle), all_shown]
    return FaithfulnessCurves(counts / count, np.stack(deletion, axis=1), np.stack(insertion, axis=1))


def random_maps(maps: np.ndarray, seed: int = 1) -> np.ndarray:
    """Random maps of the same shape: the baseline of faithfulness."""
    return np.random.default_rng(seed).random(maps.shape)


@dataclass(frozen=True)
class PairedGain:
    """Mean improvement over a baseline on the same images, with its 95 % interval."""

    value: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        if abs(self.value) < MIN_GAIN:
            return "no clear difference"
        return "better" if self.low > 0 else "worse" if self.high < 0 else "no clear difference"


def paired_gain(values: np.ndarray, baseline: np.ndarray) -> PairedGain:
    """Mean of `values` minus `baseline`, (images,) each, with a bootstrap interval over images."""
    difference = values - baseline
    resampled = np.random.default_rng(0).integers(0, len(difference), (2000, len(difference)))
    low, high = np.quantile(difference[resampled].mean(1), [0.025, 0.975])
    return PairedGain(float(difference.mean()), float(low), float(high))
