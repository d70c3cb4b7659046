"""The weights in the package: their card and the quality of their features."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import vitrail
from vitrail.data.dataset import bundled_images, open_dataset
from vitrail.data.transforms import normalise
from vitrail.weights.bundle import read_card
from vitrail.weights.names import bundled_file

pytestmark = pytest.mark.slow


def test_features_classify_better_than_pixels():
    """Logistic regression of scikit-learn on the demo's images: 400 for training, 400 for testing."""
    clf = vitrail.load("bundled")
    splits = open_dataset(bundled_images()).splits
    data = {}
    for name in ("train", "test"):
        samples = splits[name]
        chosen = np.arange(len(samples))[:: len(samples) // 400][:400]
        pixels = torch.stack([clf.pixels(samples.read(index)) for index in chosen.tolist()])
        with torch.no_grad():
            features = clf.net.forward_features(normalise(pixels, clf.preprocess))
        small = torch.nn.functional.avg_pool2d(pixels.float(), 8).flatten(1)
        data[name] = {"features": features.numpy(), "pixels": small.numpy()}, samples.labels[chosen]
    scores = {}
    for kind in ("features", "pixels"):
        (train, labels), (test, truth) = ((data[name][0][kind], data[name][1]) for name in ("train", "test"))
        probe = make_pipeline(StandardScaler(), LogisticRegression(C=0.01, max_iter=500)).fit(train, labels)
        scores[kind] = probe.score(test, truth)
    assert scores["features"] > 0.6 > 0.4 > scores["pixels"], scores


def test_the_card_has_the_measured_accuracy():
    card = read_card(bundled_file())
    assert card.metrics["top1"] == pytest.approx(0.667, abs=1e-3)
    assert "10,000 images" in card.metrics["measured_on"] and card.data["images"] == {"train": 100_000, "test": 10_000}
    assert card.recipe["recipe"] == "tiny-imagenet" and "ImageNet" in card.licence
