"""Axial-ViT (appendix D.6): blocks alternate between attention within rows and within columns of the grid."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.config import ModelConfig
from vitrail.models.vit import Attention


class RowAttention(Attention):
    """Each patch attends to the patches of its row."""

    line = 1  # axis of (B, rows, columns, ...) over which lines are independent

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.grid = config.grid

    def forward(self, x: Tensor, keep: None = None) -> Tensor:  # type: ignore[override]
        # On five dimensions torch uses its unfused path, which saves a quarter of the step time on lines this short.
        q, k, v = self.split(self.qkv(x))
        mixed = F.scaled_dot_product_attention(q, k, v)  # (B, lines, heads, length, D/heads)
        mixed = mixed.transpose(2, 3).flatten(3)  # (B, lines, length, D)
        tokens = mixed if self.line == 1 else mixed.transpose(1, 2)
        return self.proj(tokens.flatten(1, 2))

    def split(self, qkv: Tensor) -> tuple[Tensor, ...]:
        """(B, T, 3 D) -> query, key, value, each (B, lines, heads, length, D/heads)."""
        rows, columns = self.grid
        qkv = qkv.view(qkv.shape[0], rows, columns, 3, self.heads, qkv.shape[-1] // (3 * self.heads))
        if self.line == 2:
            qkv = qkv.transpose(1, 2)
        return qkv.permute(3, 0, 1, 4, 2, 5).unbind(0)

    def weights(self, x: Tensor) -> Tensor:
        """The attention matrix (B, heads, T, T), zero between patches of different lines."""
        q, k, _ = self.split(self.qkv(x))
        within = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(-1)
        batch, lines, heads, length, _ = within.shape
        full = within.new_zeros(batch, heads, lines, length, lines, length)
        index = torch.arange(lines, device=x.device)
        full[:, :, index, :, index] = within.transpose(0, 1)
        if self.line == 2:  # lines are columns: back to raster order
            full = full.permute(0, 1, 3, 2, 5, 4)
        return full.reshape(batch, heads, lines * length, lines * length)


class ColumnAttention(RowAttention):
    """Each patch attends to the patches of its column."""

    line = 2
