"""Knowledge distillation: part of the loss is measured against a teacher's answers instead of the labels."""

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
    """A task with labels, and a teacher: (1 - share) times the loss of the labels, and share times the same loss of the
    teacher's answers, the same cross-entropy with the same class weights. All but the loss is the task's own.

    Soft answers are its probabilities, where logits of both are divided by the temperature T and the loss is multiplied
    by T squared, so that gradients do not shrink with T (Hinton et al. 2015). Hard answers are its first choice, never
    smoothed (DeiT); where images have any number of labels, each class that it finds likelier than not. Logits are
    taken one by one, by sigmoid, only if both were trained so: those of softmax mean nothing alone.
    """

    name = "distillation"

    def __init__(
        self,
        labels: CrossEntropy,
        teacher: Teacher,
        share: float,
        answers: Literal["soft", "hard"],
        temperature: float,
        teacher_loss: Literal["softmax", "sigmoid"],
    ):
        self.labels, self.teacher, self.share = labels, teacher, share
        self.answers, self.temperature = answers, temperature
        self.one_by_one = labels.config.loss == teacher_loss == "sigmoid"
        self.graph_safe = labels.graph_safe

    def targets(self, labels: Tensor) -> Tensor:
        return self.labels.targets(labels)

    def validation(self) -> Validation:
        return self.labels.validation()

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        logits = model(batch.pixels)
        own = self.labels.loss_of_logits(logits, batch.targets, batch.weights)
        if self.share == 0:
            return own
        with torch.no_grad():
            taught = self.teacher(batch.pixels)
        total = (self.per_image(logits, taught) * batch.weights).sum()
        if self.share < 1:  # else the loss of the labels counts nothing, not even where it is infinite
            total = (1 - self.share) * own.total + self.share * total
        return Loss(total, own.correct)

    def per_image(self, logits: Tensor, taught: Tensor) -> Tensor:
        """The loss of each image against the teacher's logits, both (B, K): float32 (B,)."""
        taught = taught.detach().float()
        if self.answers == "hard":
            return self.labels.per_image(logits, self.labels.hard_targets(taught, self._likely(taught)))
        likely, logits = self._likely(taught / self.temperature), logits.float() / self.temperature
        return self.labels.per_image(logits, likely) * self.temperature**2

    def _likely(self, taught: Tensor) -> Tensor:
        return taught.sigmoid() if self.one_by_one else taught.softmax(-1)


def matching_teacher(
    forward: Teacher,
    teacher: Preprocess,
    student: Preprocess,
    teacher_classes: Sequence[str],
    student_classes: Sequence[str],
) -> Teacher:
    """A teacher for pixels made for the student, with its classes in the student's order."""
    if teacher.channels != student.channels:
        raise UserError(
            f"the teacher takes images with {teacher.channels} channels and the student with {student.channels}: "
            "both must take the same"
        )
    _same_classes(teacher_classes, student_classes)
    place = {name: index for index, name in enumerate(teacher_classes)}
    order = torch.tensor([place[name] for name in student_classes])
    scales = [s / t for s, t in zip(student.std, teacher.std, strict=True)]
    shifts = [(s - t) / d for s, t, d in zip(student.mean, teacher.mean, teacher.std, strict=True)]
    scale, shift = (torch.tensor(values).view(1, -1, 1, 1) for values in (scales, shifts))

    def answer(pixels: Tensor) -> Tensor:
        nonlocal order, scale, shift
        order, scale, shift = (constant.to(pixels.device) for constant in (order, scale, shift))
        if (teacher.mean, teacher.std) != (student.mean, student.std):
            pixels = pixels * scale + shift
        if tuple(pixels.shape[-2:]) != teacher.size:
            pixels = F.interpolate(pixels, teacher.size, mode="bilinear", antialias=True)
        return forward(pixels)[:, order]

    return answer


def _same_classes(teacher: Sequence[str], student: Sequence[str]) -> None:
    only = sorted(set(teacher) ^ set(student))
    if only:
        whose = "teacher" if only[0] in teacher else "student"
        raise UserError(
            f"only the {whose} has the class '{only[0]}' (one of {len(only)} that differ): a teacher needs exactly the "
            "classes of the data"
        )
