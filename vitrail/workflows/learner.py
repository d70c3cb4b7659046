"""What a run trains: the network, what is put around it for the purpose, and the task it is given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from vitrail.errors import UserError
from vitrail.inference.device import autocast
from vitrail.models.build import Network, build, build_with
from vitrail.models.lora import add_lora, merge_lora
from vitrail.models.masked import MaskedPatchNetwork
from vitrail.models.vit import VisionTransformer
from vitrail.tasks import table as tasks
from vitrail.tasks.distillation import Teacher, matching_teacher
from vitrail.tasks.task import Task
from vitrail.training.optimizer import freeze
from vitrail.training.precision import set_types
from vitrail.weights.read import read_weights
from vitrail.workflows.resolve import Plan


def make_task(plan: Plan) -> Task:
    return tasks.make_task(plan.config, plan.model, plan.preprocess, plan.dataset, lambda: _teacher(plan))


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
    alone = card.task == "multilabel" or card.recipe.get("objective", {}).get("loss") == "sigmoid"
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
    with torch.device("meta"):  # nothing is initialised: the tensors of the state are taken as they are
        net = build(plan.model)
        module = _surrounded(plan, net)
    module.load_state_dict({name: tensor.float() for name, tensor in state.items()}, assign=True)
    if plan.config.lora.rank:
        merge_lora(net)
    return net
