"""Expected calibration error and reliability against examples computed by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.errors import UserError
from vitrail.metrics.calibration import bin_confidence, reliability


def test_a_hand_computed_example() -> None:
    # Five bins of 0.2. (0.4, 0.6]: confidences 0.5, 0.6, one right; (0.8, 1]: 0.9, 0.9, 1.0, two right.
    probabilities = np.array([[0.5, 0.25, 0.25], [0.6, 0.4, 0.0], [0.9, 0.1, 0.0], [0.05, 0.9, 0.05], [0.0, 0.0, 1.0]])
    got = reliability(probabilities, np.array([0, 1, 0, 1, 0]), bins=5)
    assert got.count.tolist() == [0, 0, 2, 0, 3]
    assert got.confidence[[2, 4]] == pytest.approx([0.55, 2.8 / 3])
    assert got.accuracy[[2, 4]] == pytest.approx([0.5, 2 / 3])
    assert np.isnan(got.accuracy[[0, 1, 3]]).all()
    assert got.ece == pytest.approx(2 / 5 * 0.05 + 3 / 5 * (2.8 - 2) / 3)
    assert got.overconfidence == pytest.approx((1.1 + 2.8 - 3) / 5)


def test_a_bin_includes_its_upper_edge() -> None:
    got = bin_confidence(np.array([0.2, 0.4, 1.0]), np.ones(3, dtype=bool), bins=5)
    assert got.count.tolist() == [1, 1, 0, 0, 1]


def test_calibrated_probabilities_score_near_zero() -> None:
    rng = np.random.default_rng(0)
    probabilities = rng.dirichlet(np.ones(4), size=50_000)
    labels = (rng.random((50_000, 1)) > probabilities.cumsum(axis=1)).sum(axis=1)
    assert reliability(probabilities, labels).ece < 0.01


@settings(max_examples=50, deadline=None)
@given(
    rows=st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=50),
    bins=st.integers(1, 30),
)
def test_every_image_is_in_one_bin_and_the_error_is_bounded(rows: list[tuple[float, bool]], bins: int) -> None:
    confidence, correct = np.array([r[0] for r in rows]), np.array([r[1] for r in rows])
    got = bin_confidence(confidence, correct, bins)
    assert got.count.sum() == len(rows) and len(got.edges) == bins + 1
    assert abs(got.overconfidence) - 1e-12 <= got.ece <= 1


def test_invalid_probabilities_are_rejected() -> None:
    with pytest.raises(ValueError, match="outside 0 to 1"):
        reliability(np.array([[1.7, 0.2]]), np.array([0]))
    with pytest.raises(UserError, match="at least one image"):
        bin_confidence(np.empty(0), np.empty(0, dtype=bool))
