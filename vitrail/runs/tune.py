"""What a measurement says about better answers from the same weights, and the weights file that remembers it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.markup import escape

from vitrail.errors import UserError
from vitrail.evaluate.metrics import Scores
from vitrail.evaluate.tags import THRESHOLD, TagScores
from vitrail.evaluate.tuning import TagTuning, tune, tune_tags
from vitrail.report.tuning import abstention_sentence, temperature_sentence, thresholds_sentence
from vitrail.runs.measure import Measurement
from vitrail.weights.bundle import Answering, Card, read_card, replace_card


def tuned(found: Measurement, thresholds: Sequence[float] = (), accuracy: float | None = None) -> Measurement:
    """The measurement, with what temperature, abstention and thresholds would change. `thresholds`: those in use for
    several labels; `accuracy`: asked of answers."""
    logits, labels = found.outputs.values.numpy(), found.outputs.labels.numpy()
    scores = found.scores
    if isinstance(scores, TagScores):
        now = np.array(thresholds or [THRESHOLD] * logits.shape[1])
        return replace(found, scores=replace(scores, tuned=tune_tags(logits, labels, now)))
    return replace(found, scores=replace(scores, tuned=tune(logits, labels, accuracy)))


def show_tuning(console: Console, scores: Scores | TagScores) -> None:
    if isinstance(scores, TagScores):
        sentences = [thresholds_sentence(scores)]
    else:
        sentences = [temperature_sentence(scores), abstention_sentence(scores)]
    for sentence in sentences:
        if sentence:
            console.print(escape(sentence))


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
