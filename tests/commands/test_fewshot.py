"""`vitrail fewshot` and `vitrail knn`, from images to scores, with any number of processes."""

import json

import numpy as np
import pytest
import torch

from tests import ranks as processes
from tests.commands.conftest import draw
from vitrail.commands.fewshot import fewshot
from vitrail.data.dataset import open_dataset
from vitrail.errors import UserError
from vitrail.inference.classifier import load
from vitrail.inference.feature_cache import FeatureCache
from vitrail.inference.features import FeatureExtractor
from vitrail.metrics.fewshot import sample_shots


@pytest.fixture(scope="module")
def splits(tmp_path_factory):
    """Train and test folders of three classes; 23 test images, divisible by neither 2 nor 3."""
    root = tmp_path_factory.mktemp("fewshot") / "colours"
    for name, colour, count in (("red", (150, 90, 90), 8), ("green", (90, 150, 90), 8), ("blue", (90, 90, 150), 7)):
        draw(root / "train" / name, colour, 12)
        draw(root / "test" / name, tuple(value + 1 for value in colour), count)
    return root


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def hard(tmp_path_factory):
    """Similar classes of different sizes: every sample and every penalty gives another score."""
    root = tmp_path_factory.mktemp("fewshot") / "greys"
    for name, colour, count in (
        ("red", (126, 118, 118), 20),
        ("green", (118, 126, 118), 14),
        ("blue", (118, 118, 126), 12),
    ):
        draw(root / "train" / name, colour, count)
        draw(root / "test" / name, tuple(value + 1 for value in colour), 30)
    return root


@pytest.mark.parametrize("form", ["paper", "big_vision"])
def test_scores_match_a_reference_implementation(hard, tiny, empty_cache, quiet, form):
    rows = fewshot(tiny, [hard], shots=(1, 5, None), form=form, device="cpu", console=quiet)
    assert [(row.data, row.shots) for row in rows] == [("greys", 1), ("greys", 5), ("greys", None)]
    net, data = load(tiny), open_dataset(hard, None)

    def features(samples):
        pixels = torch.stack([net.pixels(samples.read(index)) for index in range(len(samples))])
        with torch.no_grad():
            return net.net.forward_features((pixels.float() - 127.5) / 127.5).double().numpy()

    train, test = features(data.splits["train"]), features(data.splits["test"])
    labels, truth = data.splits["train"].labels, data.splits["test"].labels

    def solved(shots, seed, power):
        chosen = sample_shots(labels, 3, shots, seed)
        x = train[chosen]
        mean, deviation = x.mean(0), x.std(0) + 1e-5
        x, z = (np.hstack([(v - mean) / deviation, np.full((len(v), 1), 100.0)]) for v in (x, test))
        penalty = 2.0**power * np.eye(x.shape[1])
        weights = np.linalg.solve(x.T @ x + penalty, x.T @ (2 * np.eye(3)[labels[chosen]] - 1))
        return ((z @ weights).argmax(1) == truth).mean()

    if form == "big_vision":
        for row in rows:
            assert row.setting == "penalty 2^10"
            assert row.seeds == pytest.approx([solved(row.shots, seed, 10) for seed in (0, 1, 2)], abs=1e-9)
        assert len(set(rows[0].seeds)) == len(set(rows[1].seeds)) == 3  # or no draw would show in the numbers,
        assert solved(None, 0, 9) > solved(None, 0, 10) > solved(None, 0, 11)  # and no penalty
    else:
        for row in rows:
            by_power = {power: solved(row.shots, None, power) for power in range(-10, 20)}
            assert row.seeds == pytest.approx([max(by_power.values())], abs=1e-9) and row.accuracy < 1
            assert row.seeds == pytest.approx([by_power[int(row.setting.removeprefix("penalty 2^"))]], abs=1e-9)


def test_a_second_run_reads_no_image(splits, tiny, empty_cache, quiet, monkeypatch):
    first = fewshot(tiny, [splits], shots=(5, None), methods=("probe", "knn"), device="cpu", console=quiet)
    monkeypatch.setattr(FeatureExtractor, "_run", None)
    assert fewshot(tiny, [splits], shots=(5, None), methods=("probe", "knn"), device="cpu", console=quiet) == first
    assert {row.method for row in first} == {"probe", "knn"}
    assert first[1].images == 36 and first[1].tested == 23


def test_all_data_sets_share_one_penalty(splits, photos, tiny, empty_cache, quiet):
    rows = fewshot(tiny, [splits, photos], shots=(1, 5), device="cpu", console=quiet)
    assert [row.data for row in rows] == ["colours", "photos"] * 2
    assert rows[0].setting == rows[1].setting and rows[0].setting.startswith("penalty 2^")
    assert rows[1].tested == 9  # photos have no splits: a fifth is the test split


def test_features_of_a_stopped_run_are_kept(splits, tiny, empty_cache, quiet, monkeypatch):
    from vitrail.inference import features
    from vitrail.interrupt import Interrupted, Interrupts

    monkeypatch.setattr(features, "BATCH", 8)
    checks = []

    def check(self, ranks=None):
        checks.append(ranks)
        if sum(ranks is not None for ranks in checks) == 2:
            raise Interrupted(2)

    with monkeypatch.context() as patch:
        patch.setattr(Interrupts, "check", check)
        with pytest.raises(Interrupted):
            fewshot(tiny, [splits], shots=(None,), device="cpu", console=quiet)
    net = load(tiny)
    cache = FeatureCache.for_network(net.net, net.preprocess, torch.device("cpu"))
    assert len(cache.missing(open_dataset(splits, None).splits["train"].digests)) == 36 - 16


def test_invalid_data_and_options(splits, tiny, quiet, tmp_path):
    table = tmp_path / "multilabel.csv"
    table.write_text("path,labels\n" + "".join(f"{path},a|b\n" for path in (splits / "train" / "red").iterdir()))
    with pytest.raises(UserError, match="--shots"):
        fewshot(tiny, [splits], shots=(0,), console=quiet)
    with pytest.raises(UserError, match=r"multilabel\.csv.* is multilabel"):
        fewshot(tiny, [table], console=quiet)
    with pytest.raises(UserError, match="given twice"):
        fewshot(tiny, [splits, splits], console=quiet)
    (tmp_path / "again").symlink_to(splits)
    with pytest.raises(UserError, match="given twice"):
        fewshot(tiny, [splits, tmp_path / "again"], console=quiet)
    for name in ("red", "blue"):
        draw(tmp_path / "one" / name, (len(name), 60, 60), 1)
    with pytest.raises(UserError, match=r"one.* single image"):
        fewshot(tiny, [tmp_path / "one"], console=quiet)


@pytest.mark.slow
def test_the_result_does_not_depend_on_the_number_of_processes(splits, tiny, tmp_path, monkeypatch):
    outputs = []
    for world in (1, 2, 3):
        monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / f"cache_{world}"))
        command = ["fewshot", tiny, splits, "--shots", "1,5,all", "--by", "least-squares", "--by", "knn", "--json"]
        started = processes.start(world, tmp_path, processes.vitrail, *command, "--device", "cpu")
        assert started.codes() == [0] * world, started.errors()
        outputs.append(json.loads(started.output()))
    assert outputs[0] == outputs[1] == outputs[2]
    assert len(outputs[0]) == 6
