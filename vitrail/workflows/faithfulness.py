"""Which maps deserve trust for a network: deletion, insertion and pointing measured on the user's images."""

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

PASTED_SHOWN = 5


@dataclass(frozen=True, eq=False)
class FaithfulnessResult:
    rows: list[MapScore]
    images: int
    sentences: list[str]
    curves: Plot
    pasted: Plot | None
    pasted_sentence: str
    found: PastedImages
    notes: list[str]


def measure_faithfulness(classifier: Classifier, seen: InputImages, measured: int, bar: Progress) -> FaithfulnessResult:
    """Judge the maps of at most `measured` images and as many pasted ones, for the classes the network predicts."""
    chosen = evenly(len(seen.pixels), measured)
    pixels = seen.pixels[chosen]
    classes = class_logits(classifier, pixels).argmax(1)
    task = bar.add_task("maps to judge", total=len(pixels))
    maps = explanation_maps(
        classifier, normalised_batches(classifier, pixels), classes, progress=lambda n: bar.advance(task, n)
    )
    maps["random"] = random_maps(maps["rollout"])
    curves = _curves(classifier, pixels, maps, classes, bar)
    found, points, examples = _pasted(classifier, pixels, measured, bar)
    rows = score_maps(curves, points)
    counts = (
        f"in {found.changed:,} of {found.tried:,} tries the network then gives the pasted picture’s class, in "
        f"{found.hidden:,} of these a grey box gives it too"
    )
    notes = []
    if not found.tried:
        notes.append("Pointing could not be measured: the network gives all these images one class.")
    elif not points:
        rest = f"of the others {len(found.pixels)} are spread evenly over the quarters, {MIN_IMAGES} are needed"
        notes.append(f"Pointing could not be measured: {counts}, and {rest}.")
    sentence = (
        f"A picture is shrunk and pasted into a quarter of an image of another class: {counts}, because of what it "
        f"hides. Kept are {len(found.pixels):,} of the others, equally many for each quarter: there the answer needs "
        f"something inside the box, though the rest of the image may have its part in it. A map that lights the same "
        f"patch in every image finds {percent(found.chance)}, whichever patch that is."
    )
    return FaithfulnessResult(
        rows, len(pixels), map_verdicts(rows), draw_faithfulness_curves(curves), examples, sentence, found, notes
    )


def _curves(
    classifier: Classifier, pixels: Tensor, maps: dict[str, np.ndarray], classes: np.ndarray, bar: Progress
) -> dict[str, FaithfulnessCurves]:
    net = require_vit(classifier.net)
    task = bar.add_task("deletion and insertion", total=len(pixels) * 2 * STEPS * len(maps))
    parts: dict[str, list[FaithfulnessCurves]] = {name: [] for name in maps}
    for start, batch in zip(range(0, len(pixels), BATCH), normalised_batches(classifier, pixels), strict=True):
        rows = slice(start, start + len(batch))
        for name, one in maps.items():
            parts[name].append(
                deletion_insertion(
                    net,
                    batch,
                    one[rows],
                    classes[rows].tolist(),
                    to_probabilities=classifier.probabilities,
                    progress=lambda n: bar.advance(task, n),
                )
            )
    return {name: _concat_curves(found) for name, found in parts.items()}


def _concat_curves(parts: list[FaithfulnessCurves]) -> FaithfulnessCurves:
    """The curves of all images."""
    deletion, insertion = (np.concatenate([getattr(one, kind) for one in parts]) for kind in ("deletion", "insertion"))
    return FaithfulnessCurves(parts[0].shares, deletion, insertion)


def _pasted(
    classifier: Classifier, pixels: Tensor, wanted: int, bar: Progress
) -> tuple[PastedImages, dict[str, Pointing], Plot | None]:
    net = require_vit(classifier.net)
    whole = torch.cat(list(normalised_batches(classifier, pixels)))
    found = paste_images(net, whole, wanted)
    if len(found.pixels) < MIN_IMAGES:
        return found, {}, None
    task = bar.add_task("pasted pictures", total=len(found.pixels))
    maps = explanation_maps(
        classifier,
        found.pixels.split(BATCH),
        found.classes,
        found.backgrounds,
        progress=lambda n: bar.advance(task, n),
    )
    points = {}
    for name, one in maps.items():
        hits, share = pointing_game(one, found.inside)
        points[name] = Pointing(*hit_rate(hits), float(share.mean()), found.chance)
    spec = classifier.preprocess
    mean, std = (np.array(values)[:, None, None] for values in (spec.mean, spec.std))
    shown = found.pixels[:PASTED_SHOWN].cpu().numpy() * std + mean
    images = (255 * shown.clip(0, 1)).round().astype(np.uint8).transpose(0, 2, 3, 1)
    names = [
        (classifier.classes[a], classifier.classes[b]) for a, b in zip(found.classes, found.backgrounds, strict=True)
    ]
    kind = next(iter(maps))
    examples = draw_pasted(images, found.inside, maps[kind], names, kind)
    return found, points, examples
