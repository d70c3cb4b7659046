"""Masked-patch prediction: what the corrupted patches of an image show, from what the network makes of the rest."""

from __future__ import annotations

import math
from typing import Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import MaskedConfig, ModelConfig, NetworkConfig, Preprocess, RunConfig, Size
from vitrail.data.dataset import Dataset
from vitrail.data.randomness import Stream, bits
from vitrail.distributed import Ranks
from vitrail.errors import UserError
from vitrail.models.masked import COLORS, GRID, KEPT, MASK, OTHER, Corruption
from vitrail.tasks.task import Batch, Loss, LossSums


class MaskedPatch:
    """The paper's self-supervision, for a MaskedPatchNetwork. `patch`: image pixels that one token stands for.

    Of the N patches of each image exactly floor(share * N) are corrupted. A tenth of these, rounded, look like another
    patch of the image, a tenth like themselves, and the rest like [mask]: 78, 10 and 10 of the 98 in 14x14 patches.
    Which ones is a function of (seed, epoch, sample), whatever else is in the batch.
    """

    name = "masked_patch"
    graph_safe = False  # corrupted patches are drawn by the host anew in each step

    def __init__(self, config: MaskedConfig, preprocess: Preprocess, patch: Size, seed: int):
        self.target, self.patch, self.seed = config.target, patch, seed
        self.patches = (preprocess.size[0] // patch[0]) * (preprocess.size[1] // patch[1])
        self.corrupted = math.floor(config.mask_ratio * self.patches + 1e-9)  # the nudge: 0.29 of 100 are 29
        if not self.corrupted:
            raise UserError(
                f"masked.mask_ratio {config.mask_ratio:g} of {self.patches} patches is 0 patches: "
                "raise it, or use smaller patches"
            )
        if preprocess.channels != 3 and self.target != "pixels":
            raise UserError(
                f"masked.target '{self.target}' needs images with 3 channels, not {preprocess.channels}: "
                "use masked.target='pixels'"
            )
        self._tenth = (self.corrupted + 5) // 10
        self._masks = self.corrupted - 2 * self._tenth
        changed = [OTHER] * self._tenth + [KEPT] * self._tenth
        self._kinds = torch.tensor([MASK] * self._masks + changed)  # (M,)
        # (1, C, 1, 1), of bytes
        self._mean, self._std = (255 * torch.tensor(v).view(1, -1, 1, 1) for v in (preprocess.mean, preprocess.std))

    @classmethod
    def from_run(cls, config: RunConfig, model: NetworkConfig, preprocess: Preprocess, dataset: Dataset) -> Self:
        assert isinstance(model, ModelConfig)  # the settings of a run refuse others
        return cls(config.masked, preprocess, model.cell, config.train.seed)

    def targets(self, labels: Tensor) -> Tensor:
        """None: what is to be predicted is the pixels themselves."""
        return torch.empty(len(labels), 0, device=labels.device)

    def validation(self) -> MaskedValidation:
        return MaskedValidation(self)

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        if batch.epoch is None or batch.sample is None:
            raise ValueError("corruption is drawn for each image: a batch needs its epochs and samples")
        corruption = self.corruption(batch.epoch, batch.sample, batch.pixels.device)
        predicted = model(batch.pixels, corruption)
        return self.loss_of_patches(predicted, self.patch_targets(batch.pixels, corruption.where), batch.weights)

    def loss_of_patches(self, predicted: Tensor, targets: Tensor, weights: Tensor) -> Loss:
        """Predictions (B, M, outputs) against the targets: each image's mean over its patches, times its weight."""
        predicted = predicted.float()
        if self.target == "pixels":
            errors = (predicted - targets).square().mean((1, 2))
            return Loss((errors * weights).sum(), torch.full_like(weights, torch.nan).sum())  # no pixel is just right
        logits = predicted.unflatten(-1, (-1, COLORS))  # (B, M, parts, 512)
        errors = F.cross_entropy(logits.flatten(0, 2), targets.flatten(), reduction="none").view(targets.shape)
        correct = (logits.argmax(-1) == targets).float()
        return Loss((errors.mean((1, 2)) * weights).sum(), (correct.mean((1, 2)) * weights).sum())

    def corruption(self, epoch: Tensor, sample: Tensor, device: torch.device) -> Corruption:
        """What happens to each image, from its keys, int64 (B,) on the CPU; all on `device`."""
        words = bits(self.seed, Stream.MASKED, epoch.numpy(), sample.numpy(), self.patches + self._tenth)
        drawn = torch.from_numpy(words.astype(np.int64))
        if device.type == "cuda":  # from memory that a GPU reads by itself, so that nobody waits
            drawn = drawn.pin_memory()
        drawn = drawn.to(device, non_blocking=True)
        self._kinds = self._kinds.to(device)
        # A random order of the patches; the kinds stand in a row, and their places are as random.
        where = drawn[:, : self.patches].argsort(dim=1, stable=True)[:, : self.corrupted]  # (B, M)
        masked, replaced, kept = where.split([self._masks, self._tenth, self._tenth], dim=1)
        other = (drawn[:, self.patches :] * (self.patches - 1)) >> 32  # one of all patches but one,
        source = torch.cat([masked, other + (other >= replaced), kept], dim=1)  # and that one is the patch itself
        return Corruption(where, self._kinds.expand(len(where), -1), source)

    def patch_targets(self, pixels: Tensor, where: Tensor) -> Tensor:
        """What to predict of the patches `where` (B, M) of normalised pixels: colours int64 (B, M, parts), or the
        pixels themselves, (B, M, C * height * width)."""
        batch, channels = pixels.shape[:2]
        height, width = self.patch
        cut = pixels.unflatten(3, (-1, width)).unflatten(2, (-1, height)).permute(0, 2, 4, 1, 3, 5)
        cut = cut.reshape(-1, channels, height, width)  # (B * N, C, height, width)
        rows = torch.arange(batch, device=pixels.device)[:, None] * self.patches + where
        chosen = cut[rows.flatten()].float()
        if self.target == "pixels":
            return chosen.view(*where.shape, -1)
        return self._colors(chosen, 1 if self.target == "color" else GRID).view(*where.shape, -1)

    def _colors(self, patches: Tensor, side: int) -> Tensor:
        """The mean colour of side x side parts of normalised patches, 64 red + 8 green + blue of 0..7 each:
        (n, 3, height, width) -> int64 (n, side, side).

        The bytes that were normalised are made again, and their sums are whole numbers: a mean of exactly 32 does not
        fall to the colour below by a rounding error.
        """
        self._mean, self._std = self._mean.to(patches.device), self._std.to(patches.device)
        values = (patches * self._std + self._mean).round().clamp(0, 255)
        areas = torch.outer(*(_lengths(length, side, patches.device) for length in self.patch))  # (side, side)
        sums = (F.adaptive_avg_pool2d(values, side) * areas).round().long()
        red, green, blue = sums.div(32 * areas, rounding_mode="floor").unbind(1)
        return 64 * red + 8 * green + blue


class MaskedValidation:
    """Loss, and the share of corrupted patches that are predicted correctly; the same patches each time."""

    def __init__(self, task: MaskedPatch):
        self.task, self.sums = task, LossSums()

    def update(self, model: nn.Module, batch: Batch) -> None:
        self.sums.update(self.task.loss(model, batch), batch.weights.sum())

    def compute(self, ranks: Ranks) -> dict[str, float]:
        loss, correct, count = self.sums.compute(ranks)
        row = {"val_loss": loss / max(count, 1)}
        return row | {"val_accuracy": correct / max(count, 1)} if math.isfinite(correct) else row


def _lengths(length: int, parts: int, device: torch.device) -> Tensor:
    """How long each part of adaptive pooling is: those of an uneven length overlap. Int64 (parts,)."""
    index = torch.arange(parts, device=device)
    return ((index + 1) * length + parts - 1) // parts - index * length // parts
