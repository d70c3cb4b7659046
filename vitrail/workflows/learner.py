"""What a run trains: the network, what is put around it for the purpose, and the task it is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from vitrail.config import ModelConfig
from vitrail.distributed import Ranks
from vitrail.errors import UserError
from vitrail.inference.device import autocast
from vitrail.interrupt import Interrupts
from vitrail.models.build import Network, build, build_with
from vitrail.models.flops import macs
from vitrail.models.lora import add_lora, merge_lora
from vitrail.models.masked import MaskedPatchNetwork
from vitrail.models.vit import VisionTransformer
from vitrail.tasks.batch import Objective
from vitrail.tasks.classification import Classification, class_weights
from vitrail.tasks.distillation import Distillation, Teacher, matching_teacher
from vitrail.tasks.masked_patch import MaskedPatch
from vitrail.training.loop import Evaluator
from vitrail.training.optimizer import freeze
from vitrail.training.precision import set_types
from vitrail.weights.read import read_weights
from vitrail.workflows.batches import Targets, TrainingBatches, classification_evaluator, masked_evaluator, pattern
from vitrail.workflows.fit import Learning
from vitrail.workflows.memory import parallel_for
from vitrail.workflows.resolve import Plan


@dataclass(frozen=True)
class Task:
    """What is learned."""

    objective: Objective
    targets: Targets
    labels: Classification | None  # none: nothing is classified

    def evaluator(self, plan: Plan, ranks: Ranks, interrupts: Interrupts, last: Callable[[], bool]) -> Evaluator | None:
        """None where no images are watched. `last` tells whether training has come to its end."""
        if "val" not in plan.dataset.splits:
            return None
        if self.labels is None:
            return masked_evaluator(plan, self.objective, ranks, interrupts, last)
        return classification_evaluator(plan, self.labels, ranks, interrupts, last)


def make_task(plan: Plan) -> Task:
    config = plan.config
    if config.kind == "masked":
        assert isinstance(plan.model, ModelConfig)  # the plan refuses others
        objective = MaskedPatch(config.masked, plan.preprocess, plan.model.cell, config.train.seed)
        return Task(objective, _no_targets, None)
    dataset, train = plan.dataset, plan.dataset.splits["train"]
    counts = train.labels_of(np.arange(len(train))).sum(0) if dataset.several else np.bincount(train.labels)
    counts = np.pad(counts, (0, len(dataset.classes) - len(counts)))
    weights = class_weights(config.objective.class_weights, dataset.classes, counts.tolist())
    labels = Classification(config.objective, len(dataset.classes), weights, dataset.several)
    if not config.objective.teacher:
        return Task(labels, labels.targets, labels)
    settings = config.objective
    share = 0.5 if settings.teacher_share is None else settings.teacher_share
    teacher, loss = _teacher(plan)
    distillation = Distillation(labels, teacher, share, settings.teacher_answers, settings.temperature, loss)
    return Task(distillation, labels.targets, labels)


def learning_of(plan: Plan, task: Task, ranks: Ranks, interrupts: Interrupts) -> Learning:
    """The task on the images of a plan."""
    settings = plan.config.train
    # Corrupted patches are drawn by the host anew in each step, which a graph cannot repeat; and recomputing keeps
    # random numbers of its own, which a graph would not know.
    graphs = settings.compile == "graphs" and ranks.world == 1 and task.labels is not None and not settings.recompute
    return Learning(
        plan.config,
        plan.device,
        parallel_for(plan, ranks),
        task.objective,
        lambda progress: TrainingBatches(plan, task.targets, ranks, progress),
        lambda last: task.evaluator(plan, ranks, interrupts, last),
        pattern(plan, task.targets, settings.batch_size // ranks.world) if ranks.world > 1 else None,
        graphs,
        6.0 * macs(plan.model),
    )


def _no_targets(labels: Tensor) -> Tensor:
    return torch.empty(len(labels), 0, device=labels.device)


def _teacher(plan: Plan) -> tuple[Teacher, Literal["softmax", "sigmoid"]]:
    """The teacher, and the loss that it was trained with; softmax where its file does not say."""
    weights = read_weights(plan.config.objective.teacher)
    if weights.card.classes is None or not len(weights.card.classes):
        raise UserError("the teacher does not say which classes it tells apart: distil from weights of a vitrail run")
    net = build_with(weights.card.model, weights.state).to(plan.device).eval().requires_grad_(False)
    cast = autocast(plan.config.precision.compute, plan.device)

    def forward(pixels: Tensor) -> Tensor:
        with cast():
            return net(pixels)

    card = weights.card
    teacher = matching_teacher(forward, card.preprocess, plan.preprocess, card.classes, plan.dataset.classes)
    alone = card.several or card.recipe.get("objective", {}).get("loss") == "sigmoid"
    return teacher, "sigmoid" if alone else "softmax"


def learner(plan: Plan, net: Network) -> nn.Module:
    """The network as it is trained: with its low-rank updates, or its head for masked patches; parts of it frozen."""
    config = plan.config
    module = _surrounded(plan, net)
    freeze(net, config.optimizer.freeze)
    set_types(module, config.precision)
    if config.train.recompute and hasattr(module, "set_recompute"):
        module.set_recompute(True)  # type: ignore[operator]
    return module.to(plan.device)


def _surrounded(plan: Plan, net: Network) -> nn.Module:
    if plan.config.kind == "masked":
        assert isinstance(net, VisionTransformer)
        return MaskedPatchNetwork(net, plan.config.masked.target)
    if plan.config.lora.rank:
        add_lora(net, plan.config.lora)
    return net


def plain_network(plan: Plan, state: Mapping[str, Tensor]) -> Network:
    """The network that a run keeps, from the tensors of what it trained."""
    net = build(plan.model)
    module = _surrounded(plan, net)
    module.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    if plan.config.lora.rank:
        merge_lora(net)
    return net
