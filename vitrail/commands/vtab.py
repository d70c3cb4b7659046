"""`vitrail vtab`: weights on the tasks of VTAB-1k that lie in a folder, by a linear probe or by fine-tuning."""

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
    "clevr_count": lambda place, notes: read_clevr(place, "count", notes),
    "clevr_dist": lambda place, notes: read_clevr(place, "distance", notes),
}
NAMES = ("train", "val", "test")


@dataclass(frozen=True)
class Vtab:
    scores: list[TaskScore]
    summary: VtabSummary
    missing: dict[str, str]  # task -> what is missing, or wrong with what is there

    def to_dict(self) -> dict[str, Any]:
        summary = {**asdict(self.summary), "complete": self.summary.complete}
        return {"scores": [asdict(one) for one in self.scores], "summary": summary, "missing": self.missing}


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
) -> Vtab:
    """Measure `weights` on every task that has a folder of its name in `folder`, or on some of them.

    By a probe: its penalty is chosen by training on 800 images and measuring on 200; then all 1,000 are trained on, and
    the test split is measured once. By fine-tuning: as `transfer` does it with the recipe paper-finetune-vtab, changed
    by `overrides`; the runs stand in `out`.
    """
    if by == "probe" and (overrides or seeds != 1 or out is not None):
        raise UserError("a probe trains no network: --set, --seeds and --out go with --by finetune")
    if by == "finetune" and (image_size is not None or device != "auto"):
        raise UserError("--by finetune takes these as settings: --set model.image_size=[96,96], --set train.device=cpu")
    wanted = _wanted(tasks)
    places = {task: place for task in wanted if (place := _place(user_path(folder), task)) is not None}
    if not places:
        known = ", ".join(task.key for task in wanted)
        raise UserError(f"'{folder}' holds no task of VTAB-1k: that would be a folder called {known}")
    wrong: dict[str, str] = {}
    with process_group() as ranks:
        console = console if console is not None and ranks.is_first else make_console(ignore_write_errors=True)
        console.quiet = console.quiet or not ranks.is_first
        if by == "finetune":
            runs = Path("runs") / "vtab" if out is None else out
            scores = finetune_tasks(weights, places, out=runs, seeds=seeds, overrides=overrides, console=console)
        else:
            scores, wrong = _probe_tasks(weights, places, image_size, device, console, ranks)
    if not scores:
        raise UserError("none of the tasks could be measured: " + next(iter(wrong.values())))
    result = Vtab(
        scores,
        summarize_vtab({one.key: one.accuracy for one in scores}),
        {task.key: what_is_missing(task) for task in wanted if task not in places} | wrong,
    )
    _show(console, result, "fine-tuning" if by == "finetune" else "a linear probe on frozen features")
    return result


def _probe_tasks(
    weights: str | Path,
    places: Mapping[VtabTask, Path],
    image_size: Size | None,
    device: str,
    console: Console,
    ranks: Ranks,
) -> tuple[list[TaskScore], dict[str, str]]:
    """The scores, and what is wrong with tasks that cannot be read: the others need not be lost to them."""
    with Interrupts() as interrupts, interrupts.interruptible(ranks):
        classifier = load(weights, image_size=image_size, device=device)
        extractor, trained = FeatureExtractor(classifier, console, interrupts, ranks), TrainingRecord.of(classifier)
        scores, wrong = [], {}
        for task, place in places.items():
            try:
                dataset, splits = ranks.broadcast(partial(_open, task, place, console, interrupts))
            except UserError as error:
                wrong[task.key] = str(error)
                console.print(f"{task.name}: [red]{escape(str(error))}[/]")
                continue
            found = [
                extractor.extract(one, what=f"{task.key}, {name}") for one, name in zip(splits, NAMES, strict=True)
            ]
            score = ranks.broadcast(partial(probe_score, task, dataset, found, count_seen(splits[-1], trained)))
            scores.append(score)
            console.print(f"{task.name}: [bold]{score.accuracy:.1%}[/]")
        return scores, wrong


def _open(
    task: VtabTask, place: Path, console: Console, interrupts: Interrupts
) -> tuple[Dataset, tuple[Samples, Samples, Samples]]:
    with scan_progress(console, interrupts) as scanned:
        dataset = open_dataset(place, None, progress=scanned, read=READERS.get(task.key))
    return dataset, vtab_splits(dataset, task)


def _wanted(keys: Sequence[str]) -> list[VtabTask]:
    known = {task.key: task for task in VTAB_TASKS}
    for key in keys:
        if key not in known:
            raise UserError(f"VTAB has no task '{key}'{did_you_mean(key, known) or '; it has ' + ', '.join(known)}")
    return [task for task in VTAB_TASKS if not keys or task.key in keys]


def _place(folder: Path, task: VtabTask) -> Path | None:
    if not folder.is_dir():
        raise UserError(f"'{folder}' is not a folder: give the one that holds a folder for each task")
    names = (task.key, f"{task.key}.zip", f"{task.key}.tar.gz", f"{task.key}.parquet")
    return next((folder / name for name in names if (folder / name).exists()), None)


def what_is_missing(task: VtabTask) -> str:
    """What it would take to run a task that is not there."""
    lists = "train800.txt, val200.txt and test.txt beside its images"
    if task.missing:
        return f"{lists}; as it is published it cannot be read: {task.missing}"
    return f"{lists}, or the data set as it is published"


def _show(console: Console, result: Vtab, by: str) -> None:
    table = Table(box=None, pad_edge=False)
    for heading in ("task", "group", "top-1", "test images", "with"):
        table.add_column(heading, no_wrap=True, justify="left" if heading in ("task", "group") else "right")
    names = {task.key: task.name for task in VTAB_TASKS}
    for one in result.scores:
        half = 100 * (one.interval[1] - one.interval[0]) / 2
        table.add_row(names[one.key], one.group, f"{one.accuracy:.1%} ±{half:.1f}", f"{one.tested:,}", one.setting)
    console.print(table)
    for one in result.scores:
        for note in one.notes:
            console.print(f"[dim]{names[one.key]}: {escape(note)}[/]")
    if result.missing:
        left = ", ".join(result.missing)
        console.print(f"[dim]not run: {left}; `vitrail vtab` tells what each needs[/]")
    groups = ", ".join(f"{name} {mean:.1%}" for name, mean in result.summary.groups.items() if mean is not None)
    what = "VTAB-1k" if result.summary.complete else f"mean of {result.summary.tasks} of {len(VTAB_TASKS)} tasks"
    console.print(f"{what}: [bold]{result.summary.mean:.1%}[/] ({groups}), by {by}")


def show_tasks(console: Console) -> None:
    """The table of all tasks."""
    table = Table(box=None, pad_edge=False)
    headings = ("folder", "task", "group", "classes", "test", "without")
    for heading in headings:
        table.add_column(heading, no_wrap=True, justify="right" if heading in headings[3:5] else "left")
    for task in VTAB_TASKS:
        without = ", ".join(name for name, may in (("flip", task.flip), ("crop", task.crop)) if not may)
        table.add_row(task.key, task.name, task.group, str(task.classes), f"{task.test:,}", without)
    console.print(table)
    for task in VTAB_TASKS:
        console.print(f"[bold]{task.key}[/]  a class: {task.rule}; split: {task.split}")
        console.print(f"  needs {escape(what_is_missing(task))}")


def list_tasks() -> list[dict[str, Any]]:
    return [asdict(task) for task in VTAB_TASKS]
