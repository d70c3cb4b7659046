"""Example images of a report, some with a map of the evidence for the predicted class.

In: a network, its outputs on a split, and examples (`tasks.result.Example`). Out: `ReportImage`s.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from vitrail.config import DataConfig, Preprocess
from vitrail.data.dataset import Samples
from vitrail.data.decode import BadImage
from vitrail.data.loader.memory import make_reader
from vitrail.data.transforms import eval_transform, normalise
from vitrail.inference.device import deterministic, device_of
from vitrail.inference.runner import Outputs
from vitrail.interpret.votes import class_map
from vitrail.models.vit import VisionTransformer
from vitrail.report.explain_plots import overlay_heatmap
from vitrail.report.page import ReportImage
from vitrail.tasks.result import Example

BATCH = 4  # images per backward pass: the attention matrices of each stay in memory


class ReportImages:
    """Makes the images of a report. Images that can no longer be read are skipped."""

    def __init__(self, net: nn.Module, out: Outputs, samples: Samples, spec: Preprocess, data: DataConfig) -> None:
        self.net, self.samples, self.spec, self.sample = net, samples, spec, out.sample
        self.reader = make_reader(samples, spec, data)

    def most(self, plain: int) -> int:
        """How many images to explain instead of showing `plain` ones: a map costs two to three predictions."""
        return plain // 2 if isinstance(self.net, VisionTransformer) else plain

    def plain(self, examples: Sequence[Example]) -> list[ReportImage]:
        """The images without maps."""
        return [image for _, image in self._read(examples)]

    def explained(self, examples: Sequence[Example]) -> list[ReportImage]:
        """The images with maps of the evidence for the prediction; for a ResNet without maps.

        A map takes at most one forward and one backward pass."""
        if not isinstance(self.net, VisionTransformer):
            return self.plain(examples)
        images = list(self._read(examples))
        explained = []
        for first in range(0, len(images), BATCH):
            explained += self._with_maps(self.net, images[first : first + BATCH])
        return explained

    def _read(self, examples: Sequence[Example]) -> Iterator[tuple[Example, ReportImage]]:
        for example in examples:
            index = int(self.sample[example.row])
            try:
                image = self.reader.image(index)
            except BadImage:  # removed since it was measured
                continue
            (predicted, probability), (truth, of_truth) = example.predicted, example.truth
            yield (
                example,
                ReportImage(image, self.samples.name(index), truth, predicted, probability, of_truth),
            )

    def _with_maps(self, net: VisionTransformer, images: Sequence[tuple[Example, ReportImage]]) -> list[ReportImage]:
        seen = torch.stack([eval_transform(image.image, self.spec) for _, image in images])
        why = [example.map_class for example, _ in images]
        against = [example.contrast_class for example, _ in images if example.contrast_class is not None]
        device = device_of(net)
        with deterministic(device):
            maps = np.nan_to_num(class_map(net, normalise(seen.to(device), self.spec), why, against or None))
        views = seen.permute(0, 2, 3, 1).numpy()
        return [
            replace(image, map=overlay_heatmap(view, map_), why=self._caption(example))
            for (example, image), view, map_ in zip(images, views, maps, strict=True)
        ]

    def _caption(self, example: Example) -> str:
        classes = self.samples.classes
        return classes[example.map_class] + (
            "" if example.contrast_class is None else f" rather than {classes[example.contrast_class]}"
        )
