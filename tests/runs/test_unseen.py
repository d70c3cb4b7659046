"""Which images weights are measured on, told by the digests of those they were trained on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.runs.conftest import draw
from vitrail.config import ModelConfig, Preprocess
from vitrail.images import dataset
from vitrail.runs.unseen import unseen_images
from vitrail.weights.bundle import Card


def card(trained_on: list[str]) -> Card:
    model = ModelConfig(width=8, depth=1, mlp_dim=8, heads=1, patch=(8, 8), image_size=(16, 16), num_classes=2)
    about = {"fingerprint": "another", "trained_on": trained_on}
    preprocess = Preprocess(size=(16, 16))
    return Card(model=model, preprocess=preprocess, classes=("blue", "red"), data=about, created_with="a test")


@pytest.mark.parametrize(("seen", "kept"), [(40, 0), (1, 199)])
def test_what_a_full_sketch_cannot_tell_is_left_out_unless_copies_only_strayed_there(tmp_path, monkeypatch, seen, kept):
    draw(tmp_path / "red", (200, 60, 60), 100)
    draw(tmp_path / "blue", (60, 60, 200), 100)
    samples = dataset.open_dataset(tmp_path, split=False).splits["all"]
    first = [f"{digest:016x}" for digest in np.sort(samples.firsts)[:seen].tolist()]
    highest = f"{int(np.sort(samples.firsts)[119]) + 1:016x}"  # a sketch that reaches to the 120th image
    monkeypatch.setattr(dataset, "SKETCH", seen + 1)
    measured, words = unseen(tmp_path, [*first, highest])
    assert words.startswith(f"folder; {seen} images that these weights were trained on are left out")
    assert len(measured) == (kept or 200 - seen - 80)
    assert words.endswith("and about 1 more may be among the rest" if kept else "80 more that cannot be told from such")


def unseen(path: Path, trained_on: list[str]) -> tuple[dataset.Samples, str]:
    _, samples, words = unseen_images(str(path), [card(trained_on)], None, "", lambda *_: None)
    return samples, words
