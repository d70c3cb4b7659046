"""The training state: what a checkpoint saves and loads, by tensor name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.config import RunConfig
from vitrail.distributed import Ranks
from vitrail.errors import UserError
from vitrail.models.legacy_names import new_name
from vitrail.training.ema import EMA
from vitrail.training.optimizer import build_optimizer
from vitrail.training.parallel import (
    choose_parallel,
    compile_blocks,
    distribute,
    full_tensor,
    local_shard,
    shard_rows,
)

Rows = tuple[int, int]  # first row, and one past the last
ReadTensor = Callable[[str, Rows | None], Tensor]  # (name, rows) -> a saved tensor, or some of its rows


@dataclass
class TrainState:
    """Model, optimizer, moving average and counters of a run."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    ema: EMA | None = None
    step: int = 0
    skipped_batches: int = 0  # by rollbacks: step s trains on batch s + skipped_batches
    rollbacks: int = 0
    nonfinite_steps: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.int64))  # in a row
    wrapped: nn.Module | None = None  # the model as DDP, FSDP or torch.compile wraps it
    last_good_step: int | None = None  # step of the last checkpoint to roll back to that this launch saved or loaded
    validated_step: int = 0
    load_count: int = 0  # each load replaces the tensors of the optimizer, which a CUDA graph refers to

    @property
    def forward_model(self) -> nn.Module:
        """The module to call in training."""
        return self.wrapped if self.wrapped is not None else self.model

    def __post_init__(self) -> None:
        self.nonfinite_steps = self.nonfinite_steps.to(local_shard(next(self.model.parameters())).device)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors to save, by their name in a checkpoint."""
        tensors = {f"model/{name}": tensor for name, tensor in self.model.state_dict().items()}
        if self.ema is not None:
            tensors |= {f"average/{name}": tensor for name, tensor in self.ema.tensors.items()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if value is not None:
                    tensors[f"optimizer/{key}/{name}"] = torch.as_tensor(value)
        return tensors

    def final_weights(self, ranks: Ranks) -> dict[str, Tensor]:
        """The state dict to keep, averaged if there is an EMA: on the CPU of the first process, empty on the others.
        All processes must call this."""
        weights, averages = {}, self.ema.tensors if self.ema is not None else {}
        first_name: dict[int, str] = {}  # the EMA has a parameter that layers share once, by its first name
        parameters = self.model.named_parameters(remove_duplicate=False)
        ema_names = {name: first_name.setdefault(id(parameter), name) for name, parameter in parameters}
        for name, tensor in self.model.state_dict().items():
            # Averages keep their dtype, which may be more precise than that of the model.
            gathered = full_tensor(averages.get(ema_names.get(name, name), tensor))
            if ranks.is_first:
                weights[name] = gathered.to("cpu", copy=True, memory_format=torch.contiguous_format)
        return weights

    @torch.no_grad()
    def load(self, names: Collection[str], read: ReadTensor, facts: Mapping[str, Any]) -> None:
        """Load a checkpoint. Its tensors must be exactly those this run would save.

        Parameters
        ----------
        names
            Names of the saved tensors.
        read
            Reads a saved tensor.
        facts
            The counters, by their key in the checkpoint.
        """
        targets = {name: tensor for name, tensor in self.tensors().items() if not name.startswith("optimizer/")}
        optimizer_names = [name for name in names if name.startswith("optimizer/")]
        stored = {name if name in targets else new_name(name): name for name in names if name not in optimizer_names}
        unmatched = sorted(targets.keys() ^ stored.keys())
        if unmatched:
            owner = "network" if unmatched[0] in targets else "checkpoint"
            raise UserError(f"the checkpoint does not fit this network: only the {owner} has '{unmatched[0]}'")
        for name, tensor in targets.items():
            target, saved = local_shard(tensor), read(stored[name], shard_rows(tensor))
            if (target.shape, target.dtype) != (saved.shape, saved.dtype):
                difference = f"{_describe(saved)} in the checkpoint and {_describe(target)} in the network"
                raise UserError(f"the checkpoint does not fit this network: '{name}' is {difference}")
            target.copy_(saved)
        parameters = dict(self.model.named_parameters())
        self.optimizer.state.clear()
        for name in optimizer_names:
            key, _, parameter_name = name.removeprefix("optimizer/").partition("/")
            parameter = parameters.get(parameter_name, parameters.get(new_name(parameter_name)))
            value = None if parameter is None else self._read_optimizer_state(parameter, name, read)
            if parameter is None or value is None or value.shape not in ((), parameter.shape):
                raise UserError(f"the checkpoint does not fit this network: no parameter matches '{name}'")
            self.optimizer.state[parameter][key] = value
        # These keys are part of the file format.
        self.step, self.skipped_batches, self.rollbacks = facts["step"], facts["passed"], facts["rollbacks"]
        self.validated_step = facts["evaluated"]
        self.nonfinite_steps.fill_(facts["unfit"])
        self.load_count += 1

    def _read_optimizer_state(self, parameter: Tensor, name: str, read: ReadTensor) -> Tensor:
        """A tensor of the optimizer's state, sharded like its parameter."""
        device, rows = local_shard(parameter).device, shard_rows(parameter)
        value = read(name, None if rows is None or "/step/" in name else rows)
        if value.ndim == 0:
            return value.to(device if self.optimizer.defaults.get("fused") else torch.device("cpu"))
        if rows is None:
            return value.to(device)
        from torch.distributed.tensor import DTensor

        assert isinstance(parameter, DTensor)
        return DTensor.from_local(
            value.to(device),
            parameter.device_mesh,
            parameter.placements,
            shape=parameter.shape,
            stride=parameter.stride(),
        )


def build_train_state(model: nn.Module, config: RunConfig, device: torch.device, ranks: Ranks) -> TrainState:
    """Distribute and compile the model as configured, and build its optimizer and moving average."""
    train, parallel = config.train, choose_parallel(model, config.train, ranks, device)
    # FSDP works block by block. A network small enough for CUDA graphs would gain 5 % if compiled as a whole, but
    # compiling that takes longer than most of its runs win back.
    by_blocks = train.compile in ("blocks", "graphs") or parallel == "fsdp"
    if train.compile != "off" and by_blocks:
        compile_blocks(model)
    wrapped = distribute(model, parallel, config.precision, device)
    if train.compile != "off" and not by_blocks:
        wrapped = torch.compile(wrapped)  # type: ignore[assignment]
    optimizer = build_optimizer(model, config.optimizer)
    ema = EMA(model, train.ema, train.ema_warmup) if train.ema else None
    return TrainState(model, optimizer, ema, wrapped=wrapped)


def _describe(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
