"""What every kind of prediction is judged by."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from vitrail.metrics.calibration import Reliability

Interval = tuple[float, float]


@dataclass(frozen=True, eq=False, kw_only=True)
class Scores(ABC):
    """The scores of a network on `n` images; each task has its own kind, with the numbers that are usual for it."""

    n: int
    per_class: Sequence[Any]  # each with a name and the number of its images
    reliability: Reliability  # of the stated probabilities
    tuned: Any = None  # what temperature and thresholds would change

    @property
    @abstractmethod
    def headline(self) -> float:
        """The one number that it is judged by."""

    @property
    @abstractmethod
    def interval(self) -> Interval:
        """95 %, of the headline."""

    def numbers(self) -> dict[str, Any]:
        """Plain values for JSON: those that are single numbers and intervals."""
        kept = {key: value for key, value in vars(self).items() if key not in ("per_class", "reliability", "tuned")}
        return {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in kept.items()
            if not isinstance(value, np.ndarray)
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        tuned = {"tuned": self.tuned.to_dict()} if self.tuned is not None else {}
        arrays = {key: value.tolist() for key, value in vars(self).items() if isinstance(value, np.ndarray)}
        return {**self.numbers(), "per_class": [asdict(one) for one in self.per_class], **arrays, **tuned}
