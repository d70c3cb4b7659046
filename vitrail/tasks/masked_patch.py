"""Masked-patch prediction, the self-supervised task of the paper: predict the content of corrupted patches."""

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
    """The masked-patch task, for a MaskedPatchNetwork.

    Exactly floor(mask_ratio * N) of the N patches of an image are corrupted. A tenth of them (rounded) are replaced by
    another patch of the image, a tenth are kept, and the others become [mask]: with 14x14 patches 10, 10 and 78 of 98.
    Which ones is a function of (seed, epoch, sample), and does not depend on the batch.

    Parameters
    ----------
    patch
        Height and width in pixels of the image area of a token.
    """

    name = "masked_patch"
    graph_safe = False  # the host draws the corrupted patches of each step

    def __init__(self, config: MaskedConfig, preprocess: Preprocess, patch: Size, seed: int):
        self.target, self.patch, self.seed = config.target, patch, seed
        self.patches = (preprocess.size[0] // patch[0]) * (preprocess.size[1] // patch[1])
        self.corrupted = math.floor(config.mask_ratio * self.patches + 1e-9)  # rounding: 0.29 of 100 is 29
        if not self.corrupted:
            raise UserError(
                f"masked.mask_ratio={config.mask_ratio:g} masks none of the {self.patches} patches: increase it, "
                "or use smaller patches"
            )
        if preprocess.channels != 3 and self.target != "pixels":
            raise UserError(
                f"masked.target={self.target} needs images with 3 channels, not {preprocess.channels}: "
                "use masked.target=pixels"
            )
        self._tenth = (self.corrupted + 5) // 10
        self._masks = self.corrupted - 2 * self._tenth
        changed = [OTHER] * self._tenth + [KEPT] * self._tenth
        self._kinds = torch.tensor([MASK] * self._masks + changed)  # (M,)
        # (1, C, 1, 1), of bytes
        self._mean, self._std = (255 * torch.tensor(v).view(1, -1, 1, 1) for v in (preprocess.mean, preprocess.std))

    @classmethod
    def from_run(cls, config: RunConfig, model: NetworkConfig, preprocess: Preprocess, dataset: Dataset) -> Self:
        assert isinstance(model, ModelConfig)  # ensured by the validation of the config
        return cls(config.masked, preprocess, model.cell, config.train.seed)

    def targets(self, labels: Tensor) -> Tensor:
        """Empty: the targets are computed from the pixels."""
        return torch.empty(len(labels), 0, device=labels.device)

    def validation(self) -> MaskedValidation:
        return MaskedValidation(self)

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        if batch.epoch is None or batch.sample is None:
            raise ValueError("the batch has no epoch and sample, from which the corrupted patches are drawn")
        corruption = self.corruption(batch.epoch, batch.sample, batch.pixels.device)
        predicted = model(batch.pixels, corruption)
        return self.loss_of_patches(predicted, self.patch_targets(batch.pixels, corruption.where), batch.weights)

    def loss_of_patches(self, predicted: Tensor, targets: Tensor, weights: Tensor) -> Loss:
        """The loss of predictions (B, M, outputs): the mean over the patches of each image, times its weight."""
        predicted = predicted.float()
        if self.target == "pixels":
            errors = (predicted - targets).square().mean((1, 2))
            return Loss((errors * weights).sum(), torch.full_like(weights, torch.nan).sum())  # accuracy is undefined
        logits = predicted.unflatten(-1, (-1, COLORS))  # (B, M, parts, 512)
        errors = F.cross_entropy(logits.flatten(0, 2), targets.flatten(), reduction="none").view(targets.shape)
        correct = (logits.argmax(-1) == targets).float()
        return Loss((errors.mean((1, 2)) * weights).sum(), (correct.mean((1, 2)) * weights).sum())

    def corruption(self, epoch: Tensor, sample: Tensor, device: torch.device) -> Corruption:
        """Draw the corruption of each image, on `device`, from its keys `epoch` and `sample`, int64 (B,) on the CPU."""
        random_bits = bits(self.seed, Stream.MASKED, epoch.numpy(), sample.numpy(), self.patches + self._tenth)
        drawn = torch.from_numpy(random_bits.astype(np.int64))
        if device.type == "cuda":  # pinned, so that the copy does not block
            drawn = drawn.pin_memory()
        drawn = drawn.to(device, non_blocking=True)
        self._kinds = self._kinds.to(device)
        # A random order of the patches. The kinds have a fixed order, since the patches have a random one.
        where = drawn[:, : self.patches].argsort(dim=1, stable=True)[:, : self.corrupted]  # (B, M)
        masked, replaced, kept = where.split([self._masks, self._tenth, self._tenth], dim=1)
        other = (drawn[:, self.patches :] * (self.patches - 1)) >> 32  # one of all patches but one:
        source = torch.cat([masked, other + (other >= replaced), kept], dim=1)  # skip the patch itself
        return Corruption(where, self._kinds.expand(len(where), -1), source)

    def patch_targets(self, pixels: Tensor, where: Tensor) -> Tensor:
        """The targets of the patches `where` (B, M) of normalised pixels: colours, int64 (B, M, parts), or pixels,
        (B, M, C * height * width)."""
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
        """The mean colour of side x side parts of normalised patches, as 64 red + 8 green + blue with 0..7 each:
        (n, 3, height, width) -> int64 (n, side, side).

        Restores the bytes and sums them as integers, so that no rounding error moves a mean of exactly 32 to the next
        lower colour.
        """
        self._mean, self._std = self._mean.to(patches.device), self._std.to(patches.device)
        values = (patches * self._std + self._mean).round().clamp(0, 255)
        areas = torch.outer(*(_lengths(length, side, patches.device) for length in self.patch))  # (side, side)
        sums = (F.adaptive_avg_pool2d(values, side) * areas).round().long()
        red, green, blue = sums.div(32 * areas, rounding_mode="floor").unbind(1)
        return 64 * red + 8 * green + blue


class MaskedValidation:
    """Validation loss and the fraction of correctly predicted patches. The corrupted patches are always the same."""

    def __init__(self, task: MaskedPatch):
        self.task, self.sums = task, LossSums()

    def update(self, model: nn.Module, batch: Batch) -> None:
        self.sums.update(self.task.loss(model, batch), batch.weights.sum())

    def compute(self, ranks: Ranks) -> dict[str, float]:
        loss, correct, count = self.sums.compute(ranks)
        row = {"val_loss": loss / max(count, 1)}
        return row | {"val_accuracy": correct / max(count, 1)} if math.isfinite(correct) else row


def _lengths(length: int, parts: int, device: torch.device) -> Tensor:
    """Length of each part in adaptive pooling, int64 (parts,). They overlap unless `parts` divides `length`."""
    index = torch.arange(parts, device=device)
    return ((index + 1) * length + parts - 1) // parts - index * length // parts
