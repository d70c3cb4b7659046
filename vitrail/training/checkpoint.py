"""Checkpoints: everything a run needs to go on exactly, in self-checking safetensors files written atomically.

What is not here needs no saving: order, crops, mixup and dropout are functions of (seed, step). Where weights are
divided among processes each writes its own rows, and any number of processes can read them again. No pickle.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vitrail.atomic import atomic_write
from vitrail.distributed import SINGLE_PROCESS, Ranks
from vitrail.errors import UserError, error_reason
from vitrail.training.parallel import local_shard, shard_rows
from vitrail.training.state import Rows, TrainState

NAME = re.compile(r"step_(\d{9})(?:\.part_(\d+)_of_(\d+))?\.safetensors")
HEADER = "vitrail-checkpoint"
ABOUT = "about/"  # before the names of arrays among the facts, which are too long for a header
SEEN_WITHIN = 30.0  # seconds, until a shared disk shows what other machines wrote


class _Facts(BaseModel):
    """What every checkpoint says of itself. Runs add their own."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)
    step: int = Field(ge=0)
    passed: int = Field(ge=0)
    rollbacks: int = Field(ge=0)
    evaluated: int = Field(ge=0)
    unfit: int = Field(ge=0, lt=2**31)
    seconds: float = Field(default=0.0, ge=0)
    rows: dict[str, Annotated[list[int], Field(min_length=2, max_length=2)]]
    save: str = ""


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint on disk, known to be whole."""

    parts: list[Path]
    facts: dict[str, Any]  # of the first part, which has those of the run
    rows: list[dict[str, Rows]]  # of each part: which rows it has of what is divided
    where: dict[str, list[int]]  # parts that hold a tensor

    def load_into(self, state: TrainState) -> None:
        state.load(self.where.keys(), self.read, self.facts)

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        """A tensor, or some of its rows, whatever the parts are."""
        found = []
        for part in self.where[name]:
            first, last = self.rows[part].get(name, (0, 0))
            low, high = (first, last) if rows is None else (max(first, rows[0]), min(last, rows[1]))
            if name in self.rows[part] and low >= high:
                continue
            with safe_open(self.parts[part], framework="pt") as file:
                if name not in self.rows[part]:
                    tensor = file.get_tensor(name)
                    return tensor if rows is None else tensor[slice(*rows)]
                found.append(file.get_slice(name)[low - first : high - first])
        if found:
            return torch.cat(found)
        with safe_open(self.parts[self.where[name][0]], framework="pt") as file:  # no rows are this process's
            return file.get_tensor(name)[:0]


class CheckpointManager:
    """The checkpoint files of one run."""

    def __init__(self, folder: Path, keep: int, ranks: Ranks = SINGLE_PROCESS, every: int = 1):
        """Kept are the newest, and of those at every so manieth step the `keep` newest: one that was written because
        time had passed takes the place of none of these."""
        self.folder, self.keep, self.ranks, self.every = folder, keep, ranks, every

    def steps(self) -> list[tuple[int, list[Path]]]:
        """Step and parts of what is complete, oldest first; unfinished writes do not count."""
        found: dict[tuple[int, int], dict[int, Path]] = {}
        try:
            paths = list(self.folder.iterdir()) if self.folder.is_dir() else []
        except PermissionError as error:
            raise UserError(f"cannot read {self.folder}: {error_reason(error)}") from error
        for path in paths:
            match = NAME.fullmatch(path.name)
            if match:
                step, part, count = int(match[1]), int(match[2] or 1), int(match[3] or 1)
                found.setdefault((step, count), {})[part] = path
        whole = {key: parts for key, parts in found.items() if len(parts) == key[1]}
        return [(step, [parts[number] for number in sorted(parts)]) for (step, _), parts in sorted(whole.items())]

    def facts(self) -> dict[str, Any]:
        """What the newest says of its run, without looking whether it is whole; nothing where there is none."""
        steps = self.steps()
        return _facts(steps[-1][1][0]) if steps else {}

    def save(self, state: TrainState, about: Mapping[str, Any]) -> None:
        """Write a checkpoint, then remove the oldest beyond those to keep. All processes call this together."""
        tensors = state.tensors()
        divided = {name: rows for name, tensor in tensors.items() if (rows := shard_rows(tensor)) is not None}
        count = self.ranks.world_size if divided else 1
        failure = ""
        path = self.folder / f"step_{state.step:09d}.safetensors"
        if count > 1:
            path = path.with_suffix(f".part_{self.ranks.rank + 1}_of_{count}.safetensors")
        if self.ranks.rank < count:
            own = {n: t for n, t in tensors.items() if n in divided or self.ranks.is_first}
            told = about if self.ranks.is_first else {}
            arrays = {key: value for key, value in told.items() if isinstance(value, np.ndarray)}
            own |= {f"{ABOUT}{key}": torch.from_numpy(value) for key, value in arrays.items()}
            facts = {key: value for key, value in told.items() if key not in arrays}
            facts |= {"step": state.step, "passed": state.skipped_batches}
            facts |= {"rollbacks": state.rollbacks, "evaluated": state.validated_step}
            facts |= {"unfit": int(state.nonfinite_steps), "rows": divided}
            if count > 1:
                facts["save"] = self.ranks.broadcast(lambda: secrets.token_hex(8))
            failure = self._write(path, own, facts)
        failures = [sentence for sentence in self.ranks.all_gather(failure) if sentence]
        if failures:
            if not failure and self.ranks.rank < count:
                path.unlink(missing_ok=True)  # a part alone is of no use
            raise UserError(f"cannot write the checkpoint {failures[0]}")
        self.ranks.broadcast(lambda: self._clear(state.step, count))

    def _clear(self, newest: int, count: int) -> None:
        """Remove the oldest, what is of a course that the run went back from, and what killed processes left behind;
        nothing, before the newest, of so many parts, is seen to be whole."""
        deadline = time.monotonic() + SEEN_WITHIN
        while not (written := [parts for step, parts in self.steps() if step == newest and len(parts) == count]):
            if time.monotonic() > deadline:
                raise UserError(
                    f"{self.folder} does not show the parts of step {newest} that other processes wrote: --out must be "
                    "on a disk that all machines share"
                )
            time.sleep(0.2)
        earlier = [one for one in self.steps() if one[0] < newest]
        lasting = [one for one in (*earlier, (newest, written[0])) if one[0] % self.every == 0][-self.keep :]
        # Two to go back to, since the step before the trouble may have made it.
        good = [] if _is_good(written[0]) else [one for one in earlier if _is_good(one[1])][-2:]
        kept = {*written[0], *(path for _, parts in (*lasting, *good) for path in parts)}
        for path in self.folder.iterdir():
            unfinished = path.suffix == ".partial" and NAME.match(path.name.removeprefix("."))
            if unfinished or (NAME.fullmatch(path.name) and path not in kept):
                path.unlink(missing_ok=True)

    def _write(self, path: Path, tensors: Mapping[str, Tensor], facts: dict[str, Any]) -> str:
        """Why it could not be written; nothing, if it could."""
        try:
            held = {name: local_shard(tensor).detach().cpu().contiguous() for name, tensor in tensors.items()}
            for name in _shared(held):  # as layers of somebody's network may, and a file may not
                held[name] = held[name].clone()
            facts["digest"] = digest(held, facts)
            self.folder.mkdir(exist_ok=True)  # without its parents: a run whose folder was removed is over
            with atomic_write(path) as temporary:
                save_file(held, temporary, metadata={HEADER: json.dumps(facts, sort_keys=True)})
        except Exception as error:  # whatever it is, the other processes must hear of it
            return f"{path}: {error}"
        return ""

    def latest(self) -> tuple[Checkpoint, list[str]] | None:
        """The newest checkpoint that is whole, and a sentence for each damaged one passed over."""
        return self._first_whole(list(reversed(self.steps())))

    def latest_good(self, until: int, given_up: Collection[int]) -> tuple[Checkpoint, list[str]] | None:
        """The same to go back to: no later than a step, after a finite gradient, and not given up; where there is none,
        the oldest."""
        steps = self.steps()
        good = [one for one in steps if one[0] <= until and one[0] not in given_up and _is_good(one[1])]
        return self._first_whole([*reversed(good), *(one for one in steps if one not in good)])

    def _first_whole(self, steps: Sequence[tuple[int, list[Path]]]) -> tuple[Checkpoint, list[str]] | None:
        damaged: list[str] = []
        for _, parts in steps:
            found = [sentence for part in parts if (sentence := _damage(part))]
            if not found:
                saved = _open(parts)
                if saved is not None:
                    return saved, damaged
                found = [f"{parts[0].name} was written at another time than its other parts and was passed over"]
            damaged += found
        if damaged:
            raise UserError(f"no checkpoint in {self.folder} is whole: {'; '.join(damaged)}")
        return None


def _shared(tensors: Mapping[str, Tensor]) -> list[str]:
    """Tensors that lie where one before them does."""
    found: dict[int, str] = {}
    places = {name: tensor.data_ptr() for name, tensor in tensors.items() if tensor.numel()}
    return [name for name, place in places.items() if found.setdefault(place, name) != name]


def _is_good(parts: list[Path]) -> bool:
    """Whether the last step before it had a finite gradient."""
    return _facts(parts[0]).get("unfit") == 0


def _step_of(path: Path) -> int:
    match = NAME.fullmatch(path.name)
    return int(match[1]) if match else -1


def _facts(path: Path) -> dict[str, Any]:
    """What the file of a checkpoint says; nothing, if it cannot be read."""
    try:
        with safe_open(path, framework="pt") as file:
            return dict(json.loads((file.metadata() or {})[HEADER]))
    except (SafetensorError, OSError, KeyError, ValueError, TypeError, RecursionError):
        return {}


def _damage(path: Path) -> str:
    """What is wrong with a file of a checkpoint; nothing, if nothing is."""
    try:
        with safe_open(path, framework="pt") as file:
            facts = json.loads((file.metadata() or {})[HEADER])
            if digest(_Lazy(file), facts) != facts["digest"]:
                raise ValueError("its contents do not match their checksum")
            if _Facts.model_validate(facts).step != _step_of(path):
                raise ValueError("it says another step than its name")
    except ValidationError as error:
        first = error.errors()[0]
        return f"{path.name} is damaged and was passed over ({'.'.join(map(str, first['loc']))}: {first['msg']})"
    except (SafetensorError, OSError, KeyError, ValueError, TypeError, RecursionError) as error:
        return f"{path.name} is damaged and was passed over ({error})"
    return ""


class _Lazy(Mapping[str, Tensor]):
    """The tensors of a file, read one at a time."""

    def __init__(self, file: Any):
        self.file, self.names = file, list(file.keys())

    def __getitem__(self, name: str) -> Tensor:
        return self.file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def _open(parts: list[Path]) -> Checkpoint | None:
    """None if the parts do not belong together, as where a process was killed between two of them."""
    every, where = [], dict[str, list[int]]()
    for number, path in enumerate(parts):
        with safe_open(path, framework="pt") as file:
            facts = json.loads(file.metadata()[HEADER])
            for name in file.keys():  # noqa: SIM118
                if name.startswith(ABOUT):
                    facts[name.removeprefix(ABOUT)] = file.get_tensor(name).numpy()
                else:
                    where.setdefault(name, []).append(number)
            every.append(facts)
    if len({facts.get("save") for facts in every}) > 1:
        return None
    return Checkpoint(parts, every[0], [facts["rows"] for facts in every], where)


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
