"""`vitrail vtab`: evaluate weights on the tasks of VTAB-1k in a folder, by a linear probe or by fine-tuning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from vitrail.config import Size
from vitrail.data.dataset import Dataset, Samples, open_dataset
from vitrail.data.sources.clevr import read_clevr
from vitrail.distributed import Ranks, process_group
from vitrail.errors import UserError, did_you_mean, user_path
from vitrail.inference.classifier import load
from vitrail.inference.features import FeatureExtractor
from vitrail.interrupt import Interrupts
from vitrail.metrics.vtab import VTAB_TASKS, VtabSummary, VtabTask, summarize_vtab
from vitrail.terminal import escape, make_console
from vitrail.workflows.show import scan_progress
from vitrail.workflows.train_test_overlap import TrainingRecord, count_seen
from vitrail.workflows.vtab import TaskScore, finetune_tasks, probe_score, vtab_splits

READERS = {
    "clevr_count": lambda path, notes: read_clevr(path, "count", notes),
    "clevr_dist": lambda path, notes: read_clevr(path, "distance", notes),
}
SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class VtabResult:
    """The scores of all tasks that could be measured, and their summary."""

    scores: list[TaskScore]
    summary: VtabSummary
    missing: dict[str, str]  # task -> what is missing, or the error

    def to_dict(self) -> dict[str, Any]:
        summary = {**asdict(self.summary), "complete": self.summary.complete}
        return {"scores": [asdict(score) for score in self.scores], "summary": summary, "missing": self.missing}


def vtab(
    weights: str | Path,
    folder: str | Path,
    *,
    tasks: Sequence[str] = (),
    by: Literal["probe", "finetune"] = "probe",
    out: str | Path | None = None,
    seeds: int = 1,
    overrides: Sequence[str] = (),
    image_size: Size | None = None,
    device: str = "auto",
    console: Console | None = None,
) -> VtabResult:
    """Evaluate `weights` on every task, or on `tasks`, that has a folder with its name in `folder`.

    "probe": a linear probe. Its penalty is chosen by training on 800 images and validating on 200; then it is trained
    on all 1,000 and tested once. "finetune": as `transfer` with the recipe paper-finetune-vtab, changed by `overrides`;
    the runs are written to `out`.
    """
    if by == "probe" and (overrides or seeds != 1 or out is not None):
        raise UserError("--set, --seeds and --out have no effect on a linear probe: add --by finetune")
    if by == "finetune" and (image_size is not None or device != "auto"):
        raise UserError("--by finetune takes these as settings: --set model.image_size=[96,96], --set train.device=cpu")
    selected = _select_tasks(tasks)
    paths = {task: path for task in selected if (path := _task_path(user_path(folder), task)) is not None}
    if not paths:
        known = ", ".join(task.key for task in selected)
        raise UserError(f"'{folder}' has no task of VTAB-1k: it needs a folder named {known}")
    errors: dict[str, str] = {}
    with process_group() as ranks:
        console = console if console is not None and ranks.is_first else make_console(ignore_write_errors=True)
        console.quiet = console.quiet or not ranks.is_first
        if by == "finetune":
            runs = Path("runs") / "vtab" if out is None else out
            scores = finetune_tasks(weights, paths, out=runs, seeds=seeds, overrides=overrides, console=console)
        else:
            scores, errors = _probe_tasks(weights, paths, image_size, device, console, ranks)
    if not scores:
        raise UserError("none of the tasks could be measured: " + next(iter(errors.values())))
    result = VtabResult(
        scores,
        summarize_vtab({score.key: score.accuracy for score in scores}),
        {task.key: requirements(task) for task in selected if task not in paths} | errors,
    )
    _show(console, result, "fine-tuning" if by == "finetune" else "a linear probe on frozen features")
    return result


def _probe_tasks(
    weights: str | Path,
    paths: Mapping[VtabTask, Path],
    image_size: Size | None,
    device: str,
    console: Console,
    ranks: Ranks,
) -> tuple[list[TaskScore], dict[str, str]]:
    """Return the scores, and the error of each task that cannot be read."""
    with Interrupts() as interrupts, interrupts.interruptible(ranks):
        classifier = load(weights, image_size=image_size, device=device)
        extractor, trained = FeatureExtractor(classifier, console, interrupts, ranks), TrainingRecord.of(classifier)
        scores, errors = [], {}
        for task, path in paths.items():
            try:
                dataset, splits = ranks.broadcast(partial(_open, task, path, console, interrupts))
            except UserError as error:
                errors[task.key] = str(error)
                console.print(f"{task.name}: [red]{escape(str(error))}[/]")
                continue
            features = [
                extractor.extract(samples, what=f"{task.key}, {name}")
                for samples, name in zip(splits, SPLITS, strict=True)
            ]
            score = ranks.broadcast(partial(probe_score, task, dataset, features, count_seen(splits[-1], trained)))
            scores.append(score)
            console.print(f"{task.name}: [bold]{score.accuracy:.1%}[/]")
        return scores, errors


def _open(
    task: VtabTask, path: Path, console: Console, interrupts: Interrupts
) -> tuple[Dataset, tuple[Samples, Samples, Samples]]:
    with scan_progress(console, interrupts) as progress:
        dataset = open_dataset(path, None, progress=progress, read=READERS.get(task.key))
    return dataset, vtab_splits(dataset, task)


def _select_tasks(keys: Sequence[str]) -> list[VtabTask]:
    known = {task.key: task for task in VTAB_TASKS}
    for key in keys:
        if key not in known:
            raise UserError(f"VTAB has no task '{key}'{did_you_mean(key, known) or '; it has ' + ', '.join(known)}")
    return [task for task in VTAB_TASKS if not keys or task.key in keys]


def _task_path(folder: Path, task: VtabTask) -> Path | None:
    if not folder.is_dir():
        raise UserError(f"'{folder}' is not a folder: pass the folder that has one folder per task")
    names = (task.key, f"{task.key}.zip", f"{task.key}.tar.gz", f"{task.key}.parquet")
    return next((folder / name for name in names if (folder / name).exists()), None)


def requirements(task: VtabTask) -> str:
    """Return what a task needs to run."""
    lists = "train800.txt, val200.txt and test.txt next to its images"
    if task.missing:
        return f"{lists}; the published data set cannot be read: {task.missing}"
    return f"{lists}, or the published data set"


def _show(console: Console, result: VtabResult, by: str) -> None:
    table = Table(box=None, pad_edge=False)
    for heading in ("task", "group", "top-1", "test images", "setting"):
        table.add_column(heading, no_wrap=True, justify="left" if heading in ("task", "group") else "right")
    names = {task.key: task.name for task in VTAB_TASKS}
    for score in result.scores:
        half = 100 * (score.interval[1] - score.interval[0]) / 2
        accuracy = f"{score.accuracy:.1%} ±{half:.1f}"
        table.add_row(names[score.key], score.group, accuracy, f"{score.tested:,}", score.setting)
    console.print(table)
    for score in result.scores:
        for note in score.notes:
            console.print(f"[dim]{names[score.key]}: {escape(note)}[/]")
    if result.missing:
        console.print(f"[dim]not run: {', '.join(result.missing)}; `vitrail vtab` lists what each needs[/]")
    groups = ", ".join(f"{name} {mean:.1%}" for name, mean in result.summary.groups.items() if mean is not None)
    name = "VTAB-1k" if result.summary.complete else f"mean of {result.summary.tasks} of {len(VTAB_TASKS)} tasks"
    console.print(f"{name}: [bold]{result.summary.mean:.1%}[/] ({groups}), by {by}")


def show_tasks(console: Console) -> None:
    """Print a table of all tasks."""
    table = Table(box=None, pad_edge=False)
    headings = ("folder", "task", "group", "classes", "test", "without")
    for heading in headings:
        table.add_column(heading, no_wrap=True, justify="right" if heading in headings[3:5] else "left")
    for task in VTAB_TASKS:
        without = ", ".join(name for name, allowed in (("flip", task.flip), ("crop", task.crop)) if not allowed)
        table.add_row(task.key, task.name, task.group, str(task.classes), f"{task.test:,}", without)
    console.print(table)
    for task in VTAB_TASKS:
        console.print(f"[bold]{task.key}[/]  class: {task.rule}; split: {task.split}")
        console.print(f"  needs {escape(requirements(task))}")


def list_tasks() -> list[dict[str, Any]]:
    """Return all tasks for JSON."""
    return [asdict(task) for task in VTAB_TASKS]
