"""Cross-entropy over soft targets, with a weight for each image and each class: what tasks with labels share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Literal, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import NetworkConfig, ObjectiveConfig, Preprocess, RunConfig
from vitrail.data.dataset import Dataset
from vitrail.distributed import Ranks
from vitrail.errors import UserError, did_you_mean
from vitrail.tasks.task import Batch, Loss, LossSums, Validation


class CrossEntropy(ABC):
    """Softmax or sigmoid cross-entropy, summed over classes."""

    graph_safe = True

    def __init__(self, config: ObjectiveConfig, classes: int, class_weights: Sequence[float] | None = None):
        self.config, self.num_classes = config, classes
        if class_weights is not None and len(class_weights) != classes:
            raise ValueError(f"{len(class_weights)} class weights for {classes} classes")
        self._class_weights = None if class_weights is None else torch.tensor(class_weights, dtype=torch.float32)

    @classmethod
    def from_run(cls, config: RunConfig, model: NetworkConfig, preprocess: Preprocess, dataset: Dataset) -> Self:
        train, names = dataset.splits["train"], dataset.classes
        labels = train.labels_of(np.arange(len(train)))
        counts = labels.sum(0) if labels.ndim == 2 else np.bincount(labels)
        counts = np.pad(counts, (0, len(names) - len(counts)))
        weights = class_weights(config.objective.class_weights, names, counts.tolist())
        return cls(config.objective, len(names), weights)

    def targets(self, labels: Tensor) -> Tensor:
        """Labels (B,), or zeros and ones (B, K) for any number of them, as smoothed targets (B, K).

        Sigmoid: 1-s and s, as in the paper's code; softmax: s spread.
        """
        smooth = self.config.label_smoothing
        one_hot = labels.float() if labels.ndim == 2 else F.one_hot(labels, self.num_classes).float()
        off = smooth if self.config.loss == "sigmoid" else smooth / self.num_classes
        on = 1 - smooth if self.config.loss == "sigmoid" else 1 - smooth + off
        return one_hot * (on - off) + off

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        return self.loss_of_logits(model(batch.pixels), batch.targets, batch.weights)

    def loss_of_logits(self, logits: Tensor, targets: Tensor, weights: Tensor) -> Loss:
        """Logits and targets are (B, K), weights (B,)."""
        total = (self.per_image(logits, targets) * weights).sum()
        return Loss(total, (self.correct(logits, targets) * weights).sum())

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

    @abstractmethod
    def correct(self, logits: Tensor, targets: Tensor) -> Tensor:
        """How far each image is got right, from 0 to 1; float32 (B,)."""

    @abstractmethod
    def hard_targets(self, logits: Tensor, probabilities: Tensor) -> Tensor:
        """What a teacher with these outputs chooses, as zeros and ones; all (B, K)."""

    @abstractmethod
    def validation(self) -> Validation: ...

    def _weights_on(self, device: torch.device) -> Tensor | None:
        if self._class_weights is not None and self._class_weights.device != device:
            self._class_weights = self._class_weights.to(device)  # once
        return self._class_weights


class LabelValidation:
    """Loss, and what was right, over the validation images."""

    def __init__(self, task: CrossEntropy, name: str):
        self.task, self.name, self.sums = task, name, LossSums()

    def update(self, model: nn.Module, batch: Batch) -> None:
        logits, readable = model(batch.pixels).float(), batch.weights > 0
        self.keep(logits[readable], batch.targets[readable])

    def keep(self, logits: Tensor, targets: Tensor) -> None:
        found = self.task.loss_of_logits(logits, targets, torch.ones(len(logits), device=logits.device))
        self.sums.update(found, found.total.new_tensor(len(logits)))

    def compute(self, ranks: Ranks) -> dict[str, float]:
        loss, correct, count = self.sums.compute(ranks)
        if not count:
            gone = "none of the images held out to measure on can be read any more"
            raise UserError(f"{gone}; put them back and go on with --resume")
        return {"val_loss": loss / count, self.name: correct / count}


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
