"""Classification losses over soft targets, with a weight per image."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.config import ObjectiveConfig


class Classification:
    """Softmax or sigmoid cross-entropy, summed over classes and averaged over the weighted images."""

    def __init__(self, config: ObjectiveConfig, num_classes: int):
        self.config, self.num_classes = config, num_classes

    def targets(self, labels: Tensor) -> Tensor:
        """Labels (B,), or zeros and ones (B, K) for any number of them, as smoothed targets (B, K).

        Sigmoid: 1-s and s, as in the paper's code; softmax: s spread.
        """
        smooth = self.config.label_smoothing
        one_hot = labels.float() if labels.ndim == 2 else F.one_hot(labels, self.num_classes).float()
        off = smooth if self.config.loss == "sigmoid" else smooth / self.num_classes
        on = 1 - smooth if self.config.loss == "sigmoid" else 1 - smooth + off
        return one_hot * (on - off) + off

    def __call__(self, logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        logits = logits.float()
        if self.config.loss == "softmax":
            per_image = -(targets * F.log_softmax(logits, dim=-1)).sum(-1)
        else:
            per_image = F.binary_cross_entropy_with_logits(logits, targets, reduction="none").sum(-1)
        return (per_image * weights).sum() / torch.clamp(weights.sum(), min=1)
