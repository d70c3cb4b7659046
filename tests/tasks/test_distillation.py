"""Distillation against closed forms, and a teacher that sees and says what it was trained to."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from vitrail.config import ObjectiveConfig, Preprocess
from vitrail.data.transforms import normalise
from vitrail.errors import UserError
from vitrail.tasks.classification import Classification
from vitrail.tasks.distillation import Distillation, matching_teacher
from vitrail.tasks.multilabel import Multilabel
from vitrail.tasks.task import Batch

CLASSES = 4


def networks(seed=0):
    torch.manual_seed(seed)
    return [nn.Sequential(nn.Flatten(), nn.Linear(12, CLASSES)) for _ in range(2)]


def a_batch(objective):
    labels = torch.arange(6) % CLASSES
    weights = torch.tensor([1.0, 0.0, 0.5, 2.0, 1.0, 1.0])
    return Batch(torch.randn(6, 3, 2, 2), objective.targets(labels), weights)


def log_softmax(z):
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def by_hand(student, teacher, loss, answers, temperature, teacher_loss):
    """Each image's loss against the teacher, float64."""
    s, t = (np.asarray(value.detach(), np.float64) for value in (student, teacher))
    if answers == "hard":
        y, temperature = np.eye(CLASSES)[t.argmax(-1)], 1.0
    elif "softmax" in (loss, teacher_loss):
        y = np.exp(log_softmax(t / temperature))
    else:
        y = 1 / (1 + np.exp(-t / temperature))
    s = s / temperature
    if loss == "softmax":
        terms = -y * log_softmax(s)
    else:
        terms = y * np.log1p(np.exp(-s)) + (1 - y) * np.log1p(np.exp(s))
    return terms.sum(-1) * temperature**2


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("answers", "temperature"), [("soft", 1.0), ("soft", 3.0), ("hard", 3.0)])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("teacher_loss", ["softmax", "sigmoid"])
def test_the_loss_is_the_closed_form(loss, answers, temperature, share, teacher_loss):
    student, teacher = networks()
    labels = Classification(ObjectiveConfig(loss=loss, label_smoothing=0.1), CLASSES)
    batch = a_batch(labels)
    got = Distillation(labels, teacher, share, answers, temperature, teacher_loss).loss(student, batch)
    own = labels.loss(student, batch)
    taught = by_hand(student(batch.pixels), teacher(batch.pixels), loss, answers, temperature, teacher_loss)
    expected = (1 - share) * own.total.item() + share * (taught * batch.weights.double().numpy()).sum()
    assert got.total.item() == pytest.approx(expected, rel=1e-5)
    assert got.correct == own.correct


def test_soft_gradients_are_those_of_the_divergence_between_both():
    """Cross-entropy and the Kullback-Leibler divergence of torch differ by what the student cannot change."""
    student, teacher = networks()
    labels = Classification(ObjectiveConfig(), CLASSES)
    batch = Batch(torch.randn(5, 3, 2, 2), torch.zeros(5, CLASSES), torch.ones(5))
    Distillation(labels, teacher, 1.0, "soft", 2.0, "softmax").loss(student, batch).total.backward()
    got = student[1].weight.grad.clone()
    student.zero_grad()
    s, t = student(batch.pixels) / 2, teacher(batch.pixels).detach() / 2
    (4 * F.kl_div(s.log_softmax(-1), t.log_softmax(-1), reduction="sum", log_target=True)).backward()
    assert torch.allclose(got, student[1].weight.grad, atol=1e-5)


@pytest.mark.parametrize("answers", ["soft", "hard"])
def test_only_the_student_learns(answers):
    student, teacher = networks()
    labels = Classification(ObjectiveConfig(), CLASSES)
    Distillation(labels, teacher, 0.5, answers, 1.0, "softmax").loss(student, a_batch(labels)).total.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in student.parameters())
    assert all(p.grad is None for p in teacher.parameters())


def test_multilabel_hard_targets_are_all_probable_labels():
    labels = Multilabel(ObjectiveConfig(loss="sigmoid"), 3)
    taught, logits = torch.tensor([[1.0, -1.0, 2.0]]), torch.randn(1, 3)
    got = Distillation(labels, nn.Identity(), 1.0, "hard", 1.0, "sigmoid").per_image(logits, taught)
    expected = F.binary_cross_entropy_with_logits(logits, torch.tensor([[1.0, 0.0, 1.0]]), reduction="sum")
    assert torch.allclose(got[0], expected)


def test_teacher_weight_0_does_not_call_the_teacher_and_1_ignores_the_labels():
    student, teacher = networks()
    labels = Classification(ObjectiveConfig(), CLASSES)
    batch = a_batch(labels)

    def silent(_):
        raise AssertionError("asked")

    assert torch.isfinite(Distillation(labels, silent, 0.0, "soft", 1.0, "softmax").loss(student, batch).total)
    broken = Batch(batch.pixels, torch.full_like(batch.targets, torch.inf), batch.weights)
    assert torch.isfinite(Distillation(labels, teacher, 1.0, "soft", 1.0, "softmax").loss(student, broken).total)


def test_micro_batch_losses_add_up_to_the_batch_loss():
    student, teacher = networks()
    labels = Classification(ObjectiveConfig(), CLASSES)
    batch, objective = a_batch(labels), Distillation(labels, teacher, 0.5, "soft", 2.0, "softmax")
    parts = [objective.loss(student, batch.micro_batch(first, first + 2)).total for first in (0, 2, 4)]
    assert torch.allclose(sum(parts), objective.loss(student, batch).total)


def test_pixels_are_renormalised_for_the_teacher():
    imagenet = Preprocess(size=(8, 8), mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    ours = Preprocess(size=(8, 8))
    image = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8)
    seen = matching_teacher(lambda x: x.flatten(1)[:, :2], imagenet, ours, "ab", "ab")(normalise(image, ours))
    assert torch.allclose(seen, normalise(image, imagenet).flatten(1)[:, :2], atol=1e-6)


def test_images_are_resized_for_a_teacher_of_another_size():
    teacher, student = Preprocess(size=(4, 4)), Preprocess(size=(8, 12))
    pixels, seen = torch.randn(2, 3, 8, 12), []

    def forward(x):
        seen.append(x)
        return torch.zeros(2, 1)

    matching_teacher(forward, teacher, student, "a", "a")(pixels)
    assert seen[0].shape == (2, 3, 4, 4)
    assert torch.allclose(seen[0].mean((2, 3)), pixels.mean((2, 3)), atol=0.2)
    assert torch.equal(seen[0], F.interpolate(pixels, (4, 4), mode="bilinear", antialias=True))
    matching_teacher(forward, student, student, "a", "a")(pixels)
    assert seen[1] is pixels  # nothing to do, nothing done


def test_teacher_logits_are_in_the_students_class_order():
    spec = Preprocess(size=(2, 2))
    teacher = matching_teacher(lambda x: torch.tensor([[1.0, 2.0, 3.0]]), spec, spec, ["b", "c", "a"], ["a", "b", "c"])
    assert teacher(torch.zeros(1, 3, 2, 2)).tolist() == [[3.0, 1.0, 2.0]]


@pytest.mark.parametrize(
    ("teacher", "classes", "words"),
    [
        ({"mean": (0.5,), "std": (0.5,)}, ["cat", "dog"], "1 channels.*student.* 3"),
        ({}, ["cat", "cow", "dog"], "only the teacher has 'cow'"),
        ({}, ["cat"], "only the student has 'dog'"),
    ],
)
def test_a_teacher_that_does_not_fit_is_refused(teacher, classes, words):
    spec = Preprocess(size=(2, 2))
    with pytest.raises(UserError, match=words):
        matching_teacher(nn.Identity(), Preprocess(size=(2, 2), **teacher), spec, classes, ["cat", "dog"])
