"""Losses against closed forms in float64, torch's own functions, and the numbers that the paper's start implies."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.utils.class_weight import compute_class_weight

from vitrail.config import ObjectiveConfig
from vitrail.errors import UserError
from vitrail.models.build import create
from vitrail.tasks.classification import Classification
from vitrail.tasks.cross_entropy import class_weights
from vitrail.tasks.multilabel import Multilabel
from vitrail.tasks.task import Batch

SOFTMAX, SIGMOID = ObjectiveConfig(), ObjectiveConfig(loss="sigmoid")


def mean(loss, weights):
    """As a step has it."""
    return loss.total / weights.sum().clamp(min=1e-9)


def drawn(count=6, classes=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(count, classes, generator=generator)
    targets = torch.rand(count, classes, generator=generator)
    return logits, targets / targets.sum(-1, keepdim=True), torch.rand(count, generator=generator)


def by_hand(loss, logits, targets, weights, each):
    """Float64, straight from the definition."""
    z, t, w, each = (np.asarray(value, np.float64) for value in (logits, targets, weights, each))
    if loss == "softmax":
        terms = -t * np.log(np.exp(z) / np.exp(z).sum(-1, keepdims=True))
    else:
        p = 1 / (1 + np.exp(-z))
        terms = -(t * np.log(p) + (1 - t) * np.log(1 - p))
    return ((terms * each).sum(-1) * w).sum()


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
@pytest.mark.parametrize("each", [None, [0.5, 2.0, 0.0, 1.0, 3.0]])
def test_losses_are_the_closed_forms(loss, each):
    logits, targets, weights = drawn()
    got = Classification(ObjectiveConfig(loss=loss), 5, each).loss_of_logits(logits, targets, weights)
    expected = by_hand(loss, logits, targets, weights, each or np.ones(5))
    assert got.total.dtype == torch.float32
    assert got.total.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_softmax_loss_is_torchs_cross_entropy(smoothing):
    logits, labels = torch.randn(5, 4), torch.tensor([0, 1, 2, 3, 1])
    objective = Classification(ObjectiveConfig(label_smoothing=smoothing), 4)
    expected = F.cross_entropy(logits, labels, label_smoothing=smoothing)
    loss = objective.loss_of_logits(logits, objective.targets(labels), torch.ones(5))
    assert torch.allclose(mean(loss, torch.ones(5)), expected)


def test_class_weights_are_torchs():
    logits, targets, _ = drawn()
    each, ones = torch.tensor([0.5, 2.0, 0.0, 1.0, 3.0]), torch.ones(6)
    soft = Classification(SOFTMAX, 5, each.tolist()).loss_of_logits(logits, targets, ones).total
    assert torch.allclose(soft, F.cross_entropy(logits, targets, weight=each, reduction="sum"))
    sigmoid = Classification(SIGMOID, 5, each.tolist()).loss_of_logits(logits, targets, ones).total
    assert torch.allclose(
        sigmoid, F.binary_cross_entropy_with_logits(logits, targets, weight=each, reduction="sum"), rtol=1e-5
    )


def test_smoothed_sigmoid_targets_are_the_papers():
    smooth = Classification(ObjectiveConfig(loss="sigmoid", label_smoothing=1e-4), 4).targets(torch.tensor([0]))
    assert smooth[0].tolist() == pytest.approx([0.9999, 0.0001, 0.0001, 0.0001])
    multilabel = Multilabel(SIGMOID, 3).targets(torch.tensor([[1, 0, 1]]))
    assert multilabel.tolist() == [[1, 0, 1]]


@pytest.mark.parametrize(
    ("loss", "bias", "expected"),
    [("softmax", 0.0, math.log(1000)), ("sigmoid", -10.0, 10 + 1000 * 4.54e-5)],
)
def test_a_fresh_network_starts_with_the_papers_loss(loss, bias, expected):
    torch.manual_seed(0)
    net = create("Ti/16", num_classes=1000, image_size=32, head_bias=bias)
    objective = Classification(ObjectiveConfig(loss=loss), 1000)
    batch = Batch(torch.randn(3, 3, 32, 32), objective.targets(torch.tensor([3, 999, 0])), torch.ones(3))
    with torch.no_grad():
        loss = objective.loss(net, batch)
    assert mean(loss, batch.weights).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
def test_micro_batch_losses_add_up_to_the_batch_loss(loss):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 5))
    objective = Classification(ObjectiveConfig(loss=loss, label_smoothing=0.1), 5, [1.0, 2.0, 3.0, 4.0, 5.0])
    targets = objective.targets(torch.arange(7) % 5)
    batch = Batch(torch.randn(7, 3, 2, 2), targets, torch.tensor([1.0, 0.0, 2.0, 1.0, 0.5, 1.0, 1.0]))
    whole = objective.loss(net, batch)
    parts = [objective.loss(net, batch.micro_batch(first, first + 3)) for first in (0, 3, 6)]
    assert torch.allclose(sum(part.total for part in parts), whole.total)
    assert torch.allclose(sum(part.correct for part in parts), whole.correct)


def test_an_image_with_weight_zero_is_ignored():
    objective = Classification(SOFTMAX, 3)
    logits, targets = torch.randn(4, 3), objective.targets(torch.tensor([0, 1, 2, 0]))
    weights = torch.tensor([1.0, 0.0, 1.0, 1.0])
    keep = weights > 0
    whole, rest = (
        objective.loss_of_logits(logits, targets, weights),
        objective.loss_of_logits(logits[keep], targets[keep], torch.ones(3)),
    )
    assert torch.allclose(whole.total, rest.total) and whole.correct == rest.correct
    assert mean(objective.loss_of_logits(logits, targets, torch.zeros(4)), torch.zeros(4)) == 0


def test_correct_is_the_total_weight_of_correct_images():
    logits = torch.tensor([[2.0, 1.0, 0.0], [0.0, 1.0, 2.0], [0.0, 5.0, 1.0]])
    targets = torch.tensor([[0.6, 0.4, 0.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    weights = torch.tensor([0.5, 4.0, 2.0])
    assert Classification(SOFTMAX, 3).loss_of_logits(logits, targets, weights).correct.item() == 2.5
    assert Classification(SIGMOID, 3).loss_of_logits(logits, targets, weights).correct.item() == 2.5


def test_multilabel_correct_is_the_fraction_of_correct_classes():
    logits = torch.tensor([[2.0, -1.0, 1.0, -1.0], [1.0, 1.0, 1.0, 1.0]])
    targets = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    objective = Multilabel(SIGMOID, 4)
    assert objective.loss_of_logits(logits, targets, torch.tensor([2.0, 1.0])).correct.item() == 2 * 0.75


def test_the_loss_of_half_precision_logits_is_float32():
    logits = torch.full((1, 1000), -10.0, dtype=torch.bfloat16)
    targets = Classification(SIGMOID, 1000).targets(torch.tensor([0]))
    total = Classification(SIGMOID, 1000).loss_of_logits(logits, targets, torch.ones(1)).total
    assert total.item() == pytest.approx(10 + 1000 * 4.54e-5, rel=1e-5)


@pytest.mark.parametrize("counts", [[10, 10, 10], [1, 7, 92], [3, 500, 20]])
def test_balanced_weights_match_scikit_learn(counts):
    labels = np.repeat(np.arange(3), counts)
    expected = compute_class_weight("balanced", classes=np.arange(3), y=labels)
    assert class_weights("balanced", ["a", "b", "c"], counts) == pytest.approx(expected.tolist())


def test_a_class_without_images_has_balanced_weight_zero():
    weights = class_weights("balanced", ["a", "b", "c"], [1, 0, 3])
    expected = compute_class_weight("balanced", classes=np.array([0, 2]), y=np.array([0, 2, 2, 2]))
    assert weights == [pytest.approx(expected[0]), 0.0, pytest.approx(expected[1])]


def test_weights_by_name_and_none():
    assert class_weights({"dog": 2, "cat": 0.5}, ["cat", "cow", "dog"], [1, 1, 1]) == [0.5, 1.0, 2.0]
    assert class_weights("none", ["cat", "dog"], [1, 2]) is None


@pytest.mark.parametrize(
    ("setting", "counts", "words"),
    [
        ({"dgo": 2.0}, [1, 1], "no class 'dgo'; did you mean 'dog'?"),
        ({"dog": 0.0, "cat": 0.0}, [1, 1], "all weights are 0"),
        ("balanced", [0, 0], "all weights are 0"),
    ],
)
def test_invalid_class_weights_are_a_user_error(setting, counts, words):
    with pytest.raises(UserError) as error:
        class_weights(setting, ["cat", "dog"], counts)
    assert words in str(error.value)
