"""Knowledge distillation: part of the loss uses the predictions of a teacher as targets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import Preprocess
from vitrail.errors import UserError
from vitrail.tasks.cross_entropy import CrossEntropy
from vitrail.tasks.task import Batch, Loss, Validation

Teacher = Callable[[Tensor], Tensor]  # normalised pixels (B, C, H, W) -> logits (B, K)


class Distillation:
    """A task with labels and a teacher.

    The loss is (1 - teacher_weight) * loss(labels) + teacher_weight * loss(teacher's predictions), both with the loss
    function and class weights of the task `labels`. Everything else is that of `labels`.

    Soft targets are the teacher's probabilities. Then the logits of both networks are divided by the temperature T, and
    the loss is multiplied by T squared, so that gradients do not shrink with T (Hinton et al. 2015). Hard targets are
    the teacher's predicted class without smoothing (DeiT); for multilabel, all classes above a probability of 0.5.
    Probabilities are sigmoids if both networks were trained with sigmoid, else a softmax.
    """

    name = "distillation"

    def __init__(
        self,
        labels: CrossEntropy,
        teacher: Teacher,
        teacher_weight: float,
        teacher_targets: Literal["soft", "hard"],
        temperature: float,
        teacher_loss: Literal["softmax", "sigmoid"],
    ):
        self.labels, self.teacher, self.teacher_weight = labels, teacher, teacher_weight
        self.teacher_targets, self.temperature = teacher_targets, temperature
        self.use_sigmoid = labels.config.loss == teacher_loss == "sigmoid"
        self.graph_safe = labels.graph_safe

    def targets(self, labels: Tensor) -> Tensor:
        return self.labels.targets(labels)

    def validation(self) -> Validation:
        return self.labels.validation()

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        logits = model(batch.pixels)
        label_loss = self.labels.loss_of_logits(logits, batch.targets, batch.weights)
        if self.teacher_weight == 0:
            return label_loss
        with torch.no_grad():
            teacher_logits = self.teacher(batch.pixels)
        total = (self.per_image(logits, teacher_logits) * batch.weights).sum()
        if self.teacher_weight < 1:  # not 0 * label_loss, which is NaN if label_loss is infinite
            total = (1 - self.teacher_weight) * label_loss.total + self.teacher_weight * total
        return Loss(total, label_loss.correct)

    def per_image(self, logits: Tensor, teacher_logits: Tensor) -> Tensor:
        """The loss of each image with the teacher's predictions as targets; logits (B, K) -> float32 (B,)."""
        teacher_logits = teacher_logits.detach().float()
        if self.teacher_targets == "hard":
            targets = self.labels.hard_targets(teacher_logits, self._probabilities(teacher_logits))
            return self.labels.per_image(logits, targets)
        targets, logits = self._probabilities(teacher_logits / self.temperature), logits.float() / self.temperature
        return self.labels.per_image(logits, targets) * self.temperature**2

    def _probabilities(self, teacher_logits: Tensor) -> Tensor:
        return teacher_logits.sigmoid() if self.use_sigmoid else teacher_logits.softmax(-1)


def matching_teacher(
    forward: Teacher,
    teacher: Preprocess,
    student: Preprocess,
    teacher_classes: Sequence[str],
    student_classes: Sequence[str],
) -> Teacher:
    """Adapt a teacher to the student: its preprocessing (normalisation, image size) and its order of classes.

    Parameters
    ----------
    forward
        The teacher's network.
    teacher, student
        Their preprocessing.
    teacher_classes, student_classes
        Their classes, which must be the same up to order.
    """
    if teacher.channels != student.channels:
        raise UserError(
            f"the teacher needs images with {teacher.channels} channels, the student images with {student.channels}: "
            "use a teacher with the same number of channels"
        )
    _check_same_classes(teacher_classes, student_classes)
    index_of = {name: index for index, name in enumerate(teacher_classes)}
    order = torch.tensor([index_of[name] for name in student_classes])
    scales = [s / t for s, t in zip(student.std, teacher.std, strict=True)]
    shifts = [(s - t) / d for s, t, d in zip(student.mean, teacher.mean, teacher.std, strict=True)]
    scale, shift = (torch.tensor(values).view(1, -1, 1, 1) for values in (scales, shifts))

    def teacher_logits(pixels: Tensor) -> Tensor:
        nonlocal order, scale, shift
        order, scale, shift = (constant.to(pixels.device) for constant in (order, scale, shift))
        if (teacher.mean, teacher.std) != (student.mean, student.std):
            pixels = pixels * scale + shift
        if tuple(pixels.shape[-2:]) != teacher.size:
            pixels = F.interpolate(pixels, teacher.size, mode="bilinear", antialias=True)
        return forward(pixels)[:, order]

    return teacher_logits


def _check_same_classes(teacher: Sequence[str], student: Sequence[str]) -> None:
    different = sorted(set(teacher) ^ set(student))
    if different:
        owner = "teacher" if different[0] in teacher else "student"
        raise UserError(
            f"the teacher must have the classes of the data, but only the {owner} has '{different[0]}' "
            f"(different classes: {len(different)})"
        )
