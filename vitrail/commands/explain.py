"""`vitrail explain`: attention and class maps of a Vision Transformer, as a page, figures and numbers."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress

from vitrail.config import ModelConfig, Size
from vitrail.data.sources.images import image_paths
from vitrail.errors import UserError, os_errors_as, user_path
from vitrail.inference.classifier import Classifier, as_classifier
from vitrail.interpret.attention import block_query, map_query, require_vit
from vitrail.interpret.filters import embedding_filters
from vitrail.interpret.position_similarity import position_similarity
from vitrail.interpret.votes import can_vote
from vitrail.models.vit import VisionTransformer
from vitrail.report.explain_page import ExplainFacts, PageFigure, check_figures, write_explanation
from vitrail.report.explain_plots import (
    draw_distances,
    draw_filters,
    draw_similarity,
)
from vitrail.report.explain_summary import MIN_IMAGES, distance_sentences
from vitrail.report.provenance import vit_kind
from vitrail.terminal import escape, make_console
from vitrail.workflows.explain_inputs import (
    MOST_IMAGES,
    InputImages,
    make_writable_folder,
    measure_attention_distance,
    read_input_images,
    weights_name,
)
from vitrail.workflows.explain_maps import explain_images
from vitrail.workflows.explain_options import (
    MEASURED,
    SHOWN,
    default_explain_folder,
    explain_command,
    resolve_explain_options,
)
from vitrail.workflows.faithfulness import measure_faithfulness
from vitrail.workflows.vitrail_files import is_vitrail_file, refuse_foreign_files


def explain(
    weights: str | Path | Classifier,
    images: str | Path | Iterable[str | Path] = (),
    *,
    out: str | Path | None = None,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    why: str | None = None,
    rather_than: str | None = None,
    shown: int = SHOWN,
    measured: int = MEASURED,
    image_size: int | Size | None = None,
    device: str = "auto",
    console: Console | None = None,
) -> dict[str, Any]:
    """Explain the predictions of a Vision Transformer on one page, and measure how faithful the maps are.

    Parameters
    ----------
    weights
        A weights file, a run folder, "bundled", "hf-hub:owner/name", or a Classifier that `vitrail.load` returned.
    images
        Files, folders, archives and tables. Without images, only figures of the weights.
    out
        The folder for explain.html, explain.json and figures/; by default a folder in explained/, named after the
        weights and images.
    layers
        Indices of the blocks whose heads are shown; by default the first, middle and last.
    heads
        Indices of the heads that are shown; by default the first twelve.
    why
        The name of the class to explain; by default the predicted one.
    rather_than
        The name of the class to compare with; by default the most probable other one.
    shown
        Number of images with maps.
    measured
        Number of images on which faithfulness is measured: 0, or at least 10. Each takes 80 to 100 forward passes.
    image_size
        A side in pixels, or (height, width), for weights of other libraries that do not state it.
    device
        "cpu", "cuda", "mps", or "auto" for the best available device.
    console
        Where to print; by default the terminal.

    Returns
    -------
    dict
        The numbers of explain.json: "query", "grid", "findings" and "figures"; with images "attention_distance" and
        "failed", and if faithfulness was measured "trust" and "pasted".

    Examples
    --------
    >>> numbers = vitrail.explain("runs/photos", "photos/", out="explained/photos", measured=16)
    >>> print(*numbers["findings"], sep="\\n")
    """
    console = console or make_console()
    if shown < 0:
        raise UserError(f"--shown must be 0 or more, not {shown}")
    if measured and measured < MIN_IMAGES:
        raise UserError(f"--measured must be 0 or at least {MIN_IMAGES}, not {measured}")
    classifier, images = as_classifier(weights, image_size, device), image_paths(images)
    weights = classifier.spec
    net = require_vit(classifier.net)
    wanted = resolve_explain_options(classifier, layers, heads, why, rather_than)
    options = {
        "--out": out,
        "--layers": wanted.layers if layers else None,  # as numbers from 0
        "--heads": wanted.heads if heads else None,
        "--why": why,
        "--rather-than": rather_than,
        "--shown": shown,
        "--measured": measured,
        "--image-size": image_size,
    }
    command = shlex.join(explain_command(weights, images, options))
    seen = read_input_images(classifier, images, MOST_IMAGES) if images else None
    folder = user_path(out) if out is not None else default_explain_folder(weights, images)
    page, numbers_file = folder / "explain.html", folder / "explain.json"
    refuse_foreign_files(
        [(page, ""), *([] if is_vitrail_file(page) else [(numbers_file, "")])], "move it, or choose another --out"
    )
    check_figures(folder)
    make_writable_folder(folder)
    facts = _weights_facts(classifier, net, weights_name(weights), command)
    numbers: dict[str, Any] = {"query": facts.query, "grid": net.config.grid, "findings": []}
    if seen is None:
        note = "Only figures of the weights. For maps, add images: vitrail explain WEIGHTS IMAGES..."
        facts = replace(facts, notes=[*facts.notes, note])
    else:
        with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
            facts = _add_measurements(facts, numbers, classifier, seen, measured, bar)
            facts = replace(facts, images=explain_images(classifier, net, seen, shown, wanted, bar))
    numbers |= {"findings": list(facts.findings), "figures": facts.files}
    with os_errors_as(f"cannot write to {folder}"):
        write_explanation(folder, facts, numbers)
    for sentence in facts.findings:
        console.print(escape(sentence))
    for note in facts.notes:
        console.print(f"[dim]{escape(note)}[/]")
    console.print(f"page: [bold]{escape(str(folder / 'explain.html'))}[/]")
    return numbers


def _weights_facts(classifier: Classifier, net: VisionTransformer, title: str, command: str) -> ExplainFacts:
    """Return the contents of the page that need no images."""
    config = net.config
    notes = []
    similarity = None
    try:
        similarity = PageFigure("positions", draw_similarity(position_similarity(net)))
    except UserError as error:
        notes.append(f"No plot of position embeddings: {error}.")
    if config.positions_at == "layers":
        notes.append("Every block has its own position embeddings; those of the first block are shown.")
    source = [("starting weights", classifier.card.source)] if classifier.card.source else []
    view = f"maps of the whole network are computed for {map_query(config)}"
    return ExplainFacts(
        title=title,
        subtitle=_subtitle(config),
        query=map_query(config),
        block_query=block_query(config),
        uses_votes=can_vote(net),
        findings=[],
        notes=notes,
        filters=PageFigure("filters", draw_filters(embedding_filters(net))),
        similarity=similarity,
        about=[("network", _subtitle(config)), ("query", view), *source],
        commands=[command],
    )


def _add_measurements(
    facts: ExplainFacts,
    numbers: dict[str, Any],
    classifier: Classifier,
    seen: InputImages,
    measured: int,
    bar: Progress,
) -> ExplainFacts:
    """Return the page with everything measured on images, which is also added to `numbers`."""
    classes, notes, findings = classifier.card.model.num_classes, [*facts.notes], list[str]()
    if not classes:
        notes.append("These weights have no classifier: no class maps, and no measure of faithfulness.")
    elif len(seen.pixels) < MIN_IMAGES:
        notes.append(
            f"Faithfulness was not measured: {len(seen.pixels)} of the images could be used, and it needs "
            f"{MIN_IMAGES}, or better 50."
        )
    if seen.failed:
        notes.append(seen.unread)
    distances = measure_attention_distance(classifier, seen, bar)
    shown = {key: np.round(getattr(distances, key), 4).tolist() for key in ("pixels", "renormalised", "elsewhere")}
    numbers["attention_distance"] = shown | {"uniform": distances.uniform, "images": distances.images}
    if min(measured, len(seen.pixels)) >= MIN_IMAGES and classes > 1:
        faithfulness = measure_faithfulness(classifier, seen, measured, bar)
        notes += faithfulness.notes
        findings += faithfulness.sentences
        numbers["trust"] = {row.name: row.to_dict() for row in faithfulness.rows} | {"images": faithfulness.images}
        pasted = faithfulness.pasted
        counts = {"tried": pasted.tried, "changed": pasted.changed, "grey_too": pasted.hidden}
        numbers["pasted"] = {"images": len(pasted.pixels), "chance": pasted.chance} | counts
        facts = replace(
            facts,
            curves=PageFigure("faithfulness", faithfulness.curves),
            pasted=PageFigure("pasted", faithfulness.pasted_examples) if faithfulness.pasted_examples else None,
            map_scores=faithfulness.rows,
            measured=faithfulness.images,
            pasted_sentence=faithfulness.pasted_sentence,
        )
    numbers["failed"] = [{"file": name, "error": reason} for name, reason in seen.failed]
    used = f"{len(seen.names):,}" if len(seen.names) == seen.of else f"{len(seen.names):,} of {seen.of:,}"
    return replace(
        facts,
        distances=PageFigure("distance", draw_distances(distances)),
        distance_images=distances.images,
        findings=[*findings, *distance_sentences(distances)],
        notes=notes,
        about=[*facts.about[:2], ("images", f"{used}, evenly spaced"), *facts.about[2:]],
    )


def _subtitle(config: ModelConfig) -> str:
    size, cell = ("x".join(map(str, pair)) for pair in (config.image_size, config.cell))
    prefix = [
        *(["class token"] if config.class_token else []),
        *([f"{config.registers} registers"] * bool(config.registers)),
    ]
    extra = f", {' and '.join(prefix)}" if prefix else ""
    rows, columns = config.grid
    return (
        f"{vit_kind(config)}, depth {config.blocks}, {config.heads} heads, images of {size} px, {rows}x{columns} "
        f"patches of {cell} px{extra}, output from {map_query(config)}"
    )
