"""Images that weights were trained on are excluded from evaluation, by their digests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.commands.conftest import draw
from vitrail.config import ModelConfig, Preprocess
from vitrail.data import dataset
from vitrail.data.splits import SplitRule
from vitrail.weights.bundle import Card, read_card, read_trained_on
from vitrail.weights.read import read_weights
from vitrail.workflows import train_test_overlap as module
from vitrail.workflows.train_run import TrainResult, train
from vitrail.workflows.train_test_overlap import TrainingRecord, count_seen, unseen_images


def card(known: dict[str, object]) -> Card:
    model = ModelConfig(width=8, depth=1, mlp_dim=8, heads=1, patch=(8, 8), image_size=(16, 16), num_classes=2)
    about = {"fingerprint": "another", "trained_on": ["f" * 16], **known}
    preprocess = Preprocess(size=(16, 16))
    return Card(model=model, preprocess=preprocess, classes=("blue", "red"), data=about, created_with="a test")


@pytest.mark.parametrize(("seen", "kept"), [(40, 0), (1, 199)])
@pytest.mark.parametrize("which", ["trained_on", "trained_before"])
def test_images_beyond_a_full_sketch_are_excluded_unless_few_were_trained_on(tmp_path, monkeypatch, which, seen, kept):
    draw(tmp_path / "red", (200, 60, 60), 100)
    draw(tmp_path / "blue", (60, 60, 200), 100)
    samples = dataset.open_dataset(tmp_path, None).splits["all"]
    first = [f"{digest:016x}" for digest in np.sort(samples.original_digests)[:seen].tolist()]
    highest = f"{int(np.sort(samples.original_digests)[119]) + 1:016x}"  # a sketch up to the 120th image
    monkeypatch.setattr(module, "SKETCH_SIZE" if which == "trained_on" else "EARLIER_SKETCH_SIZE", seen + 1)
    sketch = [*first, highest]
    measured, split_used = unseen(tmp_path, {which: sketch if which == "trained_on" else [["0" * 16], sketch]})
    assert split_used.startswith(f"folder; {seen} images that these weights were trained on are excluded")
    assert len(measured) == (kept or 200 - seen - 80)
    assert split_used.endswith(
        "and about 1 of the other images may be training images too" if kept else "80 more that may be training images"
    )


def unseen(path: Path, known: dict[str, object]) -> tuple[dataset.Samples, str]:
    _, samples, split_used = unseen_images(str(path), [TrainingRecord(card(known))], None, "", lambda *_: None)
    return samples, split_used


@pytest.mark.slow
def test_training_images_of_all_earlier_runs_are_excluded(tiny, tmp_path, quiet):
    for number, name in enumerate(("one", "two", "three")):
        draw(tmp_path / name / "red", (200, 60, 30 * number), 8)
        draw(tmp_path / name / "blue", (60, 30 * number, 200), 8)
    few = (
        "train.steps=2",
        "train.batch_size=8",
        "data.group_similar=false",
        "precision.compute=fp32",
        "schedule.warmup=0",
    )

    def run(data: str, start: Path, *settings: str) -> TrainResult:
        out = tmp_path / f"run {len(list(tmp_path.iterdir()))}"
        return train(tmp_path / data, from_=start, out=out, overrides=[*few, *settings], console=quiet)

    first = run("one", tiny)
    assert read_card(first.weights).metrics["measured_on"].endswith("of the validation split, none of them trained on.")
    second = run("two", first.weights)
    third = run("three", second.weights)
    assert read_card(third.weights).metrics["measured_on"].endswith("of the validation split, none of them trained on.")
    records = {name: TrainingRecord.of(read_weights(run.weights)) for name, run in (("one", first), ("two", second))}
    records["three"] = TrainingRecord.of(read_weights(third.weights))
    assert all(not one.card.data.get("trained_on") and not one.card.data["trained_before"] for one in records.values())
    assert [len(one.digests) for one in records.values()] == [
        12,
        24,
        36,
    ]  # 12 of 16 images per run, and those of earlier runs
    assert set(records["one"].digests) < set(records["two"].digests) < set(records["three"].digests)
    for name in ("one", "two"):  # 12 of the 16 images were trained on in an earlier run
        _, samples, split_used = unseen_images(str(tmp_path / name), [records["three"]], None, "", lambda *_: None)
        assert len(samples) == 4 and "12 images that these weights were trained on are excluded" in split_used

    again = read_card(run("one", third.weights, "data.split_seed=5").weights)
    split = dataset.open_dataset(tmp_path / "one", SplitRule(split_seed=5))
    before = len(set(split.splits["val"].pixel_digests) & set(records["one"].digests))
    assert 0 < before == again.metrics["seen_before"]
    assert f"the starting weights were trained on {before} of them" in again.metrics["measured_on"]
    assert "none of them" not in again.metrics["measured_on"]


@pytest.mark.slow
def test_copies_of_training_images_are_reported(tiny, tmp_path, quiet):
    for split in ("train", "val"):
        draw(tmp_path / split / "red", (200, 60, 60), 4)
        draw(tmp_path / split / "blue", (60, 60, 200), 4)
    few = ("train.steps=1", "train.batch_size=8", "precision.compute=fp32", "schedule.warmup=0")
    result = train(tmp_path, from_=tiny, out=tmp_path / "run", overrides=few, console=quiet)
    measured_on = read_card(result.weights).metrics["measured_on"]
    assert (
        measured_on == "Measured on 8 images of the validation split, 8 of which are exact copies of training images."
    )


def test_training_images_are_recognised_by_their_pixels_among_many(tmp_path):
    draw(tmp_path / "old" / "red", (200, 60, 60), 30)
    draw(tmp_path / "old" / "blue", (60, 60, 200), 30)
    old = dataset.open_dataset(tmp_path / "old", None).splits["all"]
    others = np.random.default_rng(0).integers(
        2**20, 2**64, 200_000, np.uint64
    )  # sorted before and after the real ones
    draw(tmp_path / "new" / "red", (200, 60, 61), 5)
    draw(tmp_path / "new" / "blue", (60, 60, 201), 5)
    for number in range(30):  # the same images in other formats, with other metadata and names
        for name in ("red", "blue"):
            picture = Image.open(tmp_path / "old" / name / f"{number:03d}.png")
            kind, options = [("bmp", {}), ("webp", {"lossless": True}), ("png", {"compress_level": 1})][number % 3]
            picture.save(tmp_path / "new" / name / f"copy-{number}.{kind}", **options)
    records = TrainingRecord(card({"trained_on": []}), np.concatenate([dataset.content_digests(old), others]))
    _, samples, split_used = unseen_images(str(tmp_path / "new"), [records], None, "", lambda *_: None)
    assert len(samples) == 10 and "60 images that these weights were trained on are excluded" in split_used
    assert not any("copy" in samples.name(index) for index in range(len(samples)))
    assert count_seen(old, records) == 60


@pytest.mark.slow
def test_a_resumed_run_keeps_the_training_images_of_its_starting_weights(tiny, tmp_path, quiet):
    for number, name in enumerate(("one", "two")):
        draw(tmp_path / name / "red", (200, 60, 30 * number), 8)
        draw(tmp_path / name / "blue", (60, 30 * number, 200), 8)
    few = (
        "train.steps=2",
        "train.batch_size=8",
        "data.group_similar=false",
        "precision.compute=fp32",
        "schedule.warmup=0",
    )
    first = train(tmp_path / "one", from_=tiny, out=tmp_path / "first", overrides=few, console=quiet)
    second = train(tmp_path / "two", from_=first.weights, out=tmp_path / "second", overrides=few, console=quiet)
    known = read_trained_on(second.weights)
    assert set(read_trained_on(first.weights)) < set(known) and len(known) == 24
    second.weights.unlink()
    first.weights.unlink()  # the starting weights are no longer needed
    again = train(resume=True, out=tmp_path / "second", console=quiet)
    assert (read_trained_on(again.weights) == known).all()
