"""The linear probe against scikit-learn with the same objective, and against closed forms."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from vitrail.errors import UserError
from vitrail.metrics.probe import fit_probe


def clusters(n: int, d: int, k: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(k, d, generator=generator)
    labels = torch.arange(n) % k
    noise = torch.randn(n, d, generator=generator)
    return 3 + (0.6 * centres[labels] + noise) * torch.logspace(-2, 2, d), labels


def probabilities(features: Tensor, weight: Tensor, bias: Tensor) -> np.ndarray:
    return (features.double() @ weight.double().T + bias.double()).softmax(dim=1).numpy()


@pytest.mark.parametrize(("n", "d"), [(120, 20), (60, 200)], ids=["tall", "wide"])
@pytest.mark.parametrize("penalty", [1e-3, 1e-1])
def test_agrees_with_scikit_learn(n: int, d: int, penalty: float) -> None:
    features, labels = clusters(n, d, 4)
    got = fit_probe(features.double(), labels, 4, penalties=[penalty], iterations=500)
    standardised = ((features - features.mean(0)) / features.std(0, correction=0)).double().numpy()
    oracle = LogisticRegression(C=1 / (n * penalty), tol=1e-10, max_iter=10_000).fit(standardised, labels.numpy())
    expected = oracle.predict_proba(standardised)
    np.testing.assert_allclose(probabilities(features, got.weight, got.bias), expected, atol=1e-4)


def test_the_gradient_is_zero_at_the_solution() -> None:
    """At the optimum: W = -dCE/dW / penalty on standardised features, and the bias gradient is zero."""
    features, labels = clusters(90, 12, 3)
    got = fit_probe(features.double(), labels, 3, penalties=[0.02], iterations=500)
    residual = torch.from_numpy(probabilities(features, got.weight, got.bias)) - torch.eye(3).double()[labels]
    std = features.double().std(0, correction=0)
    standardised = (features.double() - features.double().mean(0)) / std
    np.testing.assert_allclose(residual.mean(0), 0, atol=1e-6)
    np.testing.assert_allclose(got.weight * std, -(residual.T @ standardised) / 90 / 0.02, atol=1e-4)


def test_without_informative_features_it_learns_the_class_frequencies() -> None:
    features = torch.full((10, 3), 7.0)  # constant: no information, and a standard deviation of zero
    labels = torch.tensor([0, 0, 0, 0, 0, 0, 1, 1, 1, 2])
    got = fit_probe(features, labels, 3, penalties=[1e-4, 1.0], iterations=200)
    np.testing.assert_allclose(probabilities(features, got.weight, got.bias)[0], [0.6, 0.3, 0.1], atol=1e-5)
    assert got.weight.abs().max() == 0


def test_a_constant_feature_has_no_effect() -> None:
    features, labels = clusters(80, 6, 3)
    widened = torch.cat([features, torch.full((80, 1), 0.1)], dim=1)
    plain = fit_probe(features, labels, 3, penalties=[0.01], iterations=300)
    wide = fit_probe(widened, labels, 3, penalties=[0.01], iterations=300)
    assert wide.weight[:, -1].abs().max() == 0
    np.testing.assert_allclose(
        probabilities(features, plain.weight, plain.bias), probabilities(widened, wide.weight, wide.bias), atol=1e-4
    )


def test_the_penalty_is_chosen_on_the_validation_split() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(120) % 2
    features = torch.randn(120, 400, generator=generator)
    features[:, 0] += 3.0 * labels  # one informative feature among noise wants a strong penalty
    got = fit_probe(features, labels, 2, penalties=[1e-5, 1e-2, 1.0], iterations=200)
    assert sorted(penalty for penalty, _ in got.tried) == [1e-5, 1e-2, 1.0]
    best = max(accuracy for _, accuracy in got.tried)
    assert got.penalty == max(penalty for penalty, accuracy in got.tried if accuracy == best)
    again = fit_probe(features, labels, 2, penalties=[1e-5, 1e-2, 1.0], iterations=200)
    assert torch.equal(got.weight, again.weight) and got.tried == again.tried


def test_one_image_per_class_leaves_nothing_to_hold_out() -> None:
    features, labels = torch.randn(5, 8, generator=torch.Generator().manual_seed(0)), torch.arange(5)
    got = fit_probe(features, labels, 5, penalties=[1e-3, 0.5, 1e-2], iterations=100)
    assert got.penalty == 0.5 and got.tried == []
    assert (features @ got.weight.T + got.bias).argmax(dim=1).tolist() == [0, 1, 2, 3, 4]


def test_a_class_without_images_is_never_predicted_and_stays_finite() -> None:
    features, labels = clusters(60, 5, 3)
    got = fit_probe(features, labels, 4, penalties=[1e-3, 1e-2], iterations=200)
    assert got.weight.isfinite().all() and got.bias.isfinite().all()
    assert got.weight.shape == (4, 5)
    assert 3 not in (features @ got.weight.T + got.bias).argmax(dim=1)


def test_accepts_inference_mode_features_in_any_precision() -> None:
    with torch.inference_mode():
        features, labels = clusters(60, 5, 3)
        inside = fit_probe(features, labels, 3, penalties=[1e-2], iterations=50)
        rounded = fit_probe((features / 100).bfloat16(), labels, 3, penalties=[1e-2], iterations=50)
    outside = fit_probe(features.double(), labels, 3, penalties=[1e-2], iterations=50)
    assert inside.weight.dtype == rounded.weight.dtype == torch.float32 and outside.weight.dtype == torch.float64
    assert torch.equal(inside.weight, outside.weight.float()) and inside.seconds > 0


def test_invalid_inputs_are_errors() -> None:
    features, labels = clusters(6, 2, 2)
    with pytest.raises(UserError, match="NaN"):
        fit_probe(features / 0, labels, 2, penalties=[1.0], iterations=5)
    with pytest.raises(UserError, match="at least one image"):
        fit_probe(features[:0], labels[:0], 2, penalties=[1.0], iterations=5)
    with pytest.raises(UserError, match=r"probe\.penalties"):
        fit_probe(features, labels, 2, penalties=[0.0], iterations=5)
    with pytest.raises(UserError, match=r"0 to 1.* 1 classes"):
        fit_probe(features, labels, 1, penalties=[1.0], iterations=5)
