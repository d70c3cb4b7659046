"""Resolve the settings of `vitrail.fit` and check its arguments, before anything is written."""

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
from vitrail.workflows.validate import parse_settings

UNREAD = (
    "optimizer.freeze",
    "precision.residual",
    "train.batch_size",
    "train.gradient_checkpointing",
)  # these need a network of vitrail
CHOSEN = {"precision": "compute", "train": "device"}  # chosen automatically; a resumed run keeps them


def fit_config(
    model: nn.Module, batches: Any, overrides: Sequence[str], validates: bool, world: int, before: RunConfig | None
) -> RunConfig:
    """Resolve every setting of a run on `world` processes. `before`: the settings of the run to resume, if any."""
    settings = parse_settings(overrides)
    for path in leaves(settings):
        if not path.startswith(("optimizer.", "schedule.", "precision.", "train.")) or path in UNREAD:
            raise UserError(f"{path} has no effect on your own module and data: leave it out")
    if not validates and "evaluate_every" in settings.get("train", {}):
        raise UserError("train.evaluate_every has no effect without evaluate=FUNCTION")
    chosen = {s: {key: getattr(getattr(before, s), key)} for s, key in CHOSEN.items()} if before is not None else {}
    config = validate(RunConfig, {"kind": "custom", **merge(chosen, settings)}, "settings")
    train, device = config.train, choose_device(config.train.device)
    if train.compile == "graphs" or (train.compile == "blocks" and not transformer_blocks(model)):
        raise UserError(f"train.compile={train.compile} does not work with this module: use off or network")
    if train.compile == "network" and train.parallel == "fsdp":
        raise UserError("train.compile=network does not work with train.parallel=fsdp: use train.compile=off")
    if train.tensorboard:
        require_tensorboard()
    compute, _ = choose_precision(config.precision.compute, device)
    compiled = "off" if train.compile == "auto" else train.compile
    resolved = {"steps": _steps(batches, config), "epochs": None, "device": str(device), "compile": compiled}
    config = config.model_copy(
        update={
            "precision": config.precision.model_copy(update={"compute": compute}),
            "train": train.model_copy(update=resolved),
        }
    )
    check_training(config, device.type, world)
    check_no_unused(leaves(settings), config)
    parameter_groups(model, config.optimizer)  # raises if no parameter suits the optimizer
    return config


def stored_settings(config: RunConfig) -> dict[str, Any]:
    """The settings of such a run that config.toml stores."""
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
        raise UserError("no length of training: pass steps=1000 or epochs=10")
    length = batches_per_epoch(batches)
    if length is None:
        raise UserError("train.epochs needs batches with a length (len): set train.steps instead")
    return max(1, round(train.epochs * length))


def check_arguments(
    model: nn.Module,
    task: Callable[[nn.Module, Any], Tensor],
    batches: Iterable[Any] | Callable[[int], Iterable[Any]],
    evaluate: Callable[[nn.Module], dict[str, float]] | None,
) -> None:
    """Raise UserError for arguments that would fail only later."""
    if not isinstance(model, nn.Module):
        raise UserError(f"model must be a torch module, not {type(model).__name__}")
    for name, value in {"task": task, **({"evaluate": evaluate} if evaluate is not None else {})}.items():
        if not callable(value):
            raise UserError(f"{name} must be a function, not {type(value).__name__}")
    if isinstance(task, nn.Module) and any(p.requires_grad for p in task.parameters()):
        raise UserError("task has parameters, which would not be trained: make it a submodule of the model")
    if isinstance(batches, torch.utils.data.Dataset):
        raise UserError("batches must yield batches, but a Dataset yields samples: wrap it in a DataLoader")
    if not hasattr(batches, "__iter__"):
        if not callable(batches):
            raise UserError(f"batches must be an iterable or a function, not {type(batches).__name__}")
        try:
            inspect.signature(batches).bind(0)
        except TypeError:
            raise UserError("batches as a function must take one argument, the number of the first batch") from None
        except ValueError:  # no readable signature
            pass
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            raise UserError(f"'{name}' in the state dict of the model is not a tensor, so it cannot be saved")
        if is_lazy(value):
            raise UserError(f"'{name}' is a lazy parameter without a shape: call the model on a batch before training")
        if value.is_complex():
            raise UserError(f"'{name}' is complex, which the optimizers do not support")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError("nothing to train: no parameter of the model requires a gradient")
