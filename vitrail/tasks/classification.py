"""Classification losses over soft targets, with a weight for each image and each class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import ObjectiveConfig
from vitrail.errors import UserError, did_you_mean
from vitrail.tasks.batch import Loss, Prepared


class Classification:
    """Softmax or sigmoid cross-entropy, summed over classes. `several`: an image has any number of labels."""

    def __init__(
        self,
        config: ObjectiveConfig,
        classes: int,
        class_weights: Sequence[float] | None = None,
        several: bool = False,
    ):
        self.config, self.num_classes, self.several = config, classes, several
        if class_weights is not None and len(class_weights) != classes:
            raise ValueError(f"{len(class_weights)} class weights for {classes} classes")
        self._class_weights = None if class_weights is None else torch.tensor(class_weights, dtype=torch.float32)

    def targets(self, labels: Tensor) -> Tensor:
        """Labels (B,), or zeros and ones (B, K) for any number of them, as smoothed targets (B, K).

        Sigmoid: 1-s and s, as in the paper's code; softmax: s spread.
        """
        smooth = self.config.label_smoothing
        one_hot = labels.float() if labels.ndim == 2 else F.one_hot(labels, self.num_classes).float()
        off = smooth if self.config.loss == "sigmoid" else smooth / self.num_classes
        on = 1 - smooth if self.config.loss == "sigmoid" else 1 - smooth + off
        return one_hot * (on - off) + off

    def __call__(self, model: nn.Module, batch: Prepared) -> Loss:
        return self.loss(model(batch.pixels), batch.targets, batch.weights)

    def loss(self, logits: Tensor, targets: Tensor, weights: Tensor) -> Loss:
        """Logits and targets are (B, K), weights (B,)."""
        total = (self.per_image(logits, targets) * weights).sum()
        return Loss(total, (self.right(logits, targets) * weights).sum())

    def per_image(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The loss of each image, float32 (B,). A class's weight multiplies its term: softmax -w t log p, sigmoid
        -w (t log p + (1-t) log(1-p))."""
        logits, weights = logits.float(), self._weights_on(logits.device)
        if self.config.loss == "sigmoid":
            # Not torch's own: it takes 10 from 10.0000454, and has 1 % too much left for each class at the start.
            terms = -targets * F.logsigmoid(logits) - (1 - targets) * F.logsigmoid(-logits)
        else:
            terms = -targets * F.log_softmax(logits, dim=-1)
        return (terms if weights is None else terms * weights).sum(-1)

    def right(self, logits: Tensor, targets: Tensor) -> Tensor:
        """1 where the likeliest class is the first of the targets, else 0; with several labels the share of classes
        told rightly. Float32 (B,)."""
        if self.several:
            return ((logits > 0) == (targets > 0.5)).float().mean(-1)
        return (logits.argmax(-1) == targets.argmax(-1)).float()

    def _weights_on(self, device: torch.device) -> Tensor | None:
        if self._class_weights is not None and self._class_weights.device != device:
            self._class_weights = self._class_weights.to(device)  # once
        return self._class_weights


def class_weights(
    setting: Literal["none", "balanced"] | Mapping[str, float], names: Sequence[str], counts: Sequence[int]
) -> list[float] | None:
    """What `objective.class_weights` asks for, in the order of `names`; `counts` are training images of each class.

    Balanced: n / (K n_k) over the K classes that have images, so that each counts as much as any other, and an image
    counts 1 on average. A class without images counts nothing. By name: classes not named count 1.
    """
    if setting == "none":
        return None
    if isinstance(setting, Mapping):
        unknown = next((name for name in setting if name not in names), None)
        if unknown is not None:
            raise UserError(f"objective.class_weights: there is no class '{unknown}'{did_you_mean(unknown, names)}")
        weights = [float(setting.get(name, 1.0)) for name in names]
    else:
        present = sum(count > 0 for count in counts)
        weights = [float(sum(counts) / (present * count)) if count else 0.0 for count in counts]
    if not any(weights):
        raise UserError("objective.class_weights: every class weighs 0, so nothing could be learned; raise one of them")
    return weights
