"""One self-contained HTML report of a trained or evaluated classifier: no network, light and dark, screen and paper."""

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

from vitrail.atomic import whole_file
from vitrail.errors import os_errors_as
from vitrail.metrics.accuracy import ClassScore, Scores
from vitrail.metrics.calibration import Reliability
from vitrail.metrics.multilabel import TagScore, TagScores
from vitrail.report import plots
from vitrail.report.summary import calibration_sentence, percent, summarise, suspicion_sentence
from vitrail.report.tuning import abstention_sentence, answered_rows, temperature_sentence, thresholds_sentence
from vitrail.terminal import visible_text

SMALL_PICTURE = 64  # pixels: up to here a picture is kept exactly and enlarged without smoothing
LARGEST_PICTURE = 256  # pixels
EXCLUDED_SHOWN = 100


@dataclass(frozen=True, eq=False)
class Picture:
    """An image the classifier was asked about, with its answer."""

    image: np.ndarray  # (H, W, C) uint8
    name: str
    truth: str
    predicted: str
    probability: float  # of the predicted class
    truth_probability: float
    map: np.ndarray | None = None  # (h, w, 3) uint8: as the network sees it, glowing where something spoke
    why: str = ""  # for this


@dataclass(frozen=True, eq=False)
class ReportFacts:
    """What a report says. Sections whose facts are empty are left out."""

    title: str
    subtitle: str
    scores: Scores | TagScores
    reliability: Reliability
    split_used: str  # a sentence: on which images the headline was measured
    history: Sequence[Mapping[str, Any]] = ()  # rows of metrics.jsonl
    baseline: tuple[str, float] | None = None  # (what it is, top-1 accuracy on the same images)
    watched_baseline: float | None = None  # its accuracy on the images of the curves
    mistakes: Sequence[Picture] = ()  # most confident first
    uncertain: Sequence[Picture] = ()  # least certain first
    suspects: Sequence[Picture] = ()  # whose label is probably wrong, most doubtful first
    suspected: int = 0  # how many of them there are
    answers: str = ""  # the file beside the page that has the answer to every image
    decisions: Sequence[tuple[str, str, str]] = ()  # (what, value, why)
    data: Sequence[tuple[str, str]] = ()  # (what, value)
    excluded: Sequence[tuple[str, str]] = ()  # (file, reason)
    notes: Sequence[str] = ()  # sentences about the data
    cost: Sequence[tuple[str, str]] = ()
    config_toml: str = ""
    commands: Sequence[Sequence[str]] = ()  # each as its words
    card: Sequence[tuple[str, str]] = ()


def write_report(path: str | Path, facts: ReportFacts) -> None:
    """Write the page; an existing file is replaced only by a complete one."""
    write_whole(path, render(facts), "the report")


def write_whole(path: str | Path, text: str, what: str) -> None:
    text = visible_text(text.replace("\0", "\ufffd"))  # a file name can hold what a page cannot
    with os_errors_as(f"cannot write {what} {path}"), whole_file(Path(path)) as temporary:
        temporary.write_bytes(text.encode("utf-8", errors="replace"))


def render(facts: ReportFacts) -> str:
    scores = facts.scores
    confusion = _confusions(scores) if isinstance(scores, Scores) else None
    return (
        page_environment()
        .get_template("page.html")
        .render(
            facts=facts,
            summary=summarise(scores, facts.reliability, facts.baseline),
            calibration=calibration_text(facts),
            answering=_answering(scores) if isinstance(scores, Scores) else None,
            suspicion=suspicion_sentence(facts.suspected, scores.n, scores.top1) if isinstance(scores, Scores) else "",
            curves=[Markup(svg) for svg in plots.learning_curves(facts.history, facts.watched_baseline)],
            confusion=confusion,
            reliability=Markup(plots.reliability_diagram(facts.reliability)),
            classes=sorted(scores.per_class, key=worst_first),
            excluded=facts.excluded[:EXCLUDED_SHOWN],
            commands=[shlex.join(words) for words in facts.commands],
        )
    )


def _confusions(scores: Scores) -> dict[str, Any]:
    """What the section on confusions shows."""
    names = [one.name for one in scores.per_class]
    shown = plots.most_confused(scores.confusion)
    return {
        "matrix": Markup(plots.confusion_matrix(scores.confusion, names)) if len(shown) else None,
        "shown": len(shown) if len(shown) < len(names) else None,
        "pairs": confused_pairs(scores),
    }


def calibration_text(facts: ReportFacts) -> str:
    """What stated probabilities are worth, and what tuning would make of them."""
    scores = facts.scores
    more = temperature_sentence(scores) if isinstance(scores, Scores) else thresholds_sentence(scores)
    return f"{calibration_sentence(facts.reliability, scores)} {more}".rstrip()


def _answering(scores: Scores) -> dict[str, Any] | None:
    """What the section on answering less shows, if there are enough images to say anything."""
    tuned = scores.tuned
    rows = answered_rows(tuned.coverage, scores.n) if tuned is not None else []
    if tuned is None or not rows:
        return None
    asked = tuned.abstention.accuracy if tuned.abstention is not None else None
    return {
        "curve": Markup(plots.coverage_curve(tuned.coverage, scores.n, asked)),
        "rows": rows,
        "asked": abstention_sentence(scores),
        "temperature": tuned.temperature,
    }


def confused_pairs(scores: Scores, most: int = 6) -> list[tuple[str, str, int, int]]:
    """(truth, predicted, how often, of how many) of the commonest confusions."""
    classes = scores.per_class
    return [
        (classes[truth].name, classes[other].name, int(scores.confusion[truth, other]), classes[truth].count)
        for truth, other in plots.confusions(scores.confusion)[:most]
    ]


def breakable(path: str) -> Markup:
    """A file name that breaks a line after a slash or an underscore rather than anywhere."""
    return Markup("/<wbr>").join(Markup("_<wbr>").join(part.split("_")) for part in path.split("/"))


def picture_source(image: np.ndarray) -> str:
    """A data URI: PNG of a small picture as it is, JPEG of a large one scaled down."""
    image = np.squeeze(image, axis=2) if image.ndim == 3 and image.shape[2] == 1 else image
    picture = Image.fromarray(np.ascontiguousarray(image)).convert("RGB")
    buffer = io.BytesIO()
    if is_small(image):
        picture.save(buffer, format="PNG", optimize=True)
        kind = "png"
    else:
        picture.thumbnail((LARGEST_PICTURE, LARGEST_PICTURE), Image.Resampling.LANCZOS)
        picture.save(buffer, format="JPEG", quality=85, optimize=True)
        kind = "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def is_small(image: np.ndarray) -> bool:
    return max(image.shape[:2]) <= SMALL_PICTURE


@functools.cache
def page_environment() -> Environment:
    """Templates of this room, with what they need to show numbers, paths and pictures."""
    environment = Environment(
        loader=PackageLoader("vitrail", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for function in (percent, breakable, picture_source, is_small):
        environment.filters[function.__name__] = function
    return environment


def worst_first(one: ClassScore | TagScore) -> tuple[bool, float, str]:
    value = one.average_precision if isinstance(one, TagScore) else one.recall
    return value is None, value or 0.0, one.name
