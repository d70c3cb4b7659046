"""What training changes, by name: to be written down, and to be taken up again by any number of processes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.distributed import Ranks
from vitrail.errors import UserError
from vitrail.models.legacy_names import new_name
from vitrail.training.ema import EMA
from vitrail.training.parallel import full_tensor, local_shard, shard_rows

Rows = tuple[int, int]  # first, and one after the last
ReadTensor = Callable[[str, Rows | None], Tensor]  # a saved tensor by name, or some of its rows


@dataclass
class TrainState:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    ema: EMA | None = None
    step: int = 0
    skipped_batches: int = 0  # by rollbacks: step s trains on batch s + skipped_batches
    rollbacks: int = 0  # how often it went back
    nonfinite_steps: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.int64))  # in a row
    network: nn.Module | None = None  # the model compiled or distributed, where it is
    last_good_step: int | None = None  # of the last checkpoint that can be rolled back to
    validated_step: int = 0  # the last step that was measured on held-out images
    load_count: int = 0  # how often a checkpoint was taken over, which makes the tensors of the optimizer anew

    @property
    def forward_model(self) -> nn.Module:
        return self.network if self.network is not None else self.model

    def __post_init__(self) -> None:
        self.nonfinite_steps = self.nonfinite_steps.to(local_shard(next(self.model.parameters())).device)

    def tensors(self) -> dict[str, Tensor]:
        found = {f"model/{name}": tensor for name, tensor in self.model.state_dict().items()}
        if self.ema is not None:
            found |= {f"average/{name}": tensor for name, tensor in self.ema.tensors.items()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if value is not None:
                    found[f"optimizer/{key}/{name}"] = torch.as_tensor(value)
        return found

    def final_weights(self, ranks: Ranks) -> dict[str, Tensor]:
        """Every tensor of the model, averaged where there is an average, whole and on the CPU, for the first process.
        All processes call this together."""
        found, average = {}, self.ema.tensors if self.ema is not None else {}
        first: dict[int, str] = {}  # a parameter that several layers share has one average
        parameters = self.model.named_parameters(remove_duplicate=False)
        names = {name: first.setdefault(id(parameter), name) for name, parameter in parameters}
        for name, tensor in self.model.state_dict().items():
            one = full_tensor(average.get(names.get(name, name), tensor))
            if ranks.is_first:
                found[name] = one.to("cpu", copy=True, memory_format=torch.contiguous_format)
        return found

    @torch.no_grad()
    def load(self, names: Collection[str], read: ReadTensor, facts: Mapping[str, Any]) -> None:
        """Take over a checkpoint; the tensors must be exactly those this run would save."""
        own = {name: tensor for name, tensor in self.tensors().items() if not name.startswith("optimizer/")}
        moments = [name for name in names if name.startswith("optimizer/")]
        stored = {name if name in own else new_name(name): name for name in names if name not in moments}
        odd = sorted(own.keys() ^ stored.keys())
        if odd:
            raise UserError(f"the checkpoint is of another network: '{odd[0]}' is only in one of them")
        for name, tensor in own.items():
            ours, saved = local_shard(tensor), read(stored[name], shard_rows(tensor))
            if (ours.shape, ours.dtype) != (saved.shape, saved.dtype):
                kinds = f"{_kind(saved)} in it and {_kind(ours)} here"
                raise UserError(f"the checkpoint is of another network: '{name}' is {kinds}")
            ours.copy_(saved)
        parameters = dict(self.model.named_parameters())
        self.optimizer.state.clear()
        for name in moments:
            key, _, parameter_name = name.removeprefix("optimizer/").partition("/")
            parameter = parameters.get(parameter_name, parameters.get(new_name(parameter_name)))
            value = None if parameter is None else self._moment(parameter, name, read)
            if parameter is None or value is None or value.shape not in ((), parameter.shape):
                raise UserError(f"the checkpoint is of another network: '{name}' is of none of its parameters")
            self.optimizer.state[parameter][key] = value
        self.step, self.skipped_batches, self.rollbacks = facts["step"], facts["passed"], facts["rollbacks"]
        self.validated_step = facts["evaluated"]
        self.nonfinite_steps.fill_(facts["unfit"])
        self.load_count += 1

    def _moment(self, parameter: Tensor, name: str, read: ReadTensor) -> Tensor:
        """What an optimizer keeps of a parameter, divided as the parameter is."""
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


def _kind(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
