"""Runs side by side on the same images, with a test that says whether a difference is one."""

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
    """One of several runs; all but the first with what sets them apart from the first."""

    name: str
    scores: Scores
    cells: Sequence[tuple[str, str]]  # (heading, number) of the scores that a table shows
    parameters: int
    gmacs: float
    settings: dict[str, Any]  # of its recipe: those that are not the same in all
    against_first: PairedComparison | None
    fitted: bool = False  # its temperature and thresholds, to these very images

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
    """All `runs` measured on the same images, which none of them was trained on, and in words which images these are.

    Without `data`, the images are those that the first run kept from its own training.
    """
    names = [weights_spec(run) for run in runs]
    if len(names) < 2:
        raise UserError("comparing needs two runs or more: vitrail compare RUN RUN...")
    if len({absolute_spec(name) for name in names}) < len(names):
        raise UserError("a run is named twice")
    if split == "train":
        raise UserError("images that runs were trained on tell nothing about which is better: use another --split")
    with process_group() as ranks, Interrupts() as interrupts, interrupts.interruptible(ranks):
        console = console if console is not None and ranks.is_first else make_console()
        console.quiet = console.quiet or not ranks.is_first
        trained = [TrainingRecord.of(read_weights(name)) for name in names]
        cards = [one.card for one in trained]
        _check_alike(names, cards)
        source = str(data) if data is not None else _data_of(names[0])

        def look() -> tuple[Samples, str]:
            with scan_progress(console, interrupts) as scanned:
                return unseen_images(source, trained, split, "", scanned)[1:]

        samples, words = ranks.broadcast(look)
        found = [
            _logits(name, card, samples, device, interrupts, ranks) for name, card in zip(names, cards, strict=True)
        ]
        return ranks.broadcast(lambda: (_compare(names, cards, found, samples), words))


def _check_alike(names: Sequence[str], cards: Sequence[Card]) -> None:
    for name, card in zip(names, cards, strict=True):
        check_class_names(name, card)
        if set(card.classes) != set(cards[0].classes):
            odd = sorted(set(card.classes) ^ set(cards[0].classes))[0]
            raise UserError(f"{names[0]} and {name} do not know the same classes: only one of them knows '{odd}'")
        if card.task != cards[0].task:
            raise UserError(f"of {names[0]} and {name}, one gives an image one label and the other any number")


def _data_of(name: str) -> str:
    """Where the images of a run lie, by its config.toml."""
    folder = local_path(name)
    try:
        text = (folder / "config.toml").read_text(encoding="utf-8") if folder is not None else ""
        where = str(tomllib.loads(text)["data"]["path"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise UserError(f"{name} does not tell which images to compare on: say it with --data") from None
    if not user_path(where).exists():
        raise UserError(f"the images of {name}, '{where}', are not there any more: give others with --data")
    return where


def _logits(name: str, card: Card, samples: Samples, device: str, interrupts: Interrupts, ranks: Ranks) -> Outputs:
    """What one network says, with its classes in the order of the samples."""
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
    return replace(out, values=out.values[:, [card.classes.index(known) for known in samples.classes]])


def _compare(
    names: Sequence[str], cards: Sequence[Card], found: Sequence[Outputs], samples: Samples
) -> list[ComparedRun]:
    if any(len(out.sample) != len(found[0].sample) or (out.sample != found[0].sample).any() for out in found):
        raise UserError("an image could be read for one run and not for another: look at the data with `vitrail check`")
    differing = differences([card.recipe for card in cards])
    task = prediction_task(cards[0].task, len(samples.classes))
    rows: list[ComparedRun] = []
    for name, card, out, settings in zip(names, cards, found, differing, strict=True):
        paired = None if not rows else task.compare(found[0].values.numpy(), out.values.numpy(), out.labels.numpy())
        scores = _scores(task, out, card, samples.classes)
        cost = count_parameters(card.model), count_macs(card.model) / 1e9
        rows.append(
            ComparedRun(name, scores, task.result(scores).cells, *cost, settings, paired, fitted_on(card, samples))
        )
    tests = [row.against_first for row in rows if row.against_first is not None]
    raised = iter(holm_correction([one.p for one in tests if one.p is not None]))
    return [
        row
        if row.against_first is None or row.against_first.p is None
        else replace(row, against_first=replace(row.against_first, p=next(raised)))
        for row in rows
    ]


def _scores(task: PredictionTask, out: Outputs, card: Card, classes: Sequence[str]) -> Scores:
    postprocess = card.postprocess
    if postprocess.thresholds:  # in the order of these classes, as the logits
        theirs = [postprocess.thresholds[card.classes.index(name)] for name in classes]
        postprocess = postprocess.model_copy(update={"thresholds": tuple(theirs)})
    labels = task.labels_of(out.values, out.labels)
    return task.score(out.values.numpy(), labels.numpy(), classes, postprocess)


def differences(recipes: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Of each recipe, the settings that are not the same in all of them; none where a recipe does not say."""
    settings = [flatten(recipe) for recipe in recipes]
    keys = dict.fromkeys(key for one in settings for key in one)
    odd = [key for key in keys if any(one.get(key) != settings[0].get(key) for one in settings)]
    return [{key: one.get(key) for key in odd} for one in settings]
