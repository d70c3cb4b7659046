"""`vitrail paper`: draw figures of the paper for any weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from vitrail.config import Size
from vitrail.errors import UserError, os_errors_as, user_path
from vitrail.inference.classifier import Classifier, load
from vitrail.interpret.attention import map_query, require_vit
from vitrail.interpret.distance import AttentionDistances
from vitrail.interpret.filters import embedding_filters
from vitrail.interpret.position_similarity import position_similarity
from vitrail.interpret.rollout import rollout
from vitrail.report.canvas import Plot
from vitrail.report.explain_plots import draw_figure_6, draw_figure_7, draw_side_by_side
from vitrail.terminal import escape, make_console
from vitrail.workflows.explain_inputs import (
    MOST_IMAGES,
    InputImages,
    make_writable_folder,
    measure_attention_distance,
    normalised_batches,
    read_input_images,
    weights_name,
)

FIGURE_6_IMAGES = 4
NEED_IMAGES = ("figure-6", "figure-7", "figure-11")
ONE_NETWORK = ("figure-6", "figure-7")


def paper(
    name: str,
    weights: Sequence[str | Path],
    images: Sequence[str | Path] = (),
    *,
    out: str | Path | None = None,
    image_size: Size | None = None,
    device: str = "auto",
    console: Console | None = None,
) -> Path:
    """Draw one figure into a file and return the path."""
    console = console or make_console()
    path = user_path(out) if out is not None else Path(f"{name}.svg")
    if path.suffix not in (".svg", ".png"):
        raise UserError(f"--out must be an .svg or .png file, not '{path.name}'")
    if not weights or (name in ONE_NETWORK and len(weights) > 1):
        needed = "the weights of one network" if name in ONE_NETWORK else "weights"
        raise UserError(f"{name} needs {needed}")
    if name in NEED_IMAGES and not images:
        raise UserError(f"{name} needs images: add --images photos/")
    networks = [(weights_name(spec), load(spec, image_size=image_size, device=device)) for spec in weights]
    make_writable_folder(path.parent)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        drawing = _drawing(name, networks, images, bar, console)
    with os_errors_as(f"cannot write {path}"):
        drawing.save(path)
    console.print(f"{name}: [bold]{escape(str(path))}[/]")
    return path


def _drawing(
    name: str, networks: Sequence[tuple[str, Classifier]], images: Sequence[str | Path], bar: Progress, console: Console
) -> Plot:
    first = networks[0][1]
    match name:
        case "figure-6":
            seen = _read_images(first, images, FIGURE_6_IMAGES, console)
            net = require_vit(first.net)
            maps = [map_ for pixels in normalised_batches(first, seen.pixels) for map_ in rollout(net, pixels)]
            console.print(f"attention rollout, computed for {map_query(net.config)}")
            return draw_figure_6([seen.picture(index) for index in range(len(maps))], maps, seen.names)
        case "figure-7":
            net = require_vit(first.net)
            try:
                similarity = position_similarity(net)
            except UserError as error:
                similarity = None
                console.print(f"[dim]{escape(str(error))}[/]")
            return draw_figure_7(embedding_filters(net), similarity, _distances(first, images, bar, console))
        case "figure-10":
            tiles = [(label, position_similarity(require_vit(classifier.net))) for label, classifier in networks]
            return draw_side_by_side("Figure 10", tiles)
        case _:
            measured = [(label, _distances(classifier, images, bar, console)) for label, classifier in networks]
            return draw_side_by_side("Figure 11", measured)


def _distances(
    classifier: Classifier, images: Sequence[str | Path], bar: Progress, console: Console
) -> AttentionDistances:
    require_vit(classifier.net)  # so that a ResNet fails before images are read
    return measure_attention_distance(classifier, _read_images(classifier, images, MOST_IMAGES, console), bar)


def _read_images(classifier: Classifier, images: Sequence[str | Path], limit: int, console: Console) -> InputImages:
    seen = read_input_images(classifier, images, limit)
    if seen.failed:
        console.print(f"[yellow]{escape(seen.unread)}[/]")
    return seen
