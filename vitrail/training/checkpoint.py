"""Checkpoints: everything a run needs to go on exactly, in one self-checking safetensors file written atomically.

What is not here needs no saving: order, crops, mixup and dropout are functions of (seed, step).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from vitrail.atomic import whole_file
from vitrail.errors import UserError
from vitrail.training.average import Average


@dataclass
class TrainState:
    """What training changes."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    average: Average | None
    step: int = 0

    def tensors(self) -> dict[str, Tensor]:
        found = {f"model/{name}": tensor for name, tensor in self.model.state_dict().items()}
        if self.average is not None:
            found |= {f"average/{name}": tensor for name, tensor in self.average.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if value is not None:
                    found[f"optimizer/{key}/{name}"] = torch.as_tensor(value)
        return found

    def load(self, tensors: Mapping[str, Tensor], step: int) -> None:
        """Take over saved tensors; the names must be exactly those this run would save."""
        parameters = dict(self.model.named_parameters())
        self.model.load_state_dict(_part(tensors, "model"))
        if self.average is not None:
            self.average.model.load_state_dict(_part(tensors, "average"))
        self.optimizer.state.clear()
        for name, value in _part(tensors, "optimizer").items():
            key, _, parameter_name = name.partition("/")
            parameter = parameters[parameter_name]
            where = parameter.device if value.ndim or self.optimizer.defaults.get("fused") else torch.device("cpu")
            self.optimizer.state[parameter][key] = value.to(where)
        self.step = step


def _part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(f"{prefix}/"): t for name, t in tensors.items() if name.startswith(f"{prefix}/")}


class Checkpoints:
    """The checkpoint files of one run."""

    def __init__(self, folder: Path, keep: int):
        self.folder, self.keep = folder, keep

    def files(self) -> list[Path]:
        """Oldest first; unfinished writes do not count."""
        found = self.folder.glob("step_*.safetensors") if self.folder.is_dir() else []
        return sorted(path for path in found if re.fullmatch(r"step_\d{9}", path.stem))

    def save(self, state: TrainState, about: Mapping[str, Any]) -> Path:
        """Write a checkpoint, then remove the oldest beyond those to keep."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"step_{state.step:09d}.safetensors"
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.tensors().items()}
        facts = {**about, "step": state.step}
        facts["digest"] = digest(tensors, facts)
        try:
            with whole_file(path) as temporary:
                save_file(tensors, temporary, metadata={"vitrail-checkpoint": json.dumps(facts, sort_keys=True)})
        except (SafetensorError, OSError) as error:
            raise UserError(f"cannot write the checkpoint {path}: {error}") from error
        for old in self.files()[: -self.keep]:
            old.unlink(missing_ok=True)
        return path

    def latest(self) -> tuple[dict[str, Tensor], dict[str, Any], list[str]] | None:
        """Tensors and facts of the newest checkpoint that is whole, and a sentence for each damaged one passed over."""
        damaged: list[str] = []
        for path in reversed(self.files()):
            try:
                with safe_open(path, framework="pt") as file:
                    facts = json.loads((file.metadata() or {})["vitrail-checkpoint"])
                    tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                if digest(tensors, facts) != facts["digest"]:
                    raise ValueError("its contents do not match their checksum")
                return tensors, facts, damaged
            except (SafetensorError, OSError, KeyError, ValueError) as error:
                damaged.append(f"{path.name} is damaged and was passed over ({error})")
        if damaged:
            raise UserError(f"no checkpoint in {self.folder} is whole: {'; '.join(damaged)}")
        return None


def digest(tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> str:
    """A checksum of names, shapes, types and every byte of the tensors, and of the facts beside them."""
    total = hashlib.blake2b(digest_size=16)
    others = {key: value for key, value in facts.items() if key != "digest"}
    total.update(json.dumps(others, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        total.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data if tensor.numel() else b"")
    return total.hexdigest()
