"""How faithful each kind of explanation map is to a network: deletion, insertion and pointing, on the user's images.

In: a `Classifier` and `InputImages`. Out: a `FaithfulnessResult` for the page.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from rich.progress import Progress
from torch import Tensor

from vitrail.inference.classifier import Classifier
from vitrail.interpret.attention import require_vit
from vitrail.interpret.faithfulness import STEPS, FaithfulnessCurves, deletion_insertion, random_maps
from vitrail.interpret.pointing_game import PastedImages, hit_rate, paste_images, pointing_game
from vitrail.report.canvas import Plot
from vitrail.report.explain_plots import draw_faithfulness_curves, draw_pasted
from vitrail.report.explain_summary import MIN_IMAGES, MapScore, Pointing, map_verdicts, score_maps
from vitrail.tasks.result import percent
from vitrail.workflows.explain_inputs import (
    BATCH,
    InputImages,
    class_logits,
    evenly,
    explanation_maps,
    normalised_batches,
)

PASTED_SHOWN = 5  # examples in the figure


@dataclass(frozen=True, eq=False)
class FaithfulnessResult:
    """The scores of each kind of map, with sentences and figures for the page."""

    rows: list[MapScore]
    images: int
    sentences: list[str]
    curves: Plot
    pasted_examples: Plot | None
    pasted_sentence: str
    pasted: PastedImages
    notes: list[str]


def measure_faithfulness(classifier: Classifier, seen: InputImages, measured: int, bar: Progress) -> FaithfulnessResult:
    """Score the maps of at most `measured` images and as many pasted ones, for the predicted classes."""
    chosen = evenly(len(seen.pixels), measured)
    pixels = seen.pixels[chosen]
    classes = class_logits(classifier, pixels).argmax(1)
    task = bar.add_task("maps to score", total=len(pixels))
    maps = explanation_maps(
        classifier, normalised_batches(classifier, pixels), classes, progress=lambda n: bar.advance(task, n)
    )
    maps["random"] = random_maps(maps["rollout"])
    curves = _curves(classifier, pixels, maps, classes, bar)
    pasted, points, examples = _pasted(classifier, pixels, measured, bar)
    rows = score_maps(curves, points)
    counts = (
        f"The network predicts the class of the pasted image in {pasted.changed:,} of {pasted.tried:,} tries. In "
        f"{pasted.hidden:,} of these, a grey box in its place gives the same prediction"
    )
    notes = []
    if not pasted.tried:
        notes.append("Pointing could not be measured: the network predicts one class for all these images.")
    elif not points:
        notes.append(
            f"Pointing could not be measured: it needs at least {MIN_IMAGES} images, and {len(pasted.pixels)} remain. "
            f"{counts}; these are not used, and every quarter of the image must have the same number of images."
        )
    sentence = (
        f"An image is shrunk and pasted into a quarter of an image of another class. {counts}, because of what it "
        f"covers; these are not used. Of the others, {len(pasted.pixels):,} are used, the same number per quarter. "
        f"Their prediction depends on pixels inside the pasted box, though other pixels may contribute. A map that "
        f"highlights the same patch in every image points to the box in {percent(pasted.chance)} of the images."
    )
    return FaithfulnessResult(
        rows, len(pixels), map_verdicts(rows), draw_faithfulness_curves(curves), examples, sentence, pasted, notes
    )


def _curves(
    classifier: Classifier, pixels: Tensor, maps: dict[str, np.ndarray], classes: np.ndarray, bar: Progress
) -> dict[str, FaithfulnessCurves]:
    net = require_vit(classifier.net)
    task = bar.add_task("deletion and insertion", total=len(pixels) * 2 * STEPS * len(maps))
    parts: dict[str, list[FaithfulnessCurves]] = {name: [] for name in maps}
    for start, batch in zip(range(0, len(pixels), BATCH), normalised_batches(classifier, pixels), strict=True):
        rows = slice(start, start + len(batch))
        for name, values in maps.items():
            parts[name].append(
                deletion_insertion(
                    net,
                    batch,
                    values[rows],
                    classes[rows].tolist(),
                    to_probabilities=classifier.probabilities,
                    progress=lambda n: bar.advance(task, n),
                )
            )
    return {name: _concat_curves(batches) for name, batches in parts.items()}


def _concat_curves(parts: list[FaithfulnessCurves]) -> FaithfulnessCurves:
    """Concatenate the curves of several batches."""
    deletion, insertion = (
        np.concatenate([getattr(part, kind) for part in parts]) for kind in ("deletion", "insertion")
    )
    return FaithfulnessCurves(parts[0].fractions, deletion, insertion)


def _pasted(
    classifier: Classifier, pixels: Tensor, wanted: int, bar: Progress
) -> tuple[PastedImages, dict[str, Pointing], Plot | None]:
    net = require_vit(classifier.net)
    whole = torch.cat(list(normalised_batches(classifier, pixels)))
    pasted = paste_images(net, whole, wanted)
    if len(pasted.pixels) < MIN_IMAGES:
        return pasted, {}, None
    task = bar.add_task("pasted images", total=len(pasted.pixels))
    maps = explanation_maps(
        classifier,
        pasted.pixels.split(BATCH),
        pasted.classes,
        pasted.backgrounds,
        progress=lambda n: bar.advance(task, n),
    )
    points = {}
    for name, values in maps.items():
        hits, share = pointing_game(values, pasted.inside)
        points[name] = Pointing(*hit_rate(hits), float(share.mean()), pasted.chance)
    spec = classifier.preprocess
    mean, std = (np.array(values)[:, None, None] for values in (spec.mean, spec.std))
    shown = pasted.pixels[:PASTED_SHOWN].cpu().numpy() * std + mean
    images = (255 * shown.clip(0, 1)).round().astype(np.uint8).transpose(0, 2, 3, 1)
    names = [
        (classifier.classes[a], classifier.classes[b]) for a, b in zip(pasted.classes, pasted.backgrounds, strict=True)
    ]
    kind = next(iter(maps))
    examples = draw_pasted(images, pasted.inside, maps[kind], names, kind)
    return pasted, points, examples
