"""What a task of VTAB-1k scored, and in what it was not the published task."""

from __future__ import annotations

from dataclasses import dataclass

from vitrail.metrics.scores import Interval
from vitrail.metrics.vtab import Task


@dataclass(frozen=True)
class TaskScore:
    key: str
    group: str
    accuracy: float
    interval: Interval  # 95 %, over the test images
    tested: int
    setting: str  # chosen on the 200, or given
    published: bool  # whether the 1,000 images are the published ones
    notes: list[str]  # in what it is not the published task


def notes_on(task: Task, published: bool, classes: int, tested: int, seen: int) -> list[str]:
    """`seen`: test images that the weights were trained on."""
    notes = [] if published else ["the 1,000 images are drawn anew: compare it in kind, not to the digit"]
    if classes != task.classes:
        notes.append(f"{classes} classes, and the task has {task.classes}")
    if tested != task.test:
        notes.append(f"{tested:,} test images, and the task has {task.test:,}")
    if seen:
        notes.append(f"{seen:,} test images were seen in training: the number is too good")
    return notes
