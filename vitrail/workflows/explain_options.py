"""The options of `vitrail explain`: blocks, heads and classes to show, the output folder, and the command to repeat.

In: the options as typed. Out: `ExplainOptions` with numbers, checked against the network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vitrail.errors import UserError, did_you_mean
from vitrail.inference.classifier import Classifier
from vitrail.interpret.attention import require_vit
from vitrail.weights.names import HUB_PREFIX
from vitrail.workflows.explain_inputs import weights_name
from vitrail.workflows.show import data_name

MOST_HEADS = 12  # shown without --heads
SHOWN, MEASURED = 6, 64  # defaults: images with maps, and images that the faithfulness of maps is measured on
DEFAULTS = {"--shown": SHOWN, "--measured": MEASURED}


@dataclass(frozen=True)
class ExplainOptions:
    """What to show for each image: indices of blocks, heads and classes."""

    layers: Sequence[int]
    heads: Sequence[int]
    why: int | None  # none: the predicted class
    rather_than: int | None  # none: the likeliest other one


def resolve_explain_options(
    classifier: Classifier,
    layers: Sequence[int] | None,
    heads: Sequence[int] | None,
    why: str | None,
    rather_than: str | None,
) -> ExplainOptions:
    config = require_vit(classifier.net).config
    count = config.blocks
    blocks = list(layers) if layers else list(dict.fromkeys([0, count // 2, count - 1]))
    for numbers, most, what in ((blocks, count, "block"), (heads or (), config.heads, "head")):
        wrong = [number for number in numbers if not -most <= number < most]
        if wrong:
            raise UserError(f"there is no {what} {wrong[0]}: the network has {what}s 0 to {most - 1}")
    chosen = [head % config.heads for head in heads] if heads else list(range(min(config.heads, MOST_HEADS)))
    first, second = (class_index(classifier, name) if name is not None else None for name in (why, rather_than))
    if first is not None and first == second:
        raise UserError(f"--why and --rather-than are both '{why}': name two different classes")
    return ExplainOptions([layer % count for layer in blocks], chosen, first, second)


def class_index(classifier: Classifier, name: str) -> int:
    """The index of a class by its name; for weights without class names, also by its number."""
    classes = classifier.classes
    if not classifier.card.classes and f"class {name}" in classes:
        name = f"class {name}"
    if name in classes:
        return classes.index(name)
    if not classes:
        raise UserError("these weights have no classifier, so --why and --rather-than have no effect: leave them out")
    if classifier.card.classes:
        raise UserError(f"these weights have no class '{name}'{did_you_mean(name, classes) or _some(classes)}")
    raise UserError(f"these weights have no class names and no class '{name}': use 0 to {len(classes) - 1}")


def _some(classes: Sequence[str]) -> str:
    """Some class names, as an example."""
    return f"; classes are {', '.join(classes[:5])}{', …' if len(classes) > 5 else ''}"


def default_explain_folder(weights: str | Path, images: Sequence[str | Path]) -> Path:
    """The output folder without --out, named after the weights and the images, so that others get another folder."""
    path = Path(str(weights).removeprefix(HUB_PREFIX).partition("@")[0])
    folder = (path.parent if path.name == "model.safetensors" else path).parent.name
    name = "-".join(part for part in (folder, weights_name(weights)) if part not in ("", "..", "runs"))
    data = data_name(str(Path(images[0]).absolute())) if images else ""
    more = f"-and-{len(images) - 1}-more" if len(images) > 1 else ""
    return Path("explained") / (f"{name}-on-{data}{more}" if data else name)


def explain_command(weights: str | Path, images: Sequence[str | Path], options: Mapping[str, object]) -> list[str]:
    """The command that repeats the explanation, without options that have their default value."""
    changed = {name: value for name, value in options.items() if value is not None and value != DEFAULTS.get(name)}
    options_again = [word for name, value in changed.items() for word in (name, _typed(name, value))]
    return ["vitrail", "explain", str(weights), *map(str, images), *options_again]


def _typed(name: str, value: object) -> str:
    if isinstance(value, tuple | list):
        return ("x" if name == "--image-size" else ",").join(map(str, value))
    return str(value)
