"""The network of a run: at the start, while it is trained (with LoRA or a masked-patch head), and as it is saved.

In: a `Plan`. Out: the network with its starting weights, the module to train, the task, and at the end the network to
save.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from rich.console import Console
from torch import Tensor, nn

from vitrail.errors import UserError
from vitrail.inference.device import autocast
from vitrail.models.build import Network, build_from_state_dict, build_model
from vitrail.models.lora import add_lora, merge_lora
from vitrail.models.masked import MaskedPatchNetwork
from vitrail.models.mimetic import mimetic_
from vitrail.models.vit import VisionTransformer
from vitrail.tasks import table as tasks
from vitrail.tasks.distillation import Teacher, matching_teacher
from vitrail.tasks.task import Task
from vitrail.terminal import escape
from vitrail.training.optimizer import freeze
from vitrail.training.precision import set_dtypes
from vitrail.weights.read import read_weights
from vitrail.weights.resize import adapt_state_dict
from vitrail.workflows.resolve import Plan


def build_starting_network(plan: Plan, console: Console) -> Network:
    """Build the network with random weights, or with the starting weights adapted to it."""
    torch.manual_seed(plan.config.train.seed)
    net = build_model(plan.model)
    if plan.config.model.init == "mimetic":
        mimetic_(net)
    if plan.weights is not None:
        resample = plan.config.model.resample
        state, changes = adapt_state_dict(plan.weights.state, plan.weights.card.model, plan.model, resample)
        missing = set(net.load_state_dict(state, strict=False).missing_keys)
        assert missing <= {"head.weight", "head.bias"}, missing
        for change in changes:
            console.print(f"[dim]{escape(change)}[/]")
    return net.to(plan.device)


def task_of_plan(plan: Plan) -> Task:
    """What is learned: the task of the plan, with its teacher if there is one."""
    return tasks.build_task(plan.config, plan.model, plan.preprocess, plan.dataset, lambda: _teacher(plan))


def _teacher(plan: Plan) -> tuple[Teacher, Literal["softmax", "sigmoid"]]:
    """The teacher, and the loss that it was trained with; softmax if its file has no loss."""
    weights = read_weights(plan.config.objective.teacher)
    if weights.card.classes is None or not len(weights.card.classes):
        raise UserError(
            "the weights of objective.teacher have no class names: use the weights of a vitrail run as the teacher"
        )
    net = build_from_state_dict(weights.card.model, weights.state).to(plan.device).eval().requires_grad_(False)
    cast = autocast(plan.config.precision.compute, plan.device)

    def forward(pixels: Tensor) -> Tensor:
        with cast():
            return net(pixels)

    card = weights.card
    teacher = matching_teacher(forward, card.preprocess, plan.preprocess, card.classes, plan.dataset.classes)
    sigmoid = card.task == "multilabel" or card.recipe.get("objective", {}).get("loss") == "sigmoid"
    return teacher, "sigmoid" if sigmoid else "softmax"


def build_trained_module(plan: Plan, net: Network) -> nn.Module:
    """The module to train: the network with LoRA or a masked-patch head, and with its frozen parameters."""
    config = plan.config
    module = _with_extras(plan, net)
    freeze(net, config.optimizer.freeze)
    set_dtypes(module, config.precision)
    if config.train.gradient_checkpointing and hasattr(module, "set_grad_checkpointing"):
        module.set_grad_checkpointing(True)  # type: ignore[operator]
    return module.to(plan.device)


def _with_extras(plan: Plan, net: Network) -> nn.Module:
    if plan.config.kind == "masked":
        assert isinstance(net, VisionTransformer)
        return MaskedPatchNetwork(net, plan.config.masked.target)
    if plan.config.lora.rank:
        add_lora(net, plan.config.lora)
    return net


def final_network(plan: Plan, state: Mapping[str, Tensor]) -> Network:
    """The network to save, from the state dict of the trained module; LoRA is merged into it."""
    with torch.device("meta"):  # no initialization: load_state_dict assigns the tensors
        net = build_model(plan.model)
        module = _with_extras(plan, net)
    module.load_state_dict({name: tensor.float() for name, tensor in state.items()}, assign=True)
    if plan.config.lora.rank:
        merge_lora(net)
    return net
