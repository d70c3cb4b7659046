"""What a task is: targets and a loss for training, numbers on the validation images, and the final scores."""

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
    """A batch as the network takes it, on its device."""

    pixels: Tensor  # (B, C, H, W), normalised
    targets: Tensor  # (B, K)
    weights: Tensor  # (B,): how much an image counts
    epoch: Tensor | None = None  # int64 (B,) on the CPU: with the sample, the key of whatever is drawn for an image
    sample: Tensor | None = None
    waited: float | None = None  # seconds until its images were there; none: all the time it took to come

    def __len__(self) -> int:
        return len(self.pixels)

    def micro_batch(self, first: int, last: int) -> Batch:
        """Rows `first` to `last`."""
        rows = slice(first, last)
        epoch, sample = (None if key is None else key[rows] for key in (self.epoch, self.sample))
        return Batch(self.pixels[rows], self.targets[rows], self.weights[rows], epoch, sample)


@dataclass(frozen=True)
class Loss:
    """Sums over a batch, scalars on its device; whoever trains divides by the sum of the weights of the whole step."""

    total: Tensor  # each image's loss times its weight
    # The weights of the images that the network got right, or the mean share of an image's parts that it did; not a
    # number where nothing is right or wrong
    correct: Tensor


Ranking = list[tuple[int, float]]  # classes with their probabilities, the likeliest first
LossFunction = Callable[[nn.Module, Any], Loss]  # it runs the network itself, on the batches of its kind


class Validation(Protocol):
    """Collects what a network makes of the validation images; each process sees a part of them. Images that cannot be
    read have a weight of 0 and count nothing."""

    def update(self, model: nn.Module, batch: Batch) -> None:
        """Called without gradients, in the precision that is measured in."""

    def compute(self, ranks: Ranks) -> dict[str, float]:
        """Numbers by their name in metrics.jsonl, among them val_loss. All processes call this together."""


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
    """A task whose network predicts something of an image, which can be scored, tuned, compared and reported.

    Logits are (N, K), in arrays with the labels beside them as the data has them. Scores and tuning are of its own
    kind; whoever calls hands them back and looks at no more of them than every kind has.
    """

    columns: tuple[str, ...]  # of the table with the prediction for every image
    abstains: bool  # whether a threshold can be found above which so many predictions are right

    def probabilities(self, logits: Tensor) -> Tensor:
        """(N, K), of logits that are divided by their temperature."""

    def predictions(
        self, probabilities: Tensor, top: int, threshold: float | None, postprocess: Postprocess
    ) -> Iterator[tuple[Ranking, Ranking]]:
        """For each image its `top` likeliest classes, and those that it is given; below the `threshold`, by default
        that of the weights, none."""

    def labels_of(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The labels to score against, where the data has more than the task can predict."""

    def score(
        self, logits: np.ndarray, labels: np.ndarray, classes: Sequence[str], postprocess: Postprocess
    ) -> Scores: ...

    def examples(
        self, logits: np.ndarray, labels: np.ndarray, classes: Sequence[str], postprocess: Postprocess
    ) -> Examples:
        """Images to look at."""

    def tune(
        self,
        logits: np.ndarray,
        labels: np.ndarray,
        postprocess: Postprocess,
        accuracy: float | None,
        groups: np.ndarray | None,
    ) -> Any:
        """What a temperature and thresholds would change; `accuracy`: that predictions shall have."""

    def to_postprocess(self, tuning: Any, before: Postprocess) -> tuple[dict[str, Any], list[str]]:
        """What of the tuning to write into the weights, and in words."""

    def compare(self, first: np.ndarray, second: np.ndarray, labels: np.ndarray) -> PairedComparison:
        """Two networks on the same images."""

    def rows(
        self,
        logits: np.ndarray,
        labels: np.ndarray,
        classes: Sequence[str],
        postprocess: Postprocess,
        examples: Examples,
    ) -> Iterator[tuple[str, ...]]:
        """The table with the prediction for every image, but for its first column, the name."""

    def result(self, scores: Any, baseline: Baseline | None = None) -> Result:
        """The scores in words and tables; `baseline`: what else scores how much on these images."""


class LossSums:
    """Loss and what was right over all validation images: the logits of a million images would not fit in memory."""

    def __init__(self) -> None:
        self.sums = torch.zeros(3, dtype=torch.float64)

    def update(self, loss: Loss, images: Tensor) -> None:
        self.sums += torch.stack([loss.total, loss.correct, images]).double().cpu()

    def compute(self, ranks: Ranks) -> tuple[float, float, float]:
        """Loss, correct and images of all processes, which call this together."""
        loss, correct, images = torch.stack(ranks.all_gather(self.sums)).sum(0).tolist()
        return loss, correct, images
