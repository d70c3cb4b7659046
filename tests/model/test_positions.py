"""Positions for another grid: what the original code gets from scipy."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.ndimage
import torch

from vitrail.model.positions import resample


def table(rows: int, columns: int, extra: int) -> torch.Tensor:
    return torch.randn(1, extra + rows * columns, 16, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("extra", [0, 1])
@pytest.mark.parametrize(
    ("old", "new"), [((7, 7), (12, 12)), ((14, 14), (24, 24)), ((14, 14), (7, 7)), ((4, 6), (9, 5)), ((3, 3), (1, 4))]
)
def test_resample_is_the_zoom_of_the_original(old, new, extra):
    positions = table(*old, extra)
    grid = positions[0, extra:].reshape(*old, 16).numpy()
    zoomed = scipy.ndimage.zoom(grid, (new[0] / old[0], new[1] / old[1], 1), order=1)
    result = resample(positions, old, new)
    assert result.shape == (1, extra + new[0] * new[1], 16)
    np.testing.assert_allclose(result[0, extra:].numpy(), zoomed.reshape(-1, 16), atol=1e-5)  # of values near one
    assert torch.equal(result[:, :extra], positions[:, :extra])


def test_the_same_grid_changes_nothing():
    positions = table(5, 3, 1)
    assert torch.equal(resample(positions, (5, 3), (5, 3)), positions)


def test_half_precision_stays_half_precision():
    assert resample(table(4, 4, 1).bfloat16(), (4, 4), (6, 6)).dtype == torch.bfloat16
