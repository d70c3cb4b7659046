"""What a run trains: the network, what is put around it for the purpose, and the task it is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from torch import Tensor, nn

from vitrail.distributed import Ranks
from vitrail.errors import UserError
from vitrail.inference.device import autocast
from vitrail.interrupt import Interrupts
from vitrail.models.build import Network, build, build_with
from vitrail.models.encoder import Encoder
from vitrail.models.flops import macs
from vitrail.models.lora import add_lora, merge_lora
from vitrail.models.masked import MaskedPatchNetwork
from vitrail.models.vit import VisionTransformer
from vitrail.tasks import table as tasks
from vitrail.tasks.distillation import Teacher, matching_teacher
from vitrail.tasks.task import Task
from vitrail.training.loop import Evaluator
from vitrail.training.optimizer import freeze
from vitrail.training.precision import set_types
from vitrail.weights.read import read_weights
from vitrail.workflows.batches import TrainingBatches, pattern, validation_evaluator
from vitrail.workflows.fit import Learning
from vitrail.workflows.memory import parallel_for
from vitrail.workflows.resolve import Plan


def make_task(plan: Plan) -> Task:
    return tasks.make_task(plan.config, plan.model, plan.preprocess, plan.dataset, lambda: _teacher(plan))


def learning_of(plan: Plan, task: Task, ranks: Ranks, interrupts: Interrupts) -> Learning:
    """The task on the images of a plan."""
    settings = plan.config.train
    # Recomputing keeps random numbers of its own, which a graph would not know.
    graphs = settings.compile == "graphs" and ranks.world == 1 and task.graph_safe and not settings.recompute

    def evaluator(last: Callable[[], bool]) -> Evaluator | None:
        watched = "val" in plan.dataset.splits
        return validation_evaluator(plan, task, ranks, interrupts, last) if watched else None

    return Learning(
        plan.config,
        plan.device,
        parallel_for(plan, ranks),
        task.loss,
        lambda progress: TrainingBatches(plan, task.targets, ranks, progress),
        evaluator,
        pattern(plan, task.targets, settings.batch_size // ranks.world) if ranks.world > 1 else None,
        graphs,
        6.0 * macs(plan.model),
    )


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
    for part in module.modules():
        if isinstance(part, Encoder):
            part.recompute = config.train.recompute
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
