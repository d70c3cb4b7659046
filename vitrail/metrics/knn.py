"""Weighted k-nearest-neighbour classification of frozen features (Wu et al. 2018, DINO)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.errors import UserError

NEIGHBOURS = 20
TEMPERATURE = 0.07
VALUES = 16_000_000  # similarities in memory at once


def knn_predict(
    known: Tensor,
    labels: Tensor,
    features: Tensor,
    num_classes: int,
    neighbours: Sequence[int] = (NEIGHBOURS,),
    temperature: float = TEMPERATURE,
) -> Tensor:
    """Predict the classes of (M, D) features from (N, D) `known` features, int64 (len(neighbours), M).

    Neighbours are the features of the highest cosine similarity. They vote with exp(similarity / temperature).
    """
    if not len(known):
        raise UserError("k-NN needs at least one training image")
    if min(neighbours) < 1:
        raise UserError(f"the number of neighbours must be at least 1, not {min(neighbours)}")
    if not 0 < temperature < math.inf:
        raise UserError(f"the temperature of the votes must be above 0 and finite, not {temperature:g}")
    known, k = F.normalize(known.float(), dim=1), min(max(neighbours), len(known))
    predicted = torch.empty(len(neighbours), len(features), dtype=torch.int64)
    rows = max(1, VALUES // len(known))
    for start in range(0, len(features), rows):
        queries = F.normalize(features[start : start + rows].float(), dim=1)
        nearest = (queries @ known.T).topk(k, dim=1)  # (rows, k)
        # Subtracting the largest similarity avoids overflow.
        votes, classes = ((nearest.values - nearest.values[:, :1]) / temperature).exp(), labels[nearest.indices]
        for index, count in enumerate(neighbours):
            sums = votes.new_zeros(len(queries), num_classes).scatter_add_(1, classes[:, :count], votes[:, :count])
            predicted[index, start : start + rows] = sums.argmax(dim=1)
    return predicted
