"""The HTML report of a trained or evaluated classifier: one file that loads nothing from outside."""

from __future__ import annotations

import base64
import functools
import io
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from PIL import Image

from vitrail.atomic import atomic_write
from vitrail.errors import os_errors_as
from vitrail.report import plots, training_plots
from vitrail.tasks.result import THIN_SPACE, Result, SelectivePrediction, percent
from vitrail.terminal import printable_text

SMALL_IMAGE = 64  # pixels: images up to this size are embedded exactly and enlarged without smoothing
MAX_IMAGE = 256  # pixels: larger images are scaled down
MAX_EXCLUDED = 100  # excluded files listed
MANY_LABEL_ERRORS = 0.1  # of the labels: beyond this fraction the model is more often wrong than the labels


@dataclass(frozen=True, eq=False)
class ReportImage:
    """An image with its true label and the model's prediction."""

    image: np.ndarray  # (H, W, C) uint8
    name: str
    truth: str
    predicted: str
    probability: float  # of the predicted class
    truth_probability: float
    map: np.ndarray | None = None  # (h, w, 3) uint8: the model input under a heat map of the evidence
    why: str = ""  # the class that the heat map supports


@dataclass(frozen=True, eq=False)
class ReportFacts:
    """The contents of a report. A section without contents is omitted."""

    title: str
    subtitle: str
    result: Result
    split_used: str  # a sentence: the images that the headline was measured on
    history: Sequence[Mapping[str, Any]] = ()  # rows of metrics.jsonl
    val_baseline: float | None = None  # headline score of the baseline on the validation set
    confident_errors: Sequence[ReportImage] = ()  # most confident first
    least_confident: Sequence[ReportImage] = ()  # least confident first
    label_errors: Sequence[ReportImage] = ()  # possible label errors, most doubtful first
    num_label_errors: int = 0  # including those that are not shown
    predictions_file: str = ""  # name of the CSV file with the prediction for every image
    decisions: Sequence[tuple[str, str, str]] = ()  # (setting, value, reason)
    data: Sequence[tuple[str, str]] = ()  # (name, value)
    excluded: Sequence[tuple[str, str]] = ()  # (file, reason)
    notes: Sequence[str] = ()  # sentences about the data
    cost: Sequence[tuple[str, str]] = ()
    config_toml: str = ""
    commands: Sequence[Sequence[str]] = ()  # each as a list of arguments
    card: Sequence[tuple[str, str]] = ()


def write_report(path: str | Path, facts: ReportFacts) -> None:
    """Write the report. An existing file is replaced only when the new one is complete."""
    write_text_file(path, render_report(facts), "the report")


def write_text_file(path: str | Path, text: str, what: str) -> None:
    """Write `text` to `path` atomically; `what` names the file in error messages."""
    text = printable_text(text.replace("\0", "\ufffd"))  # file names may contain NUL
    with os_errors_as(f"cannot write {what} {path}"), atomic_write(Path(path)) as temporary:
        temporary.write_bytes(text.encode("utf-8", errors="replace"))


def render_report(facts: ReportFacts) -> str:
    """Return the report as HTML."""
    result = facts.result
    return (
        page_environment()
        .get_template("page.html")
        .render(
            facts=facts,
            result=result,
            selective=result.selective and _selective_prediction(result.selective, result.scores.n),
            label_error_sentence=label_error_sentence(facts),
            curves=[Markup(svg) for svg in training_plots.learning_curves(facts.history, facts.val_baseline)],
            confusion=None if result.confusion is None else _confusion_section(result),
            reliability=Markup(plots.reliability_diagram(result.scores.reliability)),
            classes=result.classes,
            excluded=facts.excluded[:MAX_EXCLUDED],
            commands=[shlex.join(command) for command in facts.commands],
        )
    )


def label_error_sentence(facts: ReportFacts) -> str:
    """Return how many labels are possibly wrong, and how far to trust that number."""
    images, correct = facts.result.scores.n, facts.result.scores.headline
    sentence = f"{facts.num_label_errors:,} of {images:,} labels are possibly wrong."
    if facts.num_label_errors <= MANY_LABEL_ERRORS * images:
        return sentence
    return (
        f"{sentence} Published test sets have about 3{THIN_SPACE}% wrong labels. A model that is correct for "
        f"{percent(correct)} also flags many correct labels: check the first ones, and do not rely on the count."
    )


def _confusion_section(result: Result) -> dict[str, Any]:
    """Template variables of the confusion matrix."""
    assert result.confusion is not None
    names = [class_.name for class_ in result.scores.per_class]
    shown = plots.most_confused_classes(result.confusion)
    return {
        "matrix": Markup(plots.confusion_matrix(result.confusion, names)) if len(shown) else None,
        "shown": len(shown) if len(shown) < len(names) else None,
        "pairs": _most_confused_pairs(result),
    }


def _most_confused_pairs(result: Result, limit: int = 6) -> list[tuple[str, str, int, int]]:
    """(true class, predicted class, errors, images of the true class), most frequent error first."""
    assert result.confusion is not None
    classes, confusion = result.scores.per_class, result.confusion
    return [
        (classes[truth].name, classes[predicted].name, int(confusion[truth, predicted]), classes[truth].count)
        for truth, predicted in plots.confused_pairs(confusion)[:limit]
    ]


def _selective_prediction(selective: SelectivePrediction, images: int) -> dict[str, Any]:
    """Template variables of selective prediction."""
    return {
        "curve": Markup(plots.coverage_plot(selective.coverage, images, selective.accuracy)),
        "rows": selective.rows,
        "sentence": selective.sentence,
        "temperature": selective.temperature,
    }


def breakable(path: str) -> Markup:
    """Return a file name that wraps after a slash or an underscore rather than anywhere."""
    return Markup("/<wbr>").join(Markup("_<wbr>").join(part.split("_")) for part in path.split("/"))


def image_data_uri(image: np.ndarray) -> str:
    """Return a data URI: the exact image as PNG if it is small, else a scaled-down JPEG."""
    image = np.squeeze(image, axis=2) if image.ndim == 3 and image.shape[2] == 1 else image
    picture = Image.fromarray(np.ascontiguousarray(image)).convert("RGB")
    buffer = io.BytesIO()
    if is_small(image):
        picture.save(buffer, format="PNG", optimize=True)
        kind = "png"
    else:
        picture.thumbnail((MAX_IMAGE, MAX_IMAGE), Image.Resampling.LANCZOS)
        picture.save(buffer, format="JPEG", quality=85, optimize=True)
        kind = "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def is_small(image: np.ndarray) -> bool:
    """Return whether an image is embedded exactly and enlarged without smoothing."""
    return max(image.shape[:2]) <= SMALL_IMAGE


@functools.cache
def page_environment() -> Environment:
    """Return the Jinja environment with the filters of all report templates."""
    environment = Environment(
        loader=PackageLoader("vitrail", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for function in (percent, breakable, image_data_uri, is_small):
        environment.filters[function.__name__] = function
    return environment
