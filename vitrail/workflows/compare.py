"""Compare runs on the same images, with a test of whether their differences are significant.

In: runs, and images that none of them was trained on. Out: one `ComparedRun` for each.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from vitrail.config import DataConfig, flatten
from vitrail.data.dataset import Samples
from vitrail.distributed import Ranks, process_group
from vitrail.errors import UserError, user_path
from vitrail.inference.classifier import load
from vitrail.inference.device import device_of
from vitrail.inference.runner import Outputs
from vitrail.interrupt import Interrupts
from vitrail.metrics.scores import Scores
from vitrail.metrics.significance import PairedComparison, holm_correction
from vitrail.models.flops import count_macs, count_parameters
from vitrail.tasks.table import prediction_task
from vitrail.tasks.task import PredictionTask
from vitrail.terminal import make_console
from vitrail.weights.bundle import Card
from vitrail.weights.names import absolute_spec, local_path, weights_spec
from vitrail.weights.read import read_weights
from vitrail.workflows.measure import compute_logits
from vitrail.workflows.show import scan_progress
from vitrail.workflows.train_test_overlap import TrainingRecord, check_class_names, unseen_images
from vitrail.workflows.tune import fitted_on


@dataclass(frozen=True, eq=False)
class ComparedRun:
    """The scores of one run and, except for the first run, the significance test against the first."""

    name: str
    scores: Scores
    cells: Sequence[tuple[str, str]]  # (heading, number) of the scores in the table
    parameters: int
    gmacs: float
    settings: dict[str, Any]  # settings of its recipe that differ between the runs
    against_first: PairedComparison | None
    fitted: bool = False  # whether its temperature and thresholds were fitted on these images

    def to_dict(self) -> dict[str, Any]:
        paired = None if self.against_first is None else asdict(self.against_first)
        return {
            "name": self.name,
            "scores": self.scores.numbers(),
            "parameters": self.parameters,
            "gmacs": self.gmacs,
            "settings": self.settings,
            "against_first": paired,
            "fitted": self.fitted,
        }


def compare_runs(
    runs: Sequence[str | Path],
    data: str | Path | None = None,
    split: str | None = None,
    device: str = "auto",
    console: Console | None = None,
) -> tuple[list[ComparedRun], str]:
    """Measure `runs` on images that none of them was trained on. Returns the results and a description of the images.

    Without `data`, the images are the test or validation split of the first run.
    """
    names = [weights_spec(run) for run in runs]
    if len(names) < 2:
        raise UserError("compare needs at least two runs: vitrail compare RUN RUN...")
    if len({absolute_spec(name) for name in names}) < len(names):
        raise UserError("the same run is listed twice")
    if split == "train":
        raise UserError(
            "--split train cannot show which run is better, because runs were trained on these images: "
            "use another --split"
        )
    with process_group() as ranks, Interrupts() as interrupts, interrupts.interruptible(ranks):
        console = console if console is not None and ranks.is_first else make_console()
        console.quiet = console.quiet or not ranks.is_first
        trained = [TrainingRecord.of(read_weights(name)) for name in names]
        cards = [record.card for record in trained]
        _check_same_task(names, cards)
        source = str(data) if data is not None else _data_of(names[0])

        def find_images() -> tuple[Samples, str]:
            with scan_progress(console, interrupts) as scanned:
                return unseen_images(source, trained, split, "", scanned)[1:]

        samples, description = ranks.broadcast(find_images)
        outputs = [
            _logits(name, card, samples, device, interrupts, ranks) for name, card in zip(names, cards, strict=True)
        ]
        return ranks.broadcast(lambda: (_compare(names, cards, outputs, samples), description))


def _check_same_task(names: Sequence[str], cards: Sequence[Card]) -> None:
    for name, card in zip(names, cards, strict=True):
        check_class_names(name, card)
        if set(card.classes) != set(cards[0].classes):
            extra = sorted(set(card.classes) ^ set(cards[0].classes))[0]
            raise UserError(f"{names[0]} and {name} have different classes: only one of them has '{extra}'")
        if card.task != cards[0].task:
            raise UserError(f"of {names[0]} and {name}, one is multilabel and the other is not")


def _data_of(name: str) -> str:
    """The path of the images of a run, from its config.toml."""
    folder = local_path(name)
    try:
        text = (folder / "config.toml").read_text(encoding="utf-8") if folder is not None else ""
        path = str(tomllib.loads(text)["data"]["path"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise UserError(f"{name} has no config.toml with the path of its images: pass images with --data") from None
    if not user_path(path).exists():
        raise UserError(f"the images of {name}, '{path}', no longer exist: pass images with --data")
    return path


def _logits(name: str, card: Card, samples: Samples, device: str, interrupts: Interrupts, ranks: Ranks) -> Outputs:
    """The logits of one run, with the classes in the order of the dataset."""
    classifier = load(name, device=device)
    out = compute_logits(
        classifier.net,
        samples,
        card.preprocess,
        DataConfig(),
        device_of(classifier.net),
        interrupts,
        ranks,
        card.postprocess.temperature,
    )
    return replace(out, values=out.values[:, [card.classes.index(name) for name in samples.classes]])


def _compare(
    names: Sequence[str], cards: Sequence[Card], outputs: Sequence[Outputs], samples: Samples
) -> list[ComparedRun]:
    if any(len(out.sample) != len(outputs[0].sample) or (out.sample != outputs[0].sample).any() for out in outputs):
        raise UserError("an image could be read for one run but not for another: check the data with `vitrail check`")
    differing = differences([card.recipe for card in cards])
    task = prediction_task(cards[0].task, len(samples.classes))
    rows: list[ComparedRun] = []
    for name, card, out, settings in zip(names, cards, outputs, differing, strict=True):
        paired = None if not rows else task.compare(outputs[0].values.numpy(), out.values.numpy(), out.labels.numpy())
        scores = _scores(task, out, card, samples.classes)
        cost = count_parameters(card.model), count_macs(card.model) / 1e9
        rows.append(
            ComparedRun(name, scores, task.result(scores).cells, *cost, settings, paired, fitted_on(card, samples))
        )
    tests = [row.against_first for row in rows if row.against_first is not None]
    corrected = iter(holm_correction([test.p for test in tests if test.p is not None]))
    return [
        row
        if row.against_first is None or row.against_first.p is None
        else replace(row, against_first=replace(row.against_first, p=next(corrected)))
        for row in rows
    ]


def _scores(task: PredictionTask, out: Outputs, card: Card, classes: Sequence[str]) -> Scores:
    postprocess = card.postprocess
    if postprocess.thresholds:  # in the order of the logits
        thresholds = [postprocess.thresholds[card.classes.index(name)] for name in classes]
        postprocess = postprocess.model_copy(update={"thresholds": tuple(thresholds)})
    labels = task.labels_of(out.values, out.labels)
    return task.score(out.values.numpy(), labels.numpy(), classes, postprocess)


def differences(recipes: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each recipe, the settings that differ between the recipes; None if a recipe does not have a setting."""
    settings = [flatten(recipe) for recipe in recipes]
    keys = dict.fromkeys(key for values in settings for key in values)
    differing = [key for key in keys if any(values.get(key) != settings[0].get(key) for values in settings)]
    return [{key: values.get(key) for key in differing} for values in settings]
