"""Measured images as the pictures of a report, some with a map of what spoke for the answer."""

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

BATCH = 4  # images whose maps are made at a time: matrices of all pairs of tokens are held for each


class ReportImages:
    """Makes pictures; images that can no longer be read are left out."""

    def __init__(self, net: nn.Module, out: Outputs, samples: Samples, spec: Preprocess, data: DataConfig) -> None:
        self.net, self.samples, self.spec, self.sample = net, samples, spec, out.sample
        self.reader = make_reader(samples, spec, data)

    def most(self, plain: int) -> int:
        """How many to explain where `plain` ones would be shown: a map costs as much as two or three predictions."""
        return plain // 2 if isinstance(self.net, VisionTransformer) else plain

    def plain(self, examples: Sequence[Example]) -> list[ReportImage]:
        return [picture for _, picture in self._read(examples)]

    def explained(self, examples: Sequence[Example]) -> list[ReportImage]:
        """With maps of what spoke for the answer, by one forward and one backward pass for an image at most; a ResNet's
        are plain."""
        if not isinstance(self.net, VisionTransformer):
            return self.plain(examples)
        found = list(self._read(examples))
        pictures = []
        for first in range(0, len(found), BATCH):
            pictures += self._with_maps(self.net, found[first : first + BATCH])
        return pictures

    def _read(self, examples: Sequence[Example]) -> Iterator[tuple[Example, ReportImage]]:
        for one in examples:
            index = int(self.sample[one.row])
            try:
                image = self.reader.image(index)
            except BadImage:  # it was readable a moment ago
                continue
            (predicted, probability), (truth, its_own) = one.predicted, one.truth
            yield one, ReportImage(image, self.samples.name(index), truth, predicted, probability, its_own)

    def _with_maps(self, net: VisionTransformer, found: Sequence[tuple[Example, ReportImage]]) -> list[ReportImage]:
        seen = torch.stack([eval_transform(picture.image, self.spec) for _, picture in found])
        why = [one.why for one, _ in found]
        against = [one.rather for one, _ in found if one.rather is not None]
        device = device_of(net)
        with deterministic(device):
            maps = np.nan_to_num(class_map(net, normalise(seen.to(device), self.spec), why, against or None))
        views = seen.permute(0, 2, 3, 1).numpy()
        return [
            replace(picture, map=overlay_heatmap(view, map_), why=self._words(one))
            for (one, picture), view, map_ in zip(found, views, maps, strict=True)
        ]

    def _words(self, one: Example) -> str:
        classes = self.samples.classes
        return classes[one.why] + ("" if one.rather is None else f" rather than {classes[one.rather]}")
