"""What a measurement says about better answers from the same weights, and the weights file that remembers it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import Console

from vitrail.errors import UserError
from vitrail.evaluate.metrics import Scores
from vitrail.evaluate.tags import THRESHOLD, TagScores
from vitrail.evaluate.tuning import TagTuning, Tuning, tune, tune_tags
from vitrail.runs.measure import Measurement
from vitrail.weights.bundle import Answering, Card, read_card, replace_card

WORTH = 0.005  # of a calibration error, that a temperature has to take off to be worth a line


def tuned(found: Measurement, card: Card, accuracy: float | None) -> Measurement:
    """The measurement, with what temperature, abstention and thresholds would change."""
    logits, labels = found.outputs.values.numpy(), found.outputs.labels.numpy()
    scores = found.scores
    if isinstance(scores, TagScores):
        now = np.array(card.answering.thresholds or [THRESHOLD] * len(card.classes))
        return replace(found, scores=replace(scores, tuned=tune_tags(logits, labels, now)))
    return replace(found, scores=replace(scores, tuned=tune(logits, labels, accuracy)))


def show_tuning(console: Console, scores: Scores | TagScores) -> None:
    if isinstance(scores.tuned, TagTuning):
        tags = scores.tuned
        console.print(
            f"[dim]thresholds of its own for every label: mean F1 {tags.macro_f1_before:.1%} -> {tags.macro_f1:.1%} "
            f"on images they were not fitted on[/]"
        )
        return
    assert isinstance(scores, Scores)
    if scores.tuned is None:
        return
    if scores.ece_chance is not None and scores.ece <= scores.ece_chance:
        console.print("[dim]a calibration error this small is no more than so few images give by chance[/]")
    elif scores.ece - scores.tuned.ece > WORTH:
        console.print(
            f"[dim]a temperature of {scores.tuned.temperature:.2f} would take the calibration error from "
            f"{scores.ece:.1%} to {scores.tuned.ece:.1%}, on images it was not fitted on[/]"
        )
    asked = scores.tuned.abstention
    if asked is None:
        return
    if asked.threshold is None:
        console.print(f"no threshold makes {asked.accuracy:.1%} of the answers right with 95 % confidence")
        return
    console.print(f"answers from a probability of [bold]{asked.threshold:.3f}[/] on: {_answers(scores.tuned)}")


def _answers(tuning: Tuning) -> str:
    asked = tuning.abstention
    assert asked is not None
    if asked.answered is None or asked.right is None:
        return f"{asked.accuracy:.1%} of them are right, though half of the images are too few to check it"
    return f"{asked.right:.1%} of them are right and {asked.answered:.1%} of the images get one, as checked by halves"


def own_file(weights: str | Path) -> Path:
    """The file of vitrail's own layout that can be written into."""
    path = Path(weights)
    path = path / "model.safetensors" if path.is_dir() else path
    if path.suffix != ".safetensors" or not path.is_file():
        raise UserError(
            f"--write needs a weights file of vitrail, and '{weights}' is none: make one with `vitrail convert "
            f"{weights} FILE.safetensors --to vitrail`"
        )
    read_card(path)  # tells what is wrong with it
    if not os.access(path.absolute().parent, os.W_OK):
        raise UserError(f"--write needs a folder that can be written to, and that of '{path}' cannot")
    return path


def write_answering(weights: str | Path, card: Card, found: Measurement) -> Path:
    """Into the card of the weights: the temperature, and the thresholds that were asked for."""
    path, tuning, before = own_file(weights), found.scores.tuned, card.answering
    assert tuning is not None
    if isinstance(tuning, TagTuning):
        changes: dict[str, object] = {"thresholds": tuple(tuning.thresholds)}
    else:
        asked = tuning.abstention
        changes = {"threshold": 0.0 if asked is None or asked.threshold is None else asked.threshold}
    answering = Answering.model_validate(
        {
            **before.model_dump(),
            **changes,
            "temperature": before.temperature * tuning.temperature,  # logits were measured at the one before
            "measured_on": found.sentence,
        }
    )
    replace_card(path, card.model_copy(update={"answering": answering}))
    return path
