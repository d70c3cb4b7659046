"""What a measurement says about better answers from the same weights, and the weights file that remembers it."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import Console

from vitrail.errors import UserError
from vitrail.evaluate.metrics import Scores
from vitrail.evaluate.tags import THRESHOLD, TagScores
from vitrail.evaluate.temperature import COLDEST, HOTTEST
from vitrail.evaluate.tuning import TagTuning, Tuning, tune, tune_tags
from vitrail.images.dataset import Samples
from vitrail.runs.measure import Measurement
from vitrail.weights.bundle import Answering, Card, read_card, replace_card

FEWEST = 50  # images to fit to before anything is written down
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
        console.print("[dim]so few images give a calibration error like this by chance[/]")
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
        return f"at least {asked.accuracy:.1%} right by these images, too few to check it by halves"
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


def fitted_note(card: Card, samples: Samples) -> str:
    """What to add to a sentence about images that the answers were fitted on."""
    same = card.answering.fitted_on == _identity(samples)
    return ", on which its temperature and thresholds were fitted" if same else ""


def write_answering(weights: str | Path, card: Card, found: Measurement, samples: Samples) -> str:
    """Into the card of the weights: the temperature, and the thresholds that were asked for. Returns what was done."""
    path, tuning, before = own_file(weights), found.scores.tuned, card.answering
    assert tuning is not None
    if found.scores.n < FEWEST:
        return f"nothing is written: {found.scores.n} images are too few to fit to, {FEWEST} the fewest"
    # Logits were measured at the temperature before.
    temperature = min(max(before.temperature * tuning.temperature, COLDEST), HOTTEST)
    changes: dict[str, object] = {"temperature": temperature, "fitted_on": _identity(samples)}
    told = [f"temperature {temperature:.3g} (before: {before.temperature:.3g})"]
    if isinstance(tuning, TagTuning):
        changes["thresholds"] = tuple(tuning.thresholds)
        told.append(f"a threshold for each of {len(tuning.thresholds)} labels")
    elif tuning.abstention is not None and tuning.abstention.threshold is not None:
        changes["threshold"] = tuning.abstention.threshold
        told.append(f"threshold {tuning.abstention.threshold:.3f}")
    elif before.threshold and temperature != before.temperature:
        changes["threshold"] = 0.0
        told.append(f"and no threshold: {before.threshold:.3f} held for the temperature before (--target-accuracy)")
    values = {**before.model_dump(), **changes, "measured_on": found.sentence}
    replace_card(path, card.model_copy(update={"answering": Answering.model_validate(values)}))
    return f"written into {path}: {', '.join(told)}"


def _identity(samples: Samples) -> str:
    return hashlib.sha256(np.sort(samples.digests).tobytes()).hexdigest()[:16]
