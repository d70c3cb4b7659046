"""Tasks of VTAB-1k by fine-tuning, as the paper measures them: `vitrail transfer` on each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from vitrail.data.sources.split_lists import VTAB_1K_LISTS
from vitrail.errors import UserError
from vitrail.metrics.accuracy import proportion_interval
from vitrail.metrics.vtab import TRAIN, VAL, VtabTask
from vitrail.workflows.transfer import run_transfer
from vitrail.workflows.vtab_score import TaskScore, notes_on

RECIPE = "paper-finetune-vtab"


def finetune_tasks(
    weights: str | Path,
    places: Mapping[VtabTask, Path],
    *,
    out: str | Path,
    seeds: int,
    overrides: Sequence[str],
    console: Console,
) -> list[TaskScore]:
    """Each on its published 1,000 images, without augmentation that would change a label; finished runs are taken as
    they are."""
    for task, place in places.items():
        missing = [name for name in VTAB_1K_LISTS if not (place / name).is_file()]
        if missing:
            raise UserError(
                f"fine-tuning takes the {TRAIN} and {VAL} images of published lists, and '{place}' has no "
                f"{missing[0]}: leave {task.key} out with --tasks, or measure it by a probe"
            )
    scores = []
    for task, place in places.items():
        found = run_transfer(
            place,
            from_=weights,
            recipe=RECIPE,
            seeds=seeds,
            out=Path(out) / task.key,
            overrides=settings_for(task, overrides),
            console=console,
        )
        scores.append(
            TaskScore(
                task.key,
                task.group,
                found.mean,
                proportion_interval(round(found.mean * found.tested), found.tested),
                found.tested,
                f"rate {found.rate:g}, {seeds} {'seed' if seeds == 1 else 'seeds'}",
                True,
                notes_on(task, True, task.classes, found.tested, found.seen_before),
            )
        )
    return scores


def settings_for(task: VtabTask, overrides: Sequence[str]) -> list[str]:
    """What is asked for, without what would change the label of an image; where images are not cut, no matter how."""
    how = () if task.crop else ("augment.scale=", "augment.ratio=")
    unchanged = ["augment.flip=false"] * (not task.flip) + ["augment.crop=none"] * (not task.crop)
    return [*unchanged, *(setting for setting in overrides if not setting.startswith(how))]
