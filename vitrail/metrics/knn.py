"""Weighted k-nearest neighbours on frozen features, as Wu et al. (2018) and DINO measure them: nothing is trained."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.errors import UserError

NEIGHBOURS = 20
TEMPERATURE = 0.07
VALUES = 16_000_000  # similarities held at a time


def knn_predict(
    known: Tensor,
    labels: Tensor,
    features: Tensor,
    num_classes: int,
    neighbours: Sequence[int] = (NEIGHBOURS,),
    temperature: float = TEMPERATURE,
) -> Tensor:
    """The class of each of (M, D) features by the (N, D) `known` ones, int64 (len(neighbours), M).

    Neighbours are those of the highest cosine similarity, and vote with exp(similarity / temperature).
    """
    if not len(known):
        raise UserError("nearest neighbours need at least one image to compare with")
    if min(neighbours) < 1 or not 0 < temperature < math.inf:
        raise UserError("the number of neighbours is at least 1, and their temperature above 0")
    known, most = F.normalize(known.float(), dim=1), min(max(neighbours), len(known))
    found = torch.empty(len(neighbours), len(features), dtype=torch.int64)
    rows = max(1, VALUES // len(known))
    for start in range(0, len(features), rows):
        part = F.normalize(features[start : start + rows].float(), dim=1)
        near = (part @ known.T).topk(most, dim=1)  # (rows, most)
        # Relative to the nearest one, whose vote is then 1 at any temperature.
        votes, classes = ((near.values - near.values[:, :1]) / temperature).exp(), labels[near.indices]
        for place, count in enumerate(neighbours):
            sums = votes.new_zeros(len(part), num_classes).scatter_add_(1, classes[:, :count], votes[:, :count])
            found[place, start : start + rows] = sums.argmax(dim=1)
    return found
