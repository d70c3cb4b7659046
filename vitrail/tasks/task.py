"""The interface of tasks: targets, loss, validation metrics, predictions and final scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from vitrail.config.postprocess import Postprocess
from vitrail.distributed import Ranks
from vitrail.metrics.scores import Scores
from vitrail.metrics.significance import PairedComparison
from vitrail.tasks.result import Baseline, Examples, Result


@dataclass(frozen=True)
class Batch:
    """A batch of images for the network, on its device."""

    pixels: Tensor  # (B, C, H, W), normalised
    targets: Tensor  # (B, K)
    weights: Tensor  # (B,): weight of each image in the loss; 0 for images that cannot be read
    epoch: Tensor | None = None  # int64 (B,) on the CPU; (epoch, sample) seeds the random numbers of an image
    sample: Tensor | None = None
    waited: float | None = None  # seconds spent waiting for its images; None: the time that next() took

    def __len__(self) -> int:
        return len(self.pixels)

    def micro_batch(self, first: int, last: int) -> Batch:
        """The images `first` to `last`."""
        rows = slice(first, last)
        epoch, sample = (None if key is None else key[rows] for key in (self.epoch, self.sample))
        return Batch(self.pixels[rows], self.targets[rows], self.weights[rows], epoch, sample)


@dataclass(frozen=True)
class Loss:
    """Sums over a batch, scalars on its device. The trainer divides them by the sum of the weights of the step."""

    total: Tensor  # of the loss of each image times its weight
    correct: Tensor  # of how correct each image is (0 to 1) times its weight; NaN if accuracy is undefined


Ranking = list[tuple[int, float]]  # (class, probability), most probable first
LossFunction = Callable[[nn.Module, Any], Loss]  # (model, batch) -> loss; it calls the model


class Validation(Protocol):
    """Accumulates validation metrics over batches. Each process sees a part of the images."""

    def update(self, model: nn.Module, batch: Batch) -> None:
        """Add a batch. Called under no_grad, in the precision of the validation."""

    def compute(self, ranks: Ranks) -> dict[str, float]:
        """The metrics by their name in metrics.jsonl, with val_loss. All processes must call this."""


class TrainingTask(Protocol):
    """What the trainer needs of a task: the loss of a batch."""

    @property
    def graph_safe(self) -> bool:
        """Whether a step can be captured as a CUDA graph. False if the loss draws random numbers on the host."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        """Run the model on a batch and return its loss. Batches are a `Batch`, or a `CustomBatch` for a custom loss."""


class Task(TrainingTask, Protocol):
    """A task with labels or masked patches, as `vitrail train` runs it."""

    name: str

    def targets(self, labels: Tensor) -> Tensor:
        """Convert the labels of the data to the targets of the loss."""

    def validation(self) -> Validation:
        """A new, empty accumulator of validation metrics."""


class PredictionTask(Task, Protocol):
    """A task whose network makes predictions, which can be scored, tuned, compared and reported.

    Logits are (N, K), and labels are as the data has them. Scores and tuning results have a type of the task; callers
    only use what all `Scores` have, and pass them back to the task.
    """

    columns: tuple[str, ...]  # of predictions.csv
    abstains: bool  # whether tuning can fit a threshold for a target accuracy

    def probabilities(self, logits: Tensor) -> Tensor:
        """The probabilities (N, K) of logits that are already divided by the temperature."""

    def predictions(
        self, probabilities: Tensor, top: int, threshold: float | None, postprocess: Postprocess
    ) -> Iterator[tuple[Ranking, Ranking]]:
        """For each image, its `top` most probable classes and its predicted labels, which reach the `threshold`. If
        None, the threshold is that of `postprocess`."""

    def labels_of(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The labels to score with; reduces sets of labels if the task predicts one label per image."""

    def score(self, logits: np.ndarray, labels: np.ndarray, classes: Sequence[str], postprocess: Postprocess) -> Scores:
        """Compute the final scores."""

    def examples(
        self, logits: np.ndarray, labels: np.ndarray, classes: Sequence[str], postprocess: Postprocess
    ) -> Examples:
        """Choose images to show in a report."""

    def tune(
        self,
        logits: np.ndarray,
        labels: np.ndarray,
        postprocess: Postprocess,
        accuracy: float | None,
        groups: np.ndarray | None,
    ) -> Any:
        """Fit a temperature and thresholds, for a target `accuracy` if given. Cross-fits within `groups` of images."""

    def to_postprocess(self, tuning: Any, before: Postprocess) -> tuple[dict[str, Any], list[str]]:
        """The fields of `Postprocess` to change, and messages about them."""

    def compare(self, first: np.ndarray, second: np.ndarray, labels: np.ndarray) -> PairedComparison:
        """Compare the logits of two networks on the same images."""

    def rows(
        self,
        logits: np.ndarray,
        labels: np.ndarray,
        classes: Sequence[str],
        postprocess: Postprocess,
        examples: Examples,
    ) -> Iterator[tuple[str, ...]]:
        """The rows of predictions.csv without the first column, the image name."""

    def result(self, scores: Any, baseline: Baseline | None = None) -> Result:
        """Describe the scores for reports. `baseline` is the score of another method on the same images."""


class LossSums:
    """Running sums of loss, correct predictions and images. Logits are not kept, to save memory."""

    def __init__(self) -> None:
        self.sums = torch.zeros(3, dtype=torch.float64)

    def update(self, loss: Loss, images: Tensor) -> None:
        self.sums += torch.stack([loss.total, loss.correct, images]).double().cpu()

    def compute(self, ranks: Ranks) -> tuple[float, float, float]:
        """The sums (loss, correct, images) over all processes, which must all call this."""
        loss, correct, images = torch.stack(ranks.all_gather(self.sums)).sum(0).tolist()
        return loss, correct, images
