"""`vitrail fewshot` and `vitrail knn`: evaluate frozen features with a few or all training images per class."""

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
    """Evaluate the features of `weights` on every data set, with every method, from `shots` images per class.

    A value of None in `shots` means all training images. `form` sets the protocol of least squares:
    "paper" takes the first images of each class, and for each number of shots the penalty, out of 30, with the best
    mean rank over the data sets. "big_vision" takes three random samples and a fixed penalty.
    """
    if any(number is not None and number < 1 for number in shots):
        raise UserError("--shots must be positive numbers of images per class, or all")
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
            results = []
            for method in dict.fromkeys(methods):
                for number in dict.fromkeys(shots):
                    interrupts.check()
                    with console.status(f"{method}, {_shots(number)}"):
                        counts = {
                            task.name: [
                                solvers[method](task, rows)
                                for (shots_, _), rows in task.chosen.items()
                                if shots_ == number
                            ]
                            for task in tasks
                        }
                    results += few_shot_rows(method, number, counts, PENALTIES[form])
            _show(console, results, len(tasks))
            spread = "95 % interval over the test images" if form == "paper" else "standard deviation, three samples"
            chosen = form == "paper" and "least-squares" in methods
            console.print(f"[dim]±: {spread}{'; penalties are chosen on the test images, as in the paper' * chosen}[/]")
            return results

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
        raise UserError("the same data set is given twice")
    for name, path in zip(names, data, strict=True):
        dataset = extractor.ranks.broadcast(lambda path=path: open_train_and_test(path, extractor))  # type: ignore[misc]
        train, test = dataset.splits["train"], dataset.splits["test" if "test" in dataset.splits else "val"]
        print_data(extractor.console, name, dataset, train, test, trained)
        classes = len(dataset.classes)
        _print_small_classes(extractor.console, name, train, classes, shots)
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


def _print_small_classes(
    console: Console, name: str, train: Samples, classes: int, shots: Sequence[int | None]
) -> None:
    fewest = int(np.bincount(train.labels, minlength=classes).min())
    more = [str(number) for number in shots if number is not None and number > fewest]
    if more:
        console.print(
            f"[dim]{escape(name)} has classes with only {fewest} training images; {', '.join(more)} shots use all[/]"
        )


def open_train_and_test(path: str | Path, extractor: FeatureExtractor) -> Dataset:
    """Open a data set. A test split is taken from the training images only if it has no other split."""
    with scan_progress(extractor.console, extractor.interrupts) as progress:
        known = {"train", "val", "test"}
        dataset = open_dataset(
            path, lambda _, splits: None if {"train"} < splits & known else DEFAULT_SPLIT, progress=progress
        )
    if len(dataset.splits) < 2:
        raise UserError(f"'{path}' cannot be split into training and test images: every class has a single image")
    if dataset.multilabel:
        raise UserError(f"'{path}' is multilabel: fewshot, knn and vtab need exactly one label per image")
    return dataset


def print_data(
    console: Console, name: str, dataset: Dataset, train: Samples, test: Samples, trained: TrainingRecord
) -> None:
    """Print the number of training and test images, and a warning if the weights were trained on test images."""
    console.print(
        f"[bold]{escape(name)}[/]: {len(dataset.classes)} classes, {len(train):,} training images, "
        f"{len(test):,} test images"
    )
    if seen := count_seen(test, trained):
        console.print(
            f"[yellow]{seen:,} of the test images were used to train these weights: the scores are too high[/]"
        )


def _shots(number: int | None) -> str:
    return "all images" if number is None else f"{number} {'image' if number == 1 else 'images'} per class"


def _show(console: Console, results: Sequence[FewShot], datasets: int) -> None:
    shots = list(dict.fromkeys(row.shots for row in results))
    table = Table(box=None, pad_edge=False)
    for column in ("accuracy (%)", "method"):
        table.add_column(column, no_wrap=True)
    for number in shots:
        table.add_column("all" if number is None else f"{number}-shot", justify="right", no_wrap=True)
    for method in dict.fromkeys(row.method for row in results):
        rows = [row for row in results if row.method == method]
        for name in dict.fromkeys(row.data for row in rows):
            cells = [_cell(row) for row in rows if row.data == name]
            table.add_row(escape(name), method, *cells)
        if datasets > 1:
            means = [np.mean([row.accuracy for row in rows if row.shots == number]) for number in shots]
            table.add_row("[bold]mean[/]", method, *(f"[bold]{100 * mean:.1f}[/]" for mean in means))
    console.print(table)


def _cell(row: FewShot) -> str:
    low, high = row.interval
    spread = row.deviation if row.deviation is not None else (high - low) / 2
    return f"{100 * row.accuracy:.1f} ±{100 * spread:.1f}"


def to_json(rows: Sequence[FewShot]) -> list[dict[str, Any]]:
    return [asdict(row) for row in rows]
