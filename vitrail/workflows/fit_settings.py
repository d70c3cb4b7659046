"""The settings of `vitrail.fit`, and what the caller brings to it, checked before anything is written."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from vitrail.config import RunConfig, check_no_unused, check_training, leaves, merge, validate
from vitrail.errors import UserError
from vitrail.inference.device import choose_device
from vitrail.training.batches import batches_per_epoch
from vitrail.training.blocks import transformer_blocks
from vitrail.training.optimizer import parameter_groups
from vitrail.training.precision import choose_precision
from vitrail.training.tensorboard import require_tensorboard
from vitrail.workflows.resolve import parse_settings

UNREAD = (
    "optimizer.freeze",
    "precision.residual",
    "train.batch_size",
    "train.gradient_checkpointing",
)  # what needs our networks
CHOSEN = {"precision": "compute", "train": "device"}  # by the machine, unless the caller says


def fit_config(
    model: nn.Module, batches: Any, overrides: Sequence[str], validates: bool, world: int, before: RunConfig | None
) -> RunConfig:
    """Every setting of a run on `world` processes; `before`: those of the run to resume, whose choices stay."""
    given = parse_settings(overrides)
    for path in leaves(given):
        if not path.startswith(("optimizer.", "schedule.", "precision.", "train.")) or path in UNREAD:
            raise UserError(f"{path} has no effect where the network and the data are your own: leave it out")
    if not validates and "evaluate_every" in given.get("train", {}):
        raise UserError("train.evaluate_every has no effect without evaluate=FUNCTION")
    chosen = {s: {key: getattr(getattr(before, s), key)} for s, key in CHOSEN.items()} if before is not None else {}
    config = validate(RunConfig, {"kind": "custom", **merge(chosen, given)}, "settings")
    train, device = config.train, choose_device(config.train.device)
    if train.compile == "graphs" or (train.compile == "blocks" and not transformer_blocks(model)):
        raise UserError(f"train.compile={train.compile} is not for a network of your own: use off or network")
    if train.compile == "network" and train.parallel == "fsdp":
        raise UserError("train.compile=network does not go with fsdp: use off")
    if train.tensorboard:
        require_tensorboard()
    compute, _ = choose_precision(config.precision.compute, device)
    compiled = "off" if train.compile == "auto" else train.compile
    learned = {"steps": _steps(batches, config), "epochs": None, "device": str(device), "compile": compiled}
    config = config.model_copy(
        update={
            "precision": config.precision.model_copy(update={"compute": compute}),
            "train": train.model_copy(update=learned),
        }
    )
    check_training(config, device.type, world)
    check_no_unused(leaves(given), config)
    parameter_groups(model, config.optimizer)  # that there are some for this optimizer
    return config


def stored_settings(config: RunConfig) -> dict[str, Any]:
    """The settings that such a run has."""
    sections = {"kind", "optimizer", "schedule", "precision", "train"}
    unread: dict[str, set[str]] = {}
    for path in UNREAD:
        section, _, key = path.partition(".")
        unread.setdefault(section, set()).add(key)
    return config.model_dump(mode="json", include=sections, exclude=unread, exclude_none=True)


def _steps(batches: Any, config: RunConfig) -> int:
    train = config.train
    if train.steps is not None:
        return train.steps
    if train.epochs is None:
        raise UserError("say how long to train: steps=1000")
    length = batches_per_epoch(batches)
    if length is None:
        raise UserError("train.epochs needs batches that have a length: set train.steps")
    return max(1, round(train.epochs * length))


def check_arguments(
    model: nn.Module,
    task: Callable[[nn.Module, Any], Tensor],
    batches: Iterable[Any] | Callable[[int], Iterable[Any]],
    evaluate: Callable[[nn.Module], dict[str, float]] | None,
) -> None:
    """What would fail after some time, told at once."""
    if not isinstance(model, nn.Module):
        raise UserError(f"model must be a torch module, not {type(model).__name__}")
    for name, value in {"task": task, **({"evaluate": evaluate} if evaluate is not None else {})}.items():
        if not callable(value):
            raise UserError(f"{name} must be a function, not {type(value).__name__}")
    if isinstance(task, nn.Module) and any(p.requires_grad for p in task.parameters()):
        raise UserError("the task has parameters, which would not be trained: make it a part of the model")
    if isinstance(batches, torch.utils.data.Dataset):
        raise UserError("batches must give batches, and a Dataset gives samples: wrap it in a DataLoader")
    if not hasattr(batches, "__iter__"):
        if not callable(batches):
            raise UserError(f"batches must be a function or something to iterate, not {type(batches).__name__}")
        try:
            inspect.signature(batches).bind(0)
        except TypeError:
            raise UserError("a function as batches takes one argument, the number of the batch to begin with") from None
        except ValueError:  # it has no signature that could be read
            pass
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            raise UserError(f"'{name}' in the state of the module is no tensor, and could not be saved")
        if is_lazy(value):
            raise UserError(f"'{name}' has no size yet: call the module on a batch once before training")
        if value.is_complex():
            raise UserError(f"'{name}' is complex, which the optimizers do not take")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError("nothing is left to train: no parameter of the module requires a gradient")
