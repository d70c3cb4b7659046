"""One self-contained HTML report of a trained or evaluated classifier: no network, light and dark, screen and paper."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from PIL import Image

from vitrail.atomic import whole_file
from vitrail.errors import UserError
from vitrail.evaluate.calibration import Reliability
from vitrail.evaluate.metrics import ClassScore, Scores
from vitrail.report import plots

THIN_SPACE = "\u202f"  # does not break
SMALL_PICTURE = 64  # pixels: up to here a picture is kept exactly and enlarged without smoothing
LARGEST_PICTURE = 256  # pixels
FEW_IMAGES = 300  # with fewer, a calibration error is mostly noise
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


@dataclass(frozen=True, eq=False)
class ReportFacts:
    """What a report says. Sections whose facts are empty are left out."""

    title: str
    subtitle: str
    scores: Scores
    reliability: Reliability
    split_used: str  # a sentence: on which images the headline was measured
    history: Sequence[Mapping[str, Any]] = ()  # rows of metrics.jsonl
    baseline: tuple[str, float] | None = None  # (what it is, top-1 accuracy on the same images)
    watched_baseline: float | None = None  # its accuracy on the images of the curves
    mistakes: Sequence[Picture] = ()  # most confident first
    uncertain: Sequence[Picture] = ()  # least certain first
    decisions: Sequence[tuple[str, str, str]] = ()  # (what, value, why)
    data: Sequence[tuple[str, str]] = ()  # (what, value)
    excluded: Sequence[tuple[str, str]] = ()  # (file, reason)
    notes: Sequence[str] = ()  # sentences about the data
    cost: Sequence[tuple[str, str]] = ()
    config_toml: str = ""
    commands: Sequence[str] = ()
    card: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class Level:
    """One line of the headline's scale."""

    name: str
    value: float
    interval: tuple[float, float] | None = None


def write_report(path: str | Path, facts: ReportFacts) -> None:
    """Write the page; an existing file is replaced only by a complete one."""
    text = render(facts).replace("\0", "\ufffd")  # a file name can hold what a page cannot
    try:
        with whole_file(Path(path)) as temporary:
            temporary.write_bytes(text.encode("utf-8", errors="replace"))
    except OSError as error:
        raise UserError(f"cannot write the report {path}: {error.strerror or error}") from error


def render(facts: ReportFacts) -> str:
    scores = facts.scores
    names = [one.name for one in scores.per_class]
    shown = plots.most_confused(scores.confusion)
    return (
        _environment()
        .get_template("page.html")
        .render(
            facts=facts,
            scores=scores,
            levels=levels(facts),
            verdict=" ".join(verdict(facts)),
            calibration=calibration_sentence(facts),
            curves=[Markup(svg) for svg in plots.learning_curves(facts.history, facts.watched_baseline)],
            confusion=Markup(plots.confusion_matrix(scores.confusion, names)) if len(shown) else None,
            confusion_shown=len(shown) if len(shown) < len(names) else None,
            confused=confused_pairs(scores),
            reliability=Markup(plots.reliability_diagram(facts.reliability)),
            classes=sorted(scores.per_class, key=_worst_first),
            excluded=facts.excluded[:EXCLUDED_SHOWN],
        )
    )


def levels(facts: ReportFacts) -> list[Level]:
    """Guessing, the baseline and the model, on one scale."""
    found = [Level(_guess(facts.scores)[0], _guess(facts.scores)[1])]
    if facts.baseline:
        found.append(Level(*facts.baseline))
    return [*found, Level("this model", facts.scores.top1, facts.scores.top1_interval)]


def verdict(facts: ReportFacts) -> list[str]:
    """The headline in plain English: how many right, and whether that beats guessing and the baseline."""
    scores = facts.scores
    right = round(scores.top1 * scores.n)
    sentences = [f"It names the right class for {right:,} of {scores.n:,} images."]
    guess, level = _guess(scores)
    better = scores.top1_interval[0] > level  # by far, usually; then the number says enough
    compared = "" if better else _compared(scores, level)
    sentences.append(f"{guess[0].upper()}{guess[1:]} would score {percent(level)}{compared}.")
    if facts.baseline:
        name, level = facts.baseline
        sentences.append(f"A baseline, {name}, scores {percent(level)}{_compared(scores, level)}.")
    return sentences


def calibration_sentence(facts: ReportFacts) -> str:
    found = facts.reliability
    if found.ece < 0.0005:
        return "When it states a probability, that is off by less than 0.1 percentage points on average."
    if abs(found.overconfidence) < found.ece / 2:
        direction = "sometimes too high and sometimes too low"
    else:
        direction = "mostly too high" if found.overconfidence > 0 else "mostly too low"
    rough = " With so few images this number is rough." if facts.scores.n < FEW_IMAGES else ""
    return (
        f"When it states a probability, that is off by {100 * found.ece:.1f} percentage points on average, "
        f"{direction}.{rough}"
    )


def confused_pairs(scores: Scores, most: int = 6) -> list[tuple[str, str, int, int]]:
    """(truth, predicted, how often, of how many) of the commonest confusions."""
    classes = scores.per_class
    return [
        (classes[truth].name, classes[other].name, int(scores.confusion[truth, other]), classes[truth].count)
        for truth, other in plots.confusions(scores.confusion)[:most]
    ]


def percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f}{THIN_SPACE}%"


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


def _environment() -> Environment:
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


def _guess(scores: Scores) -> tuple[str, float]:
    """The best that can be had without looking at an image."""
    counts = [one.count for one in scores.per_class]
    if min(counts) == max(counts):
        return "guessing", 1 / len(counts)
    commonest = scores.per_class[int(np.argmax(counts))]
    return f"always answering “{_short(commonest.name)}”", commonest.count / scores.n


def _compared(scores: Scores, level: float) -> str:
    low, high = scores.top1_interval
    if high < level:
        return ": this model is worse"
    if low <= level:
        return ": the difference is within the uncertainty of this measurement"
    fewer = (scores.top1 - level) / (1 - level)
    return f": this model makes {100 * fewer:.0f}{THIN_SPACE}% fewer mistakes" if fewer < 1 else ""


def _worst_first(one: ClassScore) -> tuple[bool, float, str]:
    return one.recall is None, one.recall or 0.0, one.name


def _short(name: str, longest: int = 40) -> str:
    return name if len(name) <= longest else name[: longest - 1].rstrip() + "…"
