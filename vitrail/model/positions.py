"""Position embeddings: added to the tokens, so that attention can tell patches apart (Eq. 1)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import ModelConfig, Size
from vitrail.model.tokens import normal_


class LearnedPositions(nn.Module):
    """One learned vector per token in raster order; the class token has its own row, the first."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.table = nn.Parameter(torch.empty(1, config.sequence, config.width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        normal_(self.table, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens + self.table  # (B, T, D)


def resample(table: Tensor, old: Size, new: Size) -> Tensor:
    """A (1, T, D) table for another grid, as the paper does it: bilinear with aligned corners, class row untouched."""
    if old == new:
        return table
    extra = table.shape[1] - old[0] * old[1]
    grid = table[:, extra:].reshape(1, *old, -1).permute(0, 3, 1, 2)  # (1, D, h, w)
    grid = F.interpolate(grid.float(), size=new, mode="bilinear", align_corners=True).to(table.dtype)
    return torch.cat([table[:, :extra], grid.permute(0, 2, 3, 1).reshape(1, new[0] * new[1], -1)], dim=1)
