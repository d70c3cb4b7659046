"""Measured images as the pictures of a report, some with a map of what spoke for the answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from vitrail.config import DataConfig, Preprocess
from vitrail.data.dataset import Samples
from vitrail.data.decode import BadImage
from vitrail.data.transforms import normalise, prepare
from vitrail.inference.device import repeatable
from vitrail.inference.forward import Outputs, device_of
from vitrail.interpret.votes import reasons
from vitrail.models.vit import VisionTransformer
from vitrail.report.explain_plots import glow
from vitrail.report.page import Picture
from vitrail.workflows.outputs import reader_of

BATCH = 4  # images whose maps are made at a time: matrices of all pairs of tokens are held for each


@dataclass(frozen=True)
class Asked:
    """A picture to make of a row of the outputs."""

    row: int
    said: tuple[str, float]  # with its probability
    truth: tuple[str, float]
    why: int  # the class whose map is wanted
    rather: int | None = None  # and the one it is set against


class Pictures:
    """Makes pictures; images that can no longer be read are left out."""

    def __init__(self, net: nn.Module, out: Outputs, samples: Samples, spec: Preprocess, data: DataConfig) -> None:
        self.net, self.samples, self.spec, self.sample = net, samples, spec, out.sample
        self.reader = reader_of(samples, spec, data)

    def most(self, plain: int) -> int:
        """How many to explain where `plain` ones would be shown: a map costs as much as two or three answers."""
        return plain // 2 if isinstance(self.net, VisionTransformer) else plain

    def plain(self, asked: Sequence[Asked]) -> list[Picture]:
        return [picture for _, picture in self._read(asked)]

    def explained(self, asked: Sequence[Asked]) -> list[Picture]:
        """With maps of what spoke for the answer, by one forward and one backward pass for an image at most; a ResNet's
        are plain."""
        if not isinstance(self.net, VisionTransformer):
            return self.plain(asked)
        found = list(self._read(asked))
        pictures = []
        for first in range(0, len(found), BATCH):
            pictures += self._with_maps(self.net, found[first : first + BATCH])
        return pictures

    def _read(self, asked: Sequence[Asked]) -> Iterator[tuple[Asked, Picture]]:
        for one in asked:
            index = int(self.sample[one.row])
            try:
                image = self.reader.image(index)
            except BadImage:  # it was readable a moment ago
                continue
            yield one, Picture(image, self.samples.name(index), one.truth[0], one.said[0], one.said[1], one.truth[1])

    def _with_maps(self, net: VisionTransformer, found: Sequence[tuple[Asked, Picture]]) -> list[Picture]:
        seen = torch.stack([prepare(picture.image, self.spec) for _, picture in found])
        why = [one.why for one, _ in found]
        against = [one.rather for one, _ in found if one.rather is not None]
        device = device_of(net)
        with repeatable(device):
            maps = np.nan_to_num(reasons(net, normalise(seen.to(device), self.spec), why, against or None))
        views = seen.permute(0, 2, 3, 1).numpy()
        return [
            replace(picture, map=glow(view, map_), why=self._words(one))
            for (one, picture), view, map_ in zip(found, views, maps, strict=True)
        ]

    def _words(self, one: Asked) -> str:
        classes = self.samples.classes
        return classes[one.why] + ("" if one.rather is None else f" rather than {classes[one.rather]}")


def asked_of(row: int, said: int, truth: int, chances: np.ndarray, classes: Sequence[str]) -> Asked:
    """An image with one label: why what was said rather than the truth, or than the runner-up where they are one."""
    others = [int(k) for k in np.argsort(-chances, kind="stable")[:2] if k != said]
    rather = truth if truth != said else others[0] if others else None
    return Asked(row, (classes[said], float(chances[said])), (classes[truth], float(chances[truth])), said, rather)
