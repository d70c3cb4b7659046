"""What a measurement says about better answers from the same weights, and the weights file that remembers it."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from vitrail.data.dataset import Samples
from vitrail.data.splits import groups_of
from vitrail.errors import UserError
from vitrail.metrics.accuracy import Scores
from vitrail.metrics.multilabel import THRESHOLD, TagScores, same_decisions
from vitrail.metrics.tuning import TagTuning, Tuning, tune, tune_tags
from vitrail.report.tuning import abstention_sentence, temperature_sentence, thresholds_sentence
from vitrail.terminal import escape
from vitrail.weights.bundle import Answering, Card, read_card, replace_card
from vitrail.weights.names import local_path
from vitrail.workflows.measure import Measurement

FEWEST = 50  # images to fit to before anything is written down
SAME = 1e-3  # share of a temperature, by which a fit to the very same images may miss it


def tuned(
    found: Measurement, samples: Samples, answering: Answering | None = None, accuracy: float | None = None
) -> Measurement:
    """The measurement, with what temperature, abstention and thresholds would change. `samples`: the images measured
    on; `answering`: what is in use; `accuracy`: asked of answers."""
    answering = answering or Answering()
    logits, labels = found.outputs.values.numpy(), found.outputs.labels.numpy()
    scores, groups = found.scores, groups_of(samples, found.outputs.sample.numpy())
    if isinstance(scores, TagScores):
        now = np.array(answering.thresholds or [THRESHOLD] * logits.shape[1])
        return replace(
            found, scores=replace(scores, tuned=tune_tags(logits, labels, now, answering.temperature, groups=groups))
        )
    return replace(
        found, scores=replace(scores, tuned=tune(logits, labels, accuracy, answering.temperature, groups=groups))
    )


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
    if len(np.unique(groups_of(samples))) < 2:
        return "nothing is written: the images are one group, and none of it can be held out to judge the fit by"
    changes, words = _thresholds(tuning, before) if isinstance(tuning, TagTuning) else _threshold(tuning, before)
    told = [f"temperature {changes['temperature']:.3g} (before: {before.temperature:.3g})", *words]
    changes |= {"fitted_on": _identity(samples)}
    values = {**before.model_dump(), **changes, "measured_on": found.sentence}
    replace_card(path, card.model_copy(update={"answering": Answering.model_validate(values)}))
    return f"written into {path}: {', '.join(told)}"


def _thresholds(tuning: TagTuning, before: Answering) -> tuple[dict[str, Any], list[str]]:
    """Of several labels: what to store, and what to tell. Thresholds that do worse on images they were not fitted on
    are not taken."""
    if tuning.macro_f1 >= tuning.macro_f1_before:
        found, told = tuning.thresholds, f"a threshold for each of {len(tuning.thresholds)} labels"
    else:
        found = same_decisions(np.array(before.thresholds), tuning.temperature / before.temperature).tolist()
        told = "labels decided as before: thresholds fitted on one half of the images do worse on the other"
    return {"temperature": tuning.temperature, "thresholds": found}, [told]


def _threshold(tuning: Tuning, before: Answering) -> tuple[dict[str, Any], list[str]]:
    """The same for one label. A threshold that was stored before holds for the temperature before alone."""
    asked, stored = tuning.abstention, before.threshold
    if asked is not None and asked.threshold is not None:
        found = {"temperature": tuning.temperature, "threshold": asked.threshold}
        return found, [f"threshold {asked.threshold:.3f}"]
    none = "" if asked is None else f": none makes {100 * asked.accuracy:.4g} % of the answers right"
    if stored and abs(tuning.temperature / before.temperature - 1) < SAME:
        return {"temperature": before.temperature}, [f"threshold {stored:.3f} as before{none}"]
    told = [f"no threshold{none}"] if none or stored else []
    if stored:
        advice = "" if none else " (--target-accuracy finds one)"
        told[0] += f"{', and' if none else ':'} {stored:.3f} held for the temperature before{advice}"
    return {"temperature": tuning.temperature, "threshold": 0.0}, told


def _identity(samples: Samples) -> str:
    return hashlib.sha256(np.sort(samples.digests).tobytes()).hexdigest()[:16]
