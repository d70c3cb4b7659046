"""`vitrail fewshot` and `vitrail knn`: what frozen features are worth, from a few images of each class or from all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.console import Console
from rich.table import Table

from vitrail.config import Size
from vitrail.data.dataset import Dataset, Samples, open_dataset
from vitrail.data.splits import DEFAULT_SPLIT
from vitrail.distributed import process_group
from vitrail.errors import UserError, user_path
from vitrail.inference.classifier import load
from vitrail.inference.features import FeatureExtractor
from vitrail.interrupt import Interrupts
from vitrail.metrics.fewshot import FIXED_PENALTY, PENALTY_GRID, SHOTS, sample_shots
from vitrail.metrics.knn import NEIGHBOURS, TEMPERATURE
from vitrail.terminal import escape, make_console
from vitrail.workflows.frozen_features import (
    Counts,
    FewShot,
    FrozenTask,
    Method,
    few_shot_rows,
    score_knn,
    score_least_squares,
    score_linear_probe,
)
from vitrail.workflows.show import data_name, scan_progress
from vitrail.workflows.train_test_overlap import TrainingRecord, count_seen

Form = Literal["paper", "big_vision"]
SEEDS = {"paper": (None,), "big_vision": (0, 1, 2)}
PENALTIES = {"paper": PENALTY_GRID, "big_vision": (FIXED_PENALTY,)}


def fewshot(
    weights: str | Path,
    data: Sequence[str | Path],
    *,
    shots: Sequence[int | None] = SHOTS,
    methods: Sequence[Method] = ("least-squares",),
    form: Form = "paper",
    neighbours: int = NEIGHBOURS,
    temperature: float = TEMPERATURE,
    image_size: Size | None = None,
    device: str = "auto",
    console: Console | None = None,
) -> list[FewShot]:
    """Measure the features of `weights` on every data set, by every method, from `shots` images of each class.

    None among the shots stands for all training images. The form says which images are taken and with which penalty
    least squares are solved: "paper" the first ones, and of 30 penalties for each number of shots the one of the best
    mean rank over the data sets; "big_vision" three random draws, and one penalty.
    """
    if any(number is not None and number < 1 for number in shots):
        raise UserError("the number of shots is how many images of each class to learn from, at least 1, or all")
    solvers: dict[Method, Callable[[FrozenTask, np.ndarray], Counts]] = {
        "least-squares": lambda task, rows: score_least_squares(task, rows, PENALTIES[form]),
        "probe": score_linear_probe,
        "knn": lambda task, rows: score_knn(task, rows, neighbours, temperature),
    }
    with process_group() as ranks, Interrupts() as interrupts, interrupts.interruptible(ranks):
        console = console if console is not None and ranks.is_first else make_console()
        console.quiet = console.quiet or not ranks.is_first
        classifier = load(weights, image_size=image_size, device=device)
        extractor = FeatureExtractor(classifier, console, interrupts, ranks)
        tasks = list(_tasks(data, TrainingRecord.of(classifier), extractor, shots, SEEDS[form]))

        def solve() -> list[FewShot]:
            found = []
            for method in dict.fromkeys(methods):
                for number in dict.fromkeys(shots):
                    interrupts.check()
                    with console.status(f"{method}, {_shots(number)}"):
                        counts = {
                            task.name: [
                                solvers[method](task, rows) for (own, _), rows in task.chosen.items() if own == number
                            ]
                            for task in tasks
                        }
                    found += few_shot_rows(method, number, counts, PENALTIES[form])
            _show(console, found, len(tasks))
            spread = "95 % interval over the test images" if form == "paper" else "deviation over three draws"
            chosen = form == "paper" and "least-squares" in methods
            console.print(f"[dim]±: {spread}{'; penalties are chosen on the test images, as in the paper' * chosen}[/]")
            return found

        return ranks.broadcast(solve)


def _tasks(
    data: Sequence[str | Path],
    trained: TrainingRecord,
    extractor: FeatureExtractor,
    shots: Sequence[int | None],
    seeds: Sequence[int | None],
) -> Iterator[FrozenTask]:
    names = [data_name(str(Path(path).absolute())) for path in data]
    names = [name if names.count(name) == 1 else str(path) for name, path in zip(names, data, strict=True)]
    if len({user_path(path).resolve() for path in data}) < len(data):
        raise UserError("a data set is named twice")
    for name, path in zip(names, data, strict=True):
        dataset = extractor.ranks.broadcast(lambda path=path: open_to_learn(path, extractor))  # type: ignore[misc]
        train, test = dataset.splits["train"], dataset.splits["test" if "test" in dataset.splits else "val"]
        show_transfer(extractor.console, name, dataset, train, test, trained)
        classes = len(dataset.classes)
        _note_fewer(extractor.console, name, train, classes, shots)
        chosen = {
            (number, seed): sample_shots(train.labels, classes, number, seed) for number in shots for seed in seeds
        }
        yield FrozenTask(
            name,
            classes,
            extractor.extract(train, np.concatenate(list(chosen.values())), f"{name}, train"),
            extractor.extract(test, what=f"{name}, test"),
            chosen,
        )


def _note_fewer(console: Console, name: str, train: Samples, classes: int, shots: Sequence[int | None]) -> None:
    fewest = int(np.bincount(train.labels, minlength=classes).min())
    more = [str(number) for number in shots if number is not None and number > fewest]
    if more:
        console.print(
            f"[dim]{escape(name)} has classes with {fewest} images to learn from: {', '.join(more)} shots take all[/]"
        )


def open_to_learn(path: str | Path, extractor: FeatureExtractor) -> Dataset:
    """The data set with all of its training images; only where it has nothing else to measure on, some are held out."""
    with scan_progress(extractor.console, extractor.interrupts) as scanned:
        given = {"train", "val", "test"}
        dataset = open_dataset(
            path, lambda _, splits: None if {"train"} < splits & given else DEFAULT_SPLIT, progress=scanned
        )
    if len(dataset.splits) < 2:
        raise UserError(f"no class of '{path}' has a second image, so none can be held out to measure on")
    if dataset.multilabel:
        raise UserError(f"the images of '{path}' have any number of labels: these measures need exactly one")
    return dataset


def show_transfer(
    console: Console, name: str, dataset: Dataset, train: Samples, test: Samples, trained: TrainingRecord
) -> None:
    """What is learned from and measured on, and what would make the number too good."""
    console.print(
        f"[bold]{escape(name)}[/]: {len(dataset.classes)} classes, {len(train):,} images to learn from, "
        f"{len(test):,} to measure on"
    )
    if seen := count_seen(test, trained):
        console.print(
            f"[yellow]{seen:,} of the images to measure on were seen in training: the numbers are too good[/]"
        )


def _shots(number: int | None) -> str:
    return "all images" if number is None else f"{number} {'image' if number == 1 else 'images'} of each class"


def _show(console: Console, found: Sequence[FewShot], sets: int) -> None:
    shots = list(dict.fromkeys(row.shots for row in found))
    table = Table(box=None, pad_edge=False)
    for column in ("% right", "by"):
        table.add_column(column, no_wrap=True)
    for number in shots:
        table.add_column("all" if number is None else f"{number}-shot", justify="right", no_wrap=True)
    for method in dict.fromkeys(row.method for row in found):
        own = [row for row in found if row.method == method]
        for name in dict.fromkeys(row.data for row in own):
            cells = [_cell(row) for row in own if row.data == name]
            table.add_row(escape(name), method, *cells)
        if sets > 1:
            means = [np.mean([row.accuracy for row in own if row.shots == number]) for number in shots]
            table.add_row("[bold]mean[/]", method, *(f"[bold]{100 * mean:.1f}[/]" for mean in means))
    console.print(table)


def _cell(row: FewShot) -> str:
    low, high = row.interval
    spread = row.deviation if row.deviation is not None else (high - low) / 2
    return f"{100 * row.accuracy:.1f} ±{100 * spread:.1f}"


def to_json(rows: Sequence[FewShot]) -> list[dict[str, Any]]:
    return [asdict(row) for row in rows]
