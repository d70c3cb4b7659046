"""The sentences and images of an explanation, on arrays with a known meaning."""

from __future__ import annotations

import numpy as np
import pytest

from vitrail.interpret.distance import AttentionDistances
from vitrail.interpret.faithfulness import FaithfulnessCurves, PairedGain
from vitrail.report.explain_plots import draw_side_by_side, overlay_heatmap
from vitrail.report.explain_summary import Pointing, distance_sentences, map_verdicts, rank_correlation, score_maps
from vitrail.report.raster import dim_by_map, tile_filters, to_rgb
from vitrail.tasks.result import percent


def distances(reach: list[list[float]], elsewhere: float = 0.0) -> AttentionDistances:
    values = np.array(reach)
    return AttentionDistances(values * (1 - elsewhere), values, np.full(values.shape, elsewhere), 100.0, 8)


def test_a_network_as_in_the_paper() -> None:
    growing, early, _ = distance_sentences(distances([[20, 95], [40, 95], [60, 95], [80, 95], [90, 95], [98, 95]], 0.1))
    assert "grows with depth: 57.5 px in the first block, 96.5 px in the last" in growing
    assert "The first 2 blocks have both local and global heads (2 and 2 of 4)" in early
    assert "from 20.0 to 95.0 px" in early


def test_other_networks() -> None:
    assert "shrinks with depth" in distance_sentences(distances([[90], [70], [50], [30]]))[0]
    assert "no steady trend" in distance_sentences(distances([[50], [51], [52], [53]]))[0]  # steady, but too small
    assert "no steady trend" in distance_sentences(distances([[20], [90], [25], [80]]))[0]
    assert "local heads (1 of 1), but no global ones" in distance_sentences(distances([[20], [90], [25], [80]]))[1]
    assert "but no local ones" in distance_sentences(distances([[95], [95], [95]]))[0]
    (neither,) = distance_sentences(distances([[60]]))
    assert "The first block has neither local nor global heads" in neither and "from 60.0" in neither
    assert "0.5" in neither and "0.9" in neither
    assert "Patches give 25.0" in distance_sentences(distances([[60]], 0.25))[-1]


def test_rank_correlation() -> None:
    assert rank_correlation(np.arange(4), np.array([1.0, 10.0, 100.0, 1000.0])) == pytest.approx(1)
    assert rank_correlation(np.arange(4), np.array([4.0, 3.0, 2.0, 1.0])) == pytest.approx(-1)
    assert rank_correlation(np.arange(4), np.ones(4)) == 0


def curves(level: float, images: int = 20) -> FaithfulnessCurves:
    """Deletion at one level, insertion at its complement."""
    noise = np.random.default_rng(0).normal(0, 0.01, (images, 1))
    return FaithfulnessCurves(np.array([0.0, 1.0]), level + noise.repeat(2, 1), 1 - level + noise.repeat(2, 1))


def point(accuracy: float, low: float) -> Pointing:
    return Pointing(accuracy, low, 1.0, share=0.5, chance=0.25)


def test_a_faithful_map_passes_every_test_and_the_pointing_game() -> None:
    every = {"relevance": curves(0.2), "rollout": curves(0.3), "last attention": curves(0.6), "random": curves(0.5)}
    points = {"relevance": point(0.9, 0.75), "rollout": point(0.5, 0.35), "last attention": point(0.2, 0.05)}
    sentences = map_verdicts(score_maps(every, points))
    for sentence, facts in zip(
        sentences,
        [
            ("Relevance is faithful", "3 of 3", percent(0.9), percent(0.25)),
            ("Rollout is partly faithful", "3 of 3", percent(0.5)),
            ("Last attention is not faithful", "0 of 3", "worse in 2", percent(0.2)),
        ],
        strict=True,
    ):
        assert all(fact in sentence for fact in facts), sentence
    assert "partly faithful" in map_verdicts(score_maps(every, {}))[0]  # without the pointing game
    for few in (point(0.74, 0.6), point(0.8, 0.49)):  # hit rate too low, or interval too wide
        assert "partly faithful" in map_verdicts(score_maps(every, {"relevance": few}))[0]


def test_a_tiny_difference_is_not_clear_even_if_certain() -> None:
    assert PairedGain(0.005, 0.004, 0.006).verdict == "no clear difference"
    assert PairedGain(0.05, 0.04, 0.06).verdict == "better" and PairedGain(-0.05, -0.06, -0.04).verdict == "worse"


def test_images_under_maps() -> None:
    image = np.full((8, 8, 3), 200, np.uint8)
    values = np.zeros((2, 2))
    values[0, 1] = 0.3
    seen = dim_by_map(image, values)
    assert seen[0, 7].tolist() == [200] * 3 and seen[7, 0].max() == 0 and seen.dtype == np.uint8
    assert dim_by_map(image, np.zeros((2, 2))).max() == 0
    night = overlay_heatmap(np.zeros((8, 8, 3), np.uint8), values).astype(int).sum(-1)  # visible on black, too
    assert night[0, 7] > 300 and night[7, 0] < 10 and night[0, 7] == night.max()
    assert to_rgb(np.ones((2, 2, 1), np.uint8)).shape == (2, 2, 3) == to_rgb(np.ones((2, 2, 4), np.uint8)).shape


def test_tiles_are_scaled_and_have_gaps() -> None:
    tiles = np.stack(
        [np.linspace(0, 1, 48).reshape(4, 4, 3), np.linspace(-9, 9, 48).reshape(4, 4, 3), np.ones((4, 4, 3))]
    )
    out = tile_filters(tiles, 2)
    assert out.shape == (64 * 2 + 6, 64 * 2 + 6, 4)
    assert np.array_equal(out[:64, :64], out[:64, 70:]) and out[0, 0, 0] == 0 and out[63, 63, 2] == 255
    assert out[:, 64:70, 3].max() == 0 and out[70:, 70:, 3].max() == 0  # gaps, and no tile
    assert tile_filters(np.ones((1, 4, 2, 1)), 7).shape[2] == 4


@pytest.mark.slow  # draws a plot
def test_networks_side_by_side_share_their_axis() -> None:
    """The axis fits the network with the largest distances."""
    from matplotlib.figure import Figure

    drawing = draw_side_by_side("Figure 11", [("far", distances([[90.0]])), ("near", distances([[5.0]]))])
    figure = Figure()
    drawing.paint(figure)
    assert [axes.get_ylim()[1] for axes in figure.axes] == [pytest.approx(112)] * 2
