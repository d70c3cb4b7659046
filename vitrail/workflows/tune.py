"""What a measurement says about better answers from the same weights, and the weights file that remembers it."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import Console

from vitrail.config.postprocess import Postprocess
from vitrail.data.dataset import Samples
from vitrail.data.splits import group_ids
from vitrail.errors import UserError
from vitrail.terminal import escape
from vitrail.weights.bundle import Card, read_card, replace_card
from vitrail.weights.names import local_path
from vitrail.workflows.measure import Measurement

FEWEST = 50  # images to fit to before anything is written down


def with_tuning(
    found: Measurement, samples: Samples, postprocess: Postprocess | None = None, accuracy: float | None = None
) -> Measurement:
    """The measurement, with what temperature, abstention and thresholds would change. `samples`: the images measured
    on; `answering`: what is in use; `accuracy`: asked of answers."""
    groups = group_ids(samples, found.outputs.sample.numpy())
    logits, labels = found.outputs.values.numpy(), found.outputs.labels.numpy()
    best = found.task.tune(logits, labels, postprocess or Postprocess(), accuracy, groups)
    return replace(found, scores=replace(found.scores, tuned=best))


def show_tuning(console: Console, found: Measurement) -> None:
    for sentence in found.result.tuning:
        if sentence:
            console.print(escape(sentence))


def writable_weights_file(weights: str | Path) -> Path:
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
    return card.postprocess.fitted_on == _identity(samples)


def fitted_note(card: Card, samples: Samples) -> str:
    """What to add to a sentence about images that the answers were fitted on."""
    return ", on which its temperature and thresholds were fitted" if fitted_on(card, samples) else ""


def write_postprocess(weights: str | Path, card: Card, found: Measurement, samples: Samples) -> str:
    """Into the card of the weights: the temperature, and the thresholds that were asked for. Returns what was done."""
    path, tuning, before = writable_weights_file(weights), found.scores.tuned, card.postprocess
    if found.scores.n < FEWEST:
        return f"nothing is written: {found.scores.n} images are too few to fit to, {FEWEST} the fewest"
    if len(np.unique(group_ids(samples))) < 2:
        return "nothing is written: the images are one group, and none of it can be held out to judge the fit by"
    changes, words = found.task.to_postprocess(tuning, before)
    told = [f"temperature {changes['temperature']:.3g} (before: {before.temperature:.3g})", *words]
    changes |= {"fitted_on": _identity(samples)}
    values = {**before.model_dump(), **changes, "measured_on": found.sentence}
    replace_card(path, card.model_copy(update={"postprocess": Postprocess.model_validate(values)}))
    return f"written into {path}: {', '.join(told)}"


def _identity(samples: Samples) -> str:
    return hashlib.sha256(np.sort(samples.digests).tobytes()).hexdigest()[:16]
