"""Base class of the scores of all tasks."""

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
    """Scores of a network on `n` images. Each task has a subclass with its usual metrics."""

    n: int
    per_class: Sequence[Any]  # each with `name` and `count`
    reliability: Reliability
    tuned: Any = None  # scores with a fitted temperature and thresholds

    @property
    @abstractmethod
    def headline(self) -> float:
        """The main score of the task."""

    @property
    @abstractmethod
    def interval(self) -> Interval:
        """95 % interval of the headline score."""

    def numbers(self) -> dict[str, Any]:
        """Scalars and intervals as plain values for JSON."""
        kept = {key: value for key, value in vars(self).items() if key not in ("per_class", "reliability", "tuned")}
        return {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in kept.items()
            if not isinstance(value, np.ndarray)
        }

    def to_dict(self) -> dict[str, Any]:
        """All scores as plain values for JSON."""
        tuned = {"tuned": self.tuned.to_dict()} if self.tuned is not None else {}
        arrays = {key: value.tolist() for key, value in vars(self).items() if isinstance(value, np.ndarray)}
        return {**self.numbers(), "per_class": [asdict(scores) for scores in self.per_class], **arrays, **tuned}
