"""Position embeddings: added to the tokens (Eq. 1), or relative ones, added to the attention scores."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import ModelConfig, Resampling, Size
from vitrail.models.layers import normal_


class LearnedPositions(nn.Module):
    """Learned 1-D embedding: one vector per patch in raster order, and optionally per class token and register."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.every_token = config.prefix_positions
        self.skip = 0 if self.every_token else config.prefix
        self.table = nn.Parameter(torch.empty(1, config.sequence - self.skip, config.width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        normal_(
            self.table, std=0.02 if self.every_token else self.table.shape[-1] ** -0.5
        )  # big_vision's value without prefix rows

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens + (F.pad(self.table, (0, 0, self.skip, 0)) if self.skip else self.table)  # (B, T, D)


class Learned2dPositions(nn.Module):
    """Learned 2-D embedding: one half of the vector for the patch's column, the other for its row."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        rows, columns = config.grid
        self.prefix = config.prefix
        self.columns = nn.Parameter(torch.empty(columns, config.width // 2))
        self.rows = nn.Parameter(torch.empty(rows, config.width // 2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        normal_(self.columns, std=0.02)
        normal_(self.rows, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        across = self.columns.expand(len(self.rows), -1, -1)
        down = self.rows[:, None].expand(-1, len(self.columns), -1)
        grid = torch.cat([across, down], dim=-1).flatten(0, 1)  # (h*w, D)
        return tokens + F.pad(grid, (0, 0, self.prefix, 0))


class SinCosPositions(nn.Module):
    """Fixed 2-D sine-cosine embedding, as in big_vision. It has no parameters and is not in the state dict."""

    waves: Tensor

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.grid, self.prefix = config.grid, config.prefix
        # from_numpy, since it allocates storage even while a network is built on the meta device.
        empty = torch.from_numpy(np.zeros((config.sequence, config.width), np.float32))
        self.register_buffer("waves", empty, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.waves[self.prefix :] = torch.from_numpy(sincos(self.grid, self.waves.shape[1]))

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens + self.waves


def sincos(grid: Size, width: int) -> np.ndarray:
    """[sin x, cos x, sin y, cos y] at width/4 frequencies from 1 to 1/10000; (h*w, width) in raster order."""
    y, x = np.mgrid[: grid[0], : grid[1]].reshape(2, -1, 1)
    quarter = width // 4
    frequencies = 10_000.0 ** -(np.arange(quarter) / max(quarter - 1, 1))
    waves = [wave(coordinate * frequencies) for coordinate in (x, y) for wave in (np.sin, np.cos)]
    return np.concatenate(waves, axis=1)


class RelativePositions(nn.Module):
    """1-D relative position embedding: one learned vector per offset between patches in raster order.

    All heads of a layer share it. Class token and registers are not in the raster: three more vectors are for pairs
    from them, to them and among them.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.patches, self.prefix = config.grid[0] * config.grid[1], config.prefix
        rows = 2 * self.patches - 1 + (3 if self.prefix else 0)
        self.table = nn.Parameter(torch.empty(rows, config.width // config.heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        normal_(self.table, std=0.02)

    def forward(self, queries: Tensor) -> Tensor:
        """The bias of the attention scores: (B, heads, queries, D/heads) -> (B, heads, queries, T)."""
        queries = queries / queries.shape[-1] ** 0.5
        offsets = 2 * self.patches - 1
        inside = self._relative_shift(queries[:, :, self.prefix :] @ self.table[:offsets].flip(0).T)
        if not self.prefix:
            return inside
        start, to, among = (queries @ self.table[offsets:].T).split(1, dim=-1)  # each (B, heads, queries, 1)
        shape = (-1, -1, -1, self.prefix)
        first = [among[:, :, : self.prefix].expand(shape), start[:, :, : self.prefix].expand(-1, -1, -1, self.patches)]
        rest = [to[:, :, self.prefix :].expand(shape), inside]
        return torch.cat([torch.cat(first, dim=-1), torch.cat(rest, dim=-1)], dim=2)

    def _relative_shift(self, scores: Tensor) -> Tensor:
        """Select the scores of the N keys of patch i from its scores for all offsets +(N-1) to -(N-1).

        Row i needs columns N-1-i to 2N-2-i. With one padding column, the rows of length 2N are reread as rows of length
        2N-1, so each row starts one column further left. An index lookup would be simpler, but far slower in
        deterministic mode.
        """
        count = self.patches
        flat = F.pad(scores, (0, 1)).flatten(2)
        length = scores.shape[2] * (2 * count - 1)
        missing = max(count - 1 + length - flat.shape[2], 0)
        flat = F.pad(flat, (0, missing)) if missing else flat
        return flat[..., count - 1 : count - 1 + length].unflatten(2, (scores.shape[2], 2 * count - 1))[..., :count]


ADDED = {"1d": LearnedPositions, "2d": Learned2dPositions, "sincos": SinCosPositions}


def build_pos_embed(config: ModelConfig) -> nn.Module:
    """The module that adds the position embedding to tokens; a ModuleList if every block has its own."""
    if config.positions not in ADDED:
        return nn.Identity()
    module = ADDED[config.positions]
    if config.positions_at == "layers":
        return nn.ModuleList(module(config) for _ in range(config.blocks))
    return module(config)


def resample_pos_embed(table: Tensor, old: Size, new: Size, how: Resampling = "paper") -> Tensor:
    """Interpolate a (1, T, D) position table to another grid; rows of class token and registers do not change.

    "paper" is bilinear with aligned corners. "bicubic" (DeiT, MAE) and "bicubic_antialias" (timm) align the outer edges
    of patches instead of their centers.
    """
    if old == new:
        return table
    extra = table.shape[1] - old[0] * old[1]
    grid = table[:, extra:].reshape(1, *old, -1).permute(0, 3, 1, 2)  # (1, D, h, w)
    grid = _interpolate(grid, new, how).to(table.dtype)
    return torch.cat([table[:, :extra], grid.permute(0, 2, 3, 1).reshape(1, new[0] * new[1], -1)], dim=1)


def resample_axis(table: Tensor, new: int, how: Resampling = "paper") -> Tensor:
    """Interpolate an (n, D) table of rows or columns to another length."""
    if len(table) == new:
        return table
    line = table.T[None, :, :, None]  # (1, D, n, 1)
    return _interpolate(line, (new, 1), how)[0, :, :, 0].T.to(table.dtype)


def resample_offsets(table: Tensor, old: Size, new: Size) -> Tensor:
    """Interpolate a (2N-1, D) table of relative offsets to another grid.

    Each raster offset is treated as the row and column offset that it most often stands for. That is scaled with the
    grid, and the vectors of the four nearest offsets are mixed bilinearly.
    """
    if old == new:
        return table
    last = new[0] * new[1] - 1
    offsets = torch.arange(-last, last + 1)
    down = torch.round(offsets / new[1])
    steps = [(down, old[0], new[0]), (offsets - down * new[1], old[1], new[1])]
    rows, columns = (step * ((before - 1) / (after - 1) if after > 1 else 0.0) for step, before, after in steps)
    first_row, first_column = rows.floor(), columns.floor()
    mixed = torch.zeros(len(offsets), table.shape[1])
    for row, row_weight in ((first_row, 1 - (rows - first_row)), (first_row + 1, rows - first_row)):
        for column, weight in (
            (first_column, 1 - (columns - first_column)),
            (first_column + 1, columns - first_column),
        ):
            index = (row * old[1] + column).long() + old[0] * old[1] - 1
            mixed += (row_weight * weight)[:, None] * table[index.clamp(0, len(table) - 1)].float()
    return mixed.to(table.dtype)


def _interpolate(grid: Tensor, size: Size, how: Resampling) -> Tensor:
    if how == "paper":
        return F.interpolate(grid.float(), size=size, mode="bilinear", align_corners=True)
    return F.interpolate(grid.float(), size=size, mode="bicubic", antialias=how == "bicubic_antialias")
