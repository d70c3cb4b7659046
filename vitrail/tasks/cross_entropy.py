"""Cross-entropy with soft targets, image weights and class weights: the base of the tasks with labels."""

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
        """Convert labels, (B,) or multi-hot (B, K), to targets (B, K) with label smoothing s.

        For sigmoid, 1 and 0 become 1 - s and s, as in the paper's code. For softmax, s is spread over all classes.
        """
        smooth = self.config.label_smoothing
        one_hot = labels.float() if labels.ndim == 2 else F.one_hot(labels, self.num_classes).float()
        off = smooth if self.config.loss == "sigmoid" else smooth / self.num_classes
        on = 1 - smooth if self.config.loss == "sigmoid" else 1 - smooth + off
        return one_hot * (on - off) + off

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        return self.loss_of_logits(model(batch.pixels), batch.targets, batch.weights)

    def loss_of_logits(self, logits: Tensor, targets: Tensor, weights: Tensor) -> Loss:
        """The loss of logits (B, K) with targets (B, K) and image weights (B,)."""
        total = (self.per_image(logits, targets) * weights).sum()
        return Loss(total, (self.correct(logits, targets) * weights).sum())

    def per_image(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The loss of each image, float32 (B,).

        With class weights w, softmax: sum of -w t log p; sigmoid: sum of -w (t log p + (1-t) log(1-p)).
        """
        logits, weights = logits.float(), self._weights_on(logits.device)
        if self.config.loss == "sigmoid":
            # Not F.binary_cross_entropy_with_logits: it subtracts 10 from 10.0000454, so that with the paper's initial
            # head bias of -10 the loss of each class is 1 % too large.
            terms = -targets * F.logsigmoid(logits) - (1 - targets) * F.logsigmoid(-logits)
        else:
            terms = -targets * F.log_softmax(logits, dim=-1)
        return (terms if weights is None else terms * weights).sum(-1)

    @abstractmethod
    def correct(self, logits: Tensor, targets: Tensor) -> Tensor:
        """How correct the prediction for each image is, from 0 to 1; float32 (B,)."""

    @abstractmethod
    def hard_targets(self, logits: Tensor, probabilities: Tensor) -> Tensor:
        """The decisions of a teacher with these outputs, as zeros and ones; all (B, K)."""

    @abstractmethod
    def validation(self) -> Validation: ...

    def _weights_on(self, device: torch.device) -> Tensor | None:
        if self._class_weights is not None and self._class_weights.device != device:
            self._class_weights = self._class_weights.to(device)
        return self._class_weights


class LabelValidation:
    """Validation loss and accuracy."""

    def __init__(self, task: CrossEntropy, name: str):
        self.task, self.name, self.sums = task, name, LossSums()

    def update(self, model: nn.Module, batch: Batch) -> None:
        logits, readable = model(batch.pixels).float(), batch.weights > 0
        self.add(logits[readable], batch.targets[readable])

    def add(self, logits: Tensor, targets: Tensor) -> None:
        loss = self.task.loss_of_logits(logits, targets, torch.ones(len(logits), device=logits.device))
        self.sums.update(loss, loss.total.new_tensor(len(logits)))

    def compute(self, ranks: Ranks) -> dict[str, float]:
        loss, correct, count = self.sums.compute(ranks)
        if not count:
            raise UserError("no validation image can be read any more: restore the files, then resume with --resume")
        return {"val_loss": loss / count, self.name: correct / count}


def class_weights(
    setting: Literal["none", "balanced"] | Mapping[str, float], names: Sequence[str], counts: Sequence[int]
) -> list[float] | None:
    """The weight of each class, from the setting `objective.class_weights`; None for equal weights.

    Parameters
    ----------
    setting
        "none"; "balanced": n / (K n_k) for the K classes with images, as in scikit-learn, and 0 for classes without; or
        weights by class name, with 1 for the others.
    names
        The classes, in order.
    counts
        The number of training images of each class.
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
        raise UserError("objective.class_weights: all weights are 0, so nothing can be learned; increase at least one")
    return weights
