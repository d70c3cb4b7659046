"""Which images weights are measured on, told by the digests of those they were trained on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.runs.conftest import draw
from vitrail.config import ModelConfig, Preprocess
from vitrail.images import dataset
from vitrail.images.splits import SplitRule
from vitrail.runs import unseen as module
from vitrail.runs.train import TrainResult, train
from vitrail.runs.unseen import unseen_images
from vitrail.weights.bundle import Card, read_card


def card(known: dict[str, object]) -> Card:
    model = ModelConfig(width=8, depth=1, mlp_dim=8, heads=1, patch=(8, 8), image_size=(16, 16), num_classes=2)
    about = {"fingerprint": "another", "trained_on": ["f" * 16], **known}
    preprocess = Preprocess(size=(16, 16))
    return Card(model=model, preprocess=preprocess, classes=("blue", "red"), data=about, created_with="a test")


@pytest.mark.parametrize(("seen", "kept"), [(40, 0), (1, 199)])
@pytest.mark.parametrize("which", ["trained_on", "trained_before"])
def test_what_a_full_sketch_cannot_tell_is_left_out_unless_copies_only_strayed_there(
    tmp_path, monkeypatch, which, seen, kept
):
    draw(tmp_path / "red", (200, 60, 60), 100)
    draw(tmp_path / "blue", (60, 60, 200), 100)
    samples = dataset.open_dataset(tmp_path, None).splits["all"]
    first = [f"{digest:016x}" for digest in np.sort(samples.firsts)[:seen].tolist()]
    highest = f"{int(np.sort(samples.firsts)[119]) + 1:016x}"  # a sketch that reaches to the 120th image
    monkeypatch.setattr(module, "SKETCH" if which == "trained_on" else "EARLIER", seen + 1)
    sketch = [*first, highest]
    measured, words = unseen(tmp_path, {which: sketch if which == "trained_on" else [["0" * 16], sketch]})
    assert words.startswith(f"folder; {seen} images that these weights were trained on are left out")
    assert len(measured) == (kept or 200 - seen - 80)
    assert words.endswith("and about 1 more may be among the rest" if kept else "80 more that cannot be told from such")


def unseen(path: Path, known: dict[str, object]) -> tuple[dataset.Samples, str]:
    _, samples, words = unseen_images(str(path), [card(known)], None, "", lambda *_: None)
    return samples, words


@pytest.mark.slow
def test_images_of_the_starting_weights_and_of_theirs_are_not_forgotten(tiny, tmp_path, quiet):
    for number, name in enumerate(("one", "two", "three")):
        draw(tmp_path / name / "red", (200, 60, 30 * number), 8)
        draw(tmp_path / name / "blue", (60, 30 * number, 200), 8)
    few = ("train.steps=2", "train.batch_size=8", "data.alike=false", "precision.compute=fp32", "schedule.warmup=0")

    def run(data: str, start: Path, *settings: str) -> TrainResult:
        out = tmp_path / f"run {len(list(tmp_path.iterdir()))}"
        return train(tmp_path / data, from_=start, out=out, overrides=[*few, *settings], console=quiet)

    first = run("one", tiny)
    assert read_card(first.weights).metrics["measured_on"].endswith("of the held-out split, which training never saw.")
    second = run("two", first.weights)
    third = run("three", second.weights)
    assert read_card(third.weights).metrics["measured_on"].endswith("of the held-out split, which training never saw.")
    learned = {name: read_card(run.weights) for name, run in (("one", first), ("two", second), ("three", third))}
    assert learned["three"].data["trained_before"] == [learned[name].data["trained_on"] for name in ("two", "one")]
    for name in ("one", "two"):  # 13 of the 16 images were trained on, long ago
        seen = len(learned[name].data["trained_on"])
        _, samples, words = unseen_images(str(tmp_path / name), [learned["three"]], None, "", lambda *_: None)
        assert len(samples) == 16 - seen and f"{seen} images that these weights were trained on are left out" in words

    again = read_card(run("one", third.weights, "data.split_seed=5").weights)
    split = dataset.open_dataset(tmp_path / "one", SplitRule(split_seed=5))
    held_out = {f"{digest:016x}" for digest in split.splits["val"].firsts.tolist()}
    before = len(held_out & set(learned["one"].data["trained_on"]))
    assert 0 < before == again.metrics["seen_before"]
    assert f"{before} were in the training of the weights it started from" in again.metrics["measured_on"]
    assert "never saw" not in again.metrics["measured_on"]


@pytest.mark.slow
def test_copies_of_training_images_are_told_of(tiny, tmp_path, quiet):
    for split in ("train", "val"):
        draw(tmp_path / split / "red", (200, 60, 60), 4)
        draw(tmp_path / split / "blue", (60, 60, 200), 4)
    few = ("train.steps=1", "train.batch_size=8", "precision.compute=fp32", "schedule.warmup=0")
    result = train(tmp_path, from_=tiny, out=tmp_path / "run", overrides=few, console=quiet)
    said = read_card(result.weights).metrics["measured_on"]
    assert said == "Measured on 8 images of the held-out split, 8 of which are exact copies of training images."
