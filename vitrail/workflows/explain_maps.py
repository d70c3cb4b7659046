"""Explanation maps over single images: the evidence for one class rather than another, and the attention of heads.

In: `InputImages` and `ExplainOptions`. Out: one `ExplainedImage` for the page, for each image.
"""

from __future__ import annotations

import torch
from rich.progress import Progress
from torch import Tensor

from vitrail.inference.classifier import Classifier
from vitrail.interpret.attention import attention_maps
from vitrail.interpret.rollout import rollout
from vitrail.interpret.votes import class_map
from vitrail.models.vit import VisionTransformer
from vitrail.report.canvas import short_name
from vitrail.report.explain_page import ExplainedImage, PageFigure
from vitrail.report.explain_plots import MapPanel, draw_heads, draw_maps
from vitrail.tasks.result import percent
from vitrail.workflows.explain_inputs import InputImages, evenly, normalised_batches
from vitrail.workflows.explain_options import ExplainOptions


def explain_images(
    classifier: Classifier,
    net: VisionTransformer,
    images: InputImages,
    shown: int,
    options: ExplainOptions,
    bar: Progress,
) -> list[ExplainedImage]:
    """Draw the maps of `shown` of the images, evenly chosen, with the prediction for each."""
    indices = evenly(len(images.pixels), shown) if shown else []
    explained = []
    for number, index in enumerate(bar.track(indices, description="maps")):
        pixels = next(normalised_batches(classifier, images.pixels[index : index + 1]))
        prediction, panels = _panels(classifier, net, pixels, options)
        heads = attention_maps(net, pixels, options.layers)[0][:, options.heads]
        name, file = images.names[index], f"image-{number:02d}"
        maps = draw_maps(images.picture(index), panels, name)
        heads_plot = draw_heads(images.picture(index), heads, options.layers, options.heads, name)
        explained.append(
            ExplainedImage(name, prediction, PageFigure(f"{file}-maps", maps), PageFigure(f"{file}-heads", heads_plot))
        )
    return explained


def _panels(
    classifier: Classifier, net: VisionTransformer, pixels: Tensor, options: ExplainOptions
) -> tuple[str, list[MapPanel]]:
    """The prediction for one image, and the maps that explain it."""
    classes = classifier.classes
    overview = MapPanel("rollout\nno class", rollout(net, pixels)[0])
    if not classes:
        return "features", [MapPanel("input", None), overview]
    with torch.no_grad():
        logits = net(pixels).float().cpu()
    order = logits[0].argsort(descending=True, stable=True).tolist()
    why = options.why if options.why is not None else next(k for k in order if k != options.rather_than)
    rather = [options.rather_than] if options.rather_than is not None else [k for k in order if k != why][:1]
    prediction = f"{short_name(classes[order[0]], 18)} {percent(float(classifier.probabilities(logits)[0, order[0]]))}"
    panels = [MapPanel(f"input\n{prediction}", None), overview]
    for first, second in [([why], rather), (rather, [why])] if rather else [([why], [])]:
        than = f"\nrather than {short_name(classes[second[0]], 18)}" if second else ""
        panels.append(
            MapPanel(f"why {short_name(classes[first[0]], 18)}{than}", class_map(net, pixels, first, second or None)[0])
        )
    return prediction, panels
