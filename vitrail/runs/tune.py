"""What a measurement says about better answers from the same weights, and the weights file that remembers it."""

from __future__ import annotations

import hashlib
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
from vitrail.evaluate.temperature import COLDEST, HOTTEST
from vitrail.evaluate.tuning import TagTuning, tune, tune_tags
from vitrail.images.dataset import Samples
from vitrail.report.tuning import abstention_sentence, temperature_sentence, thresholds_sentence
from vitrail.runs.measure import Measurement
from vitrail.weights.bundle import Answering, Card, read_card, replace_card
from vitrail.weights.names import local_path

FEWEST = 50  # images to fit to before anything is written down


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
    path = local_path(weights)
    path = path / "model.safetensors" if path is not None and path.is_dir() else path
    if path is None or path.suffix != ".safetensors" or not path.is_file():
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
