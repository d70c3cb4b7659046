"""Checkpoints: all state needed for a bit-identical resume, in safetensors files with checksums, written atomically.

The order of images, crops, mixup and dropout are functions of (seed, step) and need no saving. With sharded weights
each process saves a part, and any number of processes can load the parts. No pickle.
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

FILE_NAME = re.compile(r"step_(\d{9})(?:\.part_(\d+)_of_(\d+))?\.safetensors")
HEADER = "vitrail-checkpoint"
ARRAY_PREFIX = "about/"  # tensor names of facts that are arrays, which are too large for the header
SHARED_DISK_SECONDS = 30.0  # until a shared disk must show the files that other machines wrote


class _Facts(BaseModel):
    """The facts in the header of every checkpoint file. Runs add more. The keys are part of the file format."""

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
    """A checkpoint on disk whose files passed their checksums."""

    parts: list[Path]  # one file, or one of each process for sharded weights
    facts: dict[str, Any]  # of the first part, which has those of the run
    rows: list[dict[str, Rows]]  # for each part: the rows it has of each sharded tensor
    tensor_parts: dict[str, list[int]]  # for each tensor: the parts that have it

    def load_into(self, state: TrainState) -> None:
        state.load(self.tensor_parts.keys(), self.read, self.facts)

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        """Read a tensor, or some of its rows."""
        slices = []
        for part in self.tensor_parts[name]:
            first, last = self.rows[part].get(name, (0, 0))
            low, high = (first, last) if rows is None else (max(first, rows[0]), min(last, rows[1]))
            if name in self.rows[part] and low >= high:
                continue
            with safe_open(self.parts[part], framework="pt") as file:
                if name not in self.rows[part]:
                    tensor = file.get_tensor(name)
                    return tensor if rows is None else tensor[slice(*rows)]
                slices.append(file.get_slice(name)[low - first : high - first])
        if slices:
            return torch.cat(slices)
        with safe_open(self.parts[self.tensor_parts[name][0]], framework="pt") as file:  # this process has no rows
            return file.get_tensor(name)[:0]


class CheckpointManager:
    """Saves, finds and deletes the checkpoints of a run.

    Parameters
    ----------
    folder
        Where the checkpoint files are.
    keep
        How many regular checkpoints to keep. The newest checkpoint is always kept.
    ranks
        The processes that train together.
    every
        Regular checkpoints are those whose step is a multiple of this. Timed ones are not regular.
    """

    def __init__(self, folder: Path, keep: int, ranks: Ranks = SINGLE_PROCESS, every: int = 1):
        self.folder, self.keep, self.ranks, self.every = folder, keep, ranks, every

    def steps(self) -> list[tuple[int, list[Path]]]:
        """The checkpoints that have all of their parts, as (step, files), oldest first."""
        parts_of: dict[tuple[int, int], dict[int, Path]] = {}
        try:
            paths = list(self.folder.iterdir()) if self.folder.is_dir() else []
        except PermissionError as error:
            raise UserError(f"cannot read {self.folder}: {error_reason(error)}") from error
        for path in paths:
            match = FILE_NAME.fullmatch(path.name)
            if match:
                step, part, count = int(match[1]), int(match[2] or 1), int(match[3] or 1)
                parts_of.setdefault((step, count), {})[part] = path
        complete = {key: parts for key, parts in parts_of.items() if len(parts) == key[1]}
        return [(step, [parts[number] for number in sorted(parts)]) for (step, _), parts in sorted(complete.items())]

    def facts(self) -> dict[str, Any]:
        """The facts of the newest checkpoint, without verifying its checksum; empty if there is no checkpoint."""
        steps = self.steps()
        return _facts(steps[-1][1][0]) if steps else {}

    def save(self, state: TrainState, run_facts: Mapping[str, Any]) -> None:
        """Save a checkpoint, then delete the old ones that are not kept. All processes must call this."""
        tensors = state.tensors()
        sharded = {name: rows for name, tensor in tensors.items() if (rows := shard_rows(tensor)) is not None}
        count = self.ranks.world_size if sharded else 1
        failure = ""
        path = self.folder / f"step_{state.step:09d}.safetensors"
        if count > 1:
            path = path.with_suffix(f".part_{self.ranks.rank + 1}_of_{count}.safetensors")
        if self.ranks.rank < count:  # the first process also saves what is not sharded, and the facts of the run
            part_tensors = {n: t for n, t in tensors.items() if n in sharded or self.ranks.is_first}
            part_facts = run_facts if self.ranks.is_first else {}
            arrays = {key: value for key, value in part_facts.items() if isinstance(value, np.ndarray)}
            part_tensors |= {f"{ARRAY_PREFIX}{key}": torch.from_numpy(value) for key, value in arrays.items()}
            facts = {key: value for key, value in part_facts.items() if key not in arrays}
            facts |= {"step": state.step, "passed": state.skipped_batches, "rollbacks": state.rollbacks}
            facts |= {"evaluated": state.validated_step, "unfit": int(state.nonfinite_steps), "rows": sharded}
            if count > 1:
                facts["save"] = self.ranks.broadcast(lambda: secrets.token_hex(8))
            failure = self._write(path, part_tensors, facts)
        failures = [message for message in self.ranks.all_gather(failure) if message]
        if failures:
            if not failure and self.ranks.rank < count:
                path.unlink(missing_ok=True)  # without the other parts it is useless
            raise UserError(f"cannot write the checkpoint {failures[0]}")
        self.ranks.broadcast(lambda: self._delete_old(state.step, count))

    def _delete_old(self, newest: int, count: int) -> None:
        """Delete checkpoints that are not kept, those after the newest (from before a rollback) and partial files of
        killed processes. Waits first until all `count` parts of the newest are visible."""
        deadline = time.monotonic() + SHARED_DISK_SECONDS
        while not (written := [parts for step, parts in self.steps() if step == newest and len(parts) == count]):
            if time.monotonic() > deadline:
                raise UserError(
                    f"not all {count} checkpoint files of step {newest} appeared in {self.folder}: --out must be on a "
                    "disk that all machines share"
                )
            time.sleep(0.2)
        newest_parts = written[0]
        earlier = [(step, parts) for step, parts in self.steps() if step < newest]
        regular = [(step, parts) for step, parts in (*earlier, (newest, newest_parts)) if step % self.every == 0]
        # Keep two good ones, since the last good step may be what made training diverge.
        good = [] if _is_good(newest_parts) else [(step, parts) for step, parts in earlier if _is_good(parts)][-2:]
        kept = {*newest_parts, *(path for _, parts in (*regular[-self.keep :], *good) for path in parts)}
        for path in self.folder.iterdir():
            unfinished = path.suffix == ".partial" and FILE_NAME.match(path.name.removeprefix("."))
            if unfinished or (FILE_NAME.fullmatch(path.name) and path not in kept):
                path.unlink(missing_ok=True)

    def _write(self, path: Path, tensors: Mapping[str, Tensor], facts: dict[str, Any]) -> str:
        """Write one part. Returns an error message, or an empty string."""
        try:
            shards = {name: local_shard(tensor).detach().cpu().contiguous() for name, tensor in tensors.items()}
            for name in _memory_duplicates(shards):  # safetensors cannot save tied weights
                shards[name] = shards[name].clone()
            facts["digest"] = digest(shards, facts)
            self.folder.mkdir(exist_ok=True)  # not its parents: if the run folder was deleted, the run ends
            with atomic_write(path) as temporary:
                save_file(shards, temporary, metadata={HEADER: json.dumps(facts, sort_keys=True)})
        except Exception as error:  # of any kind: the other processes must stop, too
            return f"{path}: {error}"
        return ""

    def latest(self) -> tuple[Checkpoint, list[str]] | None:
        """The newest undamaged checkpoint, and a warning for each damaged one that was skipped."""
        return self._first_undamaged(list(reversed(self.steps())))

    def latest_good(self, until: int, rejected: Collection[int]) -> tuple[Checkpoint, list[str]] | None:
        """The newest undamaged checkpoint to roll back to: not later than step `until`, not rejected, and saved after a
        finite gradient. If there is none, the oldest checkpoint."""
        steps = self.steps()
        good = [(step, parts) for step, parts in steps if step <= until and step not in rejected and _is_good(parts)]
        return self._first_undamaged([*reversed(good), *(checkpoint for checkpoint in steps if checkpoint not in good)])

    def _first_undamaged(self, steps: Sequence[tuple[int, list[Path]]]) -> tuple[Checkpoint, list[str]] | None:
        warnings: list[str] = []
        for _, parts in steps:
            problems = [problem for part in parts if (problem := _find_damage(part))]
            if not problems:
                checkpoint = _open(parts)
                if checkpoint is not None:
                    return checkpoint, warnings
                problems = [f"skipped checkpoint {parts[0].name}: its parts are from different saves of this step"]
            warnings += problems
        if warnings:
            raise UserError(f"no undamaged checkpoint in {self.folder}: {'; '.join(warnings)}")
        return None


def _memory_duplicates(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of tensors that share the memory of an earlier one."""
    first_name: dict[int, str] = {}
    addresses = {name: tensor.data_ptr() for name, tensor in tensors.items() if tensor.numel()}
    return [name for name, address in addresses.items() if first_name.setdefault(address, name) != name]


def _is_good(parts: list[Path]) -> bool:
    """Whether the gradient of its last step was finite."""
    return _facts(parts[0]).get("unfit") == 0


def _step_of(path: Path) -> int:
    match = FILE_NAME.fullmatch(path.name)
    return int(match[1]) if match else -1


def _facts(path: Path) -> dict[str, Any]:
    """The facts in the header of a file; empty if it cannot be read."""
    try:
        with safe_open(path, framework="pt") as file:
            return dict(json.loads((file.metadata() or {})[HEADER]))
    except (SafetensorError, OSError, KeyError, ValueError, TypeError, RecursionError):
        return {}


def _find_damage(path: Path) -> str:
    """A warning if a checkpoint file is damaged, else an empty string."""
    try:
        with safe_open(path, framework="pt") as file:
            facts = json.loads((file.metadata() or {})[HEADER])
            if digest(_LazyTensors(file), facts) != facts["digest"]:
                raise ValueError("its contents do not match its checksum")
            if _Facts.model_validate(facts).step != _step_of(path):
                raise ValueError("the step in its header is not that of its name")
    except ValidationError as error:
        first = error.errors()[0]
        return f"skipped damaged checkpoint {path.name}: {'.'.join(map(str, first['loc']))}: {first['msg']}"
    except (SafetensorError, OSError, KeyError, ValueError, TypeError, RecursionError) as error:
        return f"skipped damaged checkpoint {path.name}: {error}"
    return ""


class _LazyTensors(Mapping[str, Tensor]):
    """The tensors of a file, each read on access."""

    def __init__(self, file: Any):
        self.file, self.names = file, list(file.keys())

    def __getitem__(self, name: str) -> Tensor:
        return self.file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def _open(parts: list[Path]) -> Checkpoint | None:
    """None if the parts are from different saves, as after a process was killed between saving them."""
    part_facts, tensor_parts = [], dict[str, list[int]]()
    for number, path in enumerate(parts):
        with safe_open(path, framework="pt") as file:
            facts = json.loads(file.metadata()[HEADER])
            for name in file.keys():  # noqa: SIM118
                if name.startswith(ARRAY_PREFIX):
                    facts[name.removeprefix(ARRAY_PREFIX)] = file.get_tensor(name).numpy()
                else:
                    tensor_parts.setdefault(name, []).append(number)
            part_facts.append(facts)
    if len({facts.get("save") for facts in part_facts}) > 1:
        return None
    return Checkpoint(parts, part_facts[0], [facts["rows"] for facts in part_facts], tensor_parts)


def digest(tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> str:
    """A checksum of the facts and of the names, shapes, dtypes and bytes of the tensors."""
    total = hashlib.blake2b(digest_size=16)
    others = {key: value for key, value in facts.items() if key != "digest"}
    total.update(json.dumps(others, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        total.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data if tensor.numel() else b"")
    return total.hexdigest()
