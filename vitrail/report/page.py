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

from vitrail.atomic import atomic_write
from vitrail.errors import os_errors_as
from vitrail.report import plots
from vitrail.tasks.result import THIN_SPACE, Result, SelectivePrediction, percent
from vitrail.terminal import printable_text

SMALL_PICTURE = 64  # pixels: up to here a picture is kept exactly and enlarged without smoothing
LARGEST_PICTURE = 256  # pixels
EXCLUDED_SHOWN = 100
MANY_SUSPECTS = 0.1  # share of the labels: beyond, the network is likelier wrong than they are


@dataclass(frozen=True, eq=False)
class ReportImage:
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
    result: Result
    split_used: str  # a sentence: on which images the headline was measured
    history: Sequence[Mapping[str, Any]] = ()  # rows of metrics.jsonl
    val_baseline: float | None = None  # of the headline, on the images of the curves
    confident_errors: Sequence[ReportImage] = ()  # most confident first
    uncertain: Sequence[ReportImage] = ()  # least certain first
    label_errors: Sequence[ReportImage] = ()  # whose label is probably wrong, most doubtful first
    num_label_errors: int = 0  # how many of them there are
    predictions_file: str = ""  # the file beside the page that has the answer to every image
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
    write_whole(path, render_report(facts), "the report")


def write_whole(path: str | Path, text: str, what: str) -> None:
    text = printable_text(text.replace("\0", "\ufffd"))  # a file name can hold what a page cannot
    with os_errors_as(f"cannot write {what} {path}"), atomic_write(Path(path)) as temporary:
        temporary.write_bytes(text.encode("utf-8", errors="replace"))


def render_report(facts: ReportFacts) -> str:
    result = facts.result
    return (
        page_environment()
        .get_template("page.html")
        .render(
            facts=facts,
            result=result,
            abstaining=result.selective and _abstaining(result.selective, result.scores.n),
            suspicion=suspicion_sentence(facts),
            curves=[Markup(svg) for svg in plots.learning_curves(facts.history, facts.val_baseline)],
            confusion=None if result.confusion is None else _confusions(result),
            reliability=Markup(plots.reliability_diagram(result.scores.reliability)),
            classes=result.classes,
            excluded=facts.excluded[:EXCLUDED_SHOWN],
            commands=[shlex.join(words) for words in facts.commands],
        )
    )


def suspicion_sentence(facts: ReportFacts) -> str:
    """How many labels are doubted, and what to make of it."""
    images, correct = facts.result.scores.n, facts.result.scores.headline
    begin = f"The network doubts the label of {facts.num_label_errors:,} of {images:,} images. "
    if facts.num_label_errors <= MANY_SUSPECTS * images:
        return begin + "Those it doubts most come first."
    return (
        f"{begin}Measured test sets have some 3{THIN_SPACE}% of wrong labels, and a network that is right for "
        f"{percent(correct)} doubts many that are right: look at the first ones, and trust the count little."
    )


def _confusions(result: Result) -> dict[str, Any]:
    """What the section on confusions shows."""
    assert result.confusion is not None
    names = [one.name for one in result.scores.per_class]
    shown = plots.most_confused(result.confusion)
    return {
        "matrix": Markup(plots.confusion_matrix(result.confusion, names)) if len(shown) else None,
        "shown": len(shown) if len(shown) < len(names) else None,
        "pairs": _confused_pairs(result),
    }


def _confused_pairs(result: Result, most: int = 6) -> list[tuple[str, str, int, int]]:
    """(truth, predicted, how often, of how many) of the commonest confusions."""
    assert result.confusion is not None
    classes, counts = result.scores.per_class, result.confusion
    return [
        (classes[truth].name, classes[other].name, int(counts[truth, other]), classes[truth].count)
        for truth, other in plots.confusions(counts)[:most]
    ]


def _abstaining(found: SelectivePrediction, images: int) -> dict[str, Any]:
    """What the section on answering less shows."""
    return {
        "curve": Markup(plots.coverage_plot(found.coverage, images, found.accuracy)),
        "rows": found.rows,
        "sentence": found.sentence,
        "temperature": found.temperature,
    }


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
