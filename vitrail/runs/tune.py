"""What a measurement says about better answers from the same weights, and the weights file that remembers it."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.markup import escape

from vitrail.errors import UserError
from vitrail.evaluate.metrics import Scores
from vitrail.evaluate.tags import THRESHOLD, TagScores, same_decisions
from vitrail.evaluate.tuning import Abstention, TagTuning, tune, tune_tags
from vitrail.images.dataset import Samples
from vitrail.report.tuning import abstention_sentence, temperature_sentence, thresholds_sentence
from vitrail.runs.measure import Measurement
from vitrail.weights.bundle import Answering, Card, read_card, replace_card
from vitrail.weights.names import local_path

FEWEST = 50  # images to fit to before anything is written down
SAME = 1e-3  # share of a temperature, by which a fit to the very same images may miss it


def tuned(found: Measurement, answering: Answering | None = None, accuracy: float | None = None) -> Measurement:
    """The measurement, with what temperature, abstention and thresholds would change. `answering`: what is in use;
    `accuracy`: asked of answers."""
    answering = answering or Answering()
    logits, labels = found.outputs.values.numpy(), found.outputs.labels.numpy()
    scores = found.scores
    if isinstance(scores, TagScores):
        now = np.array(answering.thresholds or [THRESHOLD] * logits.shape[1])
        return replace(found, scores=replace(scores, tuned=tune_tags(logits, labels, now, answering.temperature)))
    return replace(found, scores=replace(scores, tuned=tune(logits, labels, accuracy, answering.temperature)))


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


def fitted_on(card: Card, samples: Samples) -> bool:
    """Whether temperature and thresholds were fitted on these very images."""
    return card.answering.fitted_on == _identity(samples)


def fitted_note(card: Card, samples: Samples) -> str:
    """What to add to a sentence about images that the answers were fitted on."""
    return ", on which its temperature and thresholds were fitted" if fitted_on(card, samples) else ""


def write_answering(weights: str | Path, card: Card, found: Measurement, samples: Samples) -> str:
    """Into the card of the weights: the temperature, and the thresholds that were asked for. Returns what was done."""
    path, tuning, before = own_file(weights), found.scores.tuned, card.answering
    assert tuning is not None
    if found.scores.n < FEWEST:
        return f"nothing is written: {found.scores.n} images are too few to fit to, {FEWEST} the fewest"
    same = abs(tuning.temperature / before.temperature - 1) < SAME
    temperature = before.temperature if same else tuning.temperature
    if isinstance(tuning, TagTuning):
        thresholds, words = _thresholds(tuning, before)
        changes: dict[str, object] = {"thresholds": thresholds}
    else:
        threshold, words = _threshold(tuning.abstention, before, same)
        changes = {"threshold": threshold}
    changes |= {"temperature": temperature, "fitted_on": _identity(samples)}
    told = [f"temperature {temperature:.3g} (before: {before.temperature:.3g})", *words]
    values = {**before.model_dump(), **changes, "measured_on": found.sentence}
    replace_card(path, card.model_copy(update={"answering": Answering.model_validate(values)}))
    return f"written into {path}: {', '.join(told)}"


def _thresholds(tuning: TagTuning, before: Answering) -> tuple[tuple[float, ...], list[str]]:
    """Of several labels: those found, unless they do worse on images they were not fitted on, and what to tell."""
    if tuning.macro_f1 >= tuning.macro_f1_before:
        return tuple(tuning.thresholds), [f"a threshold for each of {len(tuning.thresholds)} labels"]
    scale = tuning.temperature / before.temperature
    kept = tuple(same_decisions(np.array(before.thresholds), scale).tolist())
    return kept, ["labels decided as before: thresholds fitted on one half of the images do worse on the other"]


def _threshold(asked: Abstention | None, before: Answering, same: bool) -> tuple[float, list[str]]:
    """Of one label: below which there is no answer, and what to tell. That before holds at the `same` temperature."""
    if asked is not None and asked.threshold is not None:
        return asked.threshold, [f"threshold {asked.threshold:.3f}"]
    none = "" if asked is None else f": none makes {100 * asked.accuracy:.4g} % of the answers right"
    if before.threshold and same:
        return before.threshold, [f"threshold {before.threshold:.3f} as before{none}"]
    if before.threshold:
        advice = " (--target-accuracy finds one)" if asked is None else ""
        gone = f"{before.threshold:.3f} held for the temperature before{advice}"
        return 0.0, [f"no threshold{none}{', and ' if none else ': '}{gone}"]
    return 0.0, [f"no threshold{none}"] if none else []


def _identity(samples: Samples) -> str:
    return hashlib.sha256(np.sort(samples.digests).tobytes()).hexdigest()[:16]
