"""Postprocessing fitted to a measurement: temperature, thresholds and selective prediction (abstention).

In: a `Measurement`. Out: the measurement with the effect of the fit, for the report; and, if the user asks for it, the
fit in the card of the weights (`write_postprocess`).
"""

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

FEWEST = 50  # images that a fit needs before it may be written


def with_tuning(
    measurement: Measurement, samples: Samples, postprocess: Postprocess | None = None, accuracy: float | None = None
) -> Measurement:
    """The measurement, with the effect of a fitted temperature, thresholds and abstention.

    `samples`: the measured images; `postprocess`: the present one; `accuracy`: the target of selective prediction."""
    groups = group_ids(samples, measurement.outputs.sample.numpy())
    logits, labels = measurement.outputs.values.numpy(), measurement.outputs.labels.numpy()
    best = measurement.task.tune(logits, labels, postprocess or Postprocess(), accuracy, groups)
    return replace(measurement, scores=replace(measurement.scores, tuned=best))


def show_tuning(console: Console, measurement: Measurement) -> None:
    for sentence in measurement.result.tuning:
        if sentence:
            console.print(escape(sentence))


def writable_weights_file(weights: str | Path) -> Path:
    """The path of a weights file of vitrail that can be changed. Raises UserError for other files."""
    path = local_path(weights)
    path = path / "model.safetensors" if path is not None and path.is_dir() else path
    if path is None or path.suffix != ".safetensors" or not path.is_file():
        raise UserError(
            f"--write needs a weights file of vitrail, and '{weights}' is not one: convert it with `vitrail convert "
            f"{weights} FILE.safetensors --to vitrail`"
        )
    read_card(path)  # raises if it is damaged
    if not os.access(path.absolute().parent, os.W_OK):
        raise UserError(f"--write cannot write to the folder of '{path}': check its permissions")
    return path


def fitted_on(card: Card, samples: Samples) -> bool:
    """Whether temperature and thresholds were fitted on exactly these images."""
    return card.postprocess.fitted_on == _identity(samples)


def fitted_note(card: Card, samples: Samples) -> str:
    """A note for the report if temperature and thresholds were fitted on the measured images."""
    return ", on which its temperature and thresholds were fitted" if fitted_on(card, samples) else ""


def write_postprocess(weights: str | Path, card: Card, measurement: Measurement, samples: Samples) -> str:
    """Write the fitted temperature and thresholds into the card of the weights. Returns a sentence about the result."""
    path, tuning, before = writable_weights_file(weights), measurement.scores.tuned, card.postprocess
    if measurement.scores.n < FEWEST:
        return f"nothing written: fitting needs at least {FEWEST} images, but only {measurement.scores.n} were measured"
    if len(np.unique(group_ids(samples))) < 2:
        return "nothing written: all images are one group, so they cannot be split to check the fit"
    changes, words = measurement.task.to_postprocess(tuning, before)
    changed = [f"temperature {changes['temperature']:.3g} (before: {before.temperature:.3g})", *words]
    changes |= {"fitted_on": _identity(samples)}
    values = {**before.model_dump(), **changes, "measured_on": measurement.sentence}
    replace_card(path, card.model_copy(update={"postprocess": Postprocess.model_validate(values)}))
    return f"written into {path}: {', '.join(changed)}"


def _identity(samples: Samples) -> str:
    return hashlib.sha256(np.sort(samples.digests).tobytes()).hexdigest()[:16]
