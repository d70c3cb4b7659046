"""Predictions on a GPU, where the next batch starts before the results of the last one are read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.data.folders import fill, image_bytes
from vitrail.commands.predict import embed, predict

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("workers", [0, 3])
def test_rows_are_those_of_the_cpu_in_the_same_order(tmp_path: Path, workers: int) -> None:
    fill(tmp_path, [f"{number:03}.png" for number in range(300)])
    fill(tmp_path, {"100 broken.png": b"nothing", "300 cut.png": image_bytes(5)[:40]})
    expected = predict("bundled", tmp_path, device="cpu")
    predictions = predict("bundled", tmp_path, device="cuda", workers=workers)
    assert [(row.file, row.error) for row in predictions] == [(row.file, row.error) for row in expected]
    assert sum(row.error is not None for row in predictions) == 2
    for one, other in zip(predictions, expected, strict=True):
        if one.prediction and other.prediction:
            assert one.prediction.probability == pytest.approx(other.prediction.probability, abs=0.01)
    features = [embed("bundled", tmp_path, device=device, workers=workers) for device in ("cpu", "cuda")]
    assert features[0].files == features[1].files
    difference = abs(features[0].values - features[1].values).max()
    assert difference < 0.02 * abs(features[0].values).max()
