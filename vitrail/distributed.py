"""Several processes as one run: who this process is, and what all of them agree on.

Processes are started by torchrun, or whatever sets its variables; without them there is one process.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from vitrail.errors import CommandError, UserError

T = TypeVar("T")
COLLECTIVE_TIMEOUT = datetime.timedelta(hours=1)  # in training, until one that does not answer is given up
OBJECT_TIMEOUT = datetime.timedelta(days=2)  # that processes wait for the first one, which may read a large data set
FAILURES = "vitrail failed"  # how many processes did


@dataclass(frozen=True)
class Ranks:
    """The processes of a run, as one of them sees it."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    group: Any = None  # a gloo group, for Python objects

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def broadcast(self, make: Callable[[], T]) -> T:
        """What the first process makes, for all; if it fails, all fail alike, and only the first has to tell."""
        if self.world_size == 1:
            return make()
        said: list[Any] = [None, None]
        failure: BaseException | None = None
        if self.is_first:
            try:
                said[0] = make()
            except Exception as error:
                failure = error
                known = isinstance(error, CommandError)
                said[1] = error if known else RuntimeError(f"the first process failed: {error!r}")
        dist.broadcast_object_list(said, src=0, group=self.group)
        if failure is not None:
            raise failure
        if said[1] is not None:
            said[1].reported = True
            raise said[1]
        return said[0]

    def all_reduce_max(self, *numbers: int) -> tuple[int, ...]:
        """Of each number, the largest that any process has."""
        if self.world_size == 1:
            return numbers
        values = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group)
        return tuple(values.tolist())

    def all_gather(self, value: T) -> list[T]:
        """What every process has, in their order."""
        if self.world_size == 1:
            return [value]
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, value, group=self.group)
        return found

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Added up over all processes, in place, on the tensor's device."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def broadcast_tensors(self, tensors: Sequence[Tensor]) -> None:
        """Everybody takes over the tensors of the first process."""
        if self.world_size > 1:
            for tensor in tensors:
                dist.broadcast(tensor, src=0)


SINGLE_PROCESS = Ranks()


@contextlib.contextmanager
def process_group() -> Iterator[Ranks]:
    """The run this process belongs to, by the variables that torchrun sets."""
    try:
        rank, world, local, beside = (
            int(os.environ.get(name, default))
            for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1))
        )
    except ValueError as error:
        raise UserError(f"RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE must be numbers: {error}") from None
    if world == 1:
        yield SINGLE_PROCESS
        return
    if dist.is_initialized():  # whoever calls has set it up and will end it
        with _reported_once():
            yield Ranks(rank, world, local, beside, dist.new_group(backend="gloo", timeout=OBJECT_TIMEOUT))
        return
    cuda = torch.cuda.is_available()
    if cuda:
        if local >= torch.cuda.device_count():
            raise UserError(
                f"{beside} processes were started on a machine with {torch.cuda.device_count()} GPUs: "
                "start one for each (torchrun --nproc-per-node)"
            )
        torch.cuda.set_device(local)
    store, rank, world = next(rendezvous("env://"))
    store = _of_this_launch(store, rank, world)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=COLLECTIVE_TIMEOUT)
    with _reported_once():
        yield Ranks(rank, world, local, beside, dist.new_group(backend="gloo", timeout=OBJECT_TIMEOUT))
    dist.barrier()  # not after a failure: others may never come
    dist.destroy_process_group()


def _of_this_launch(store: dist.Store, rank: int, world: int) -> dist.Store:
    """The part of a store that only the processes started together use. Torchrun keeps one store over its restarts, in
    which processes would find addresses of those that are dead (torch 2.13), and its count of restarts is not the same
    on all machines. So the first process gives this launch a name, and hands it out until all others have taken it."""
    own = secrets.token_hex(8)
    if rank:
        store.set(f"vitrail/here/{rank}", own)
        name = store.get(f"vitrail/name for {own}").decode()
        store.add(f"vitrail/taken/{name}", 1)
    else:
        name = own
        while store.add(f"vitrail/taken/{name}", 0) < world - 1:
            for key in (f"vitrail/here/{other}" for other in range(1, world)):
                if store.check([key]):
                    store.set(f"vitrail/name for {store.get(key).decode()}", name)
            time.sleep(0.02)
    return dist.PrefixStore(name, store)


@contextlib.contextmanager
def _reported_once() -> Iterator[None]:
    """What ends all processes alike is reported by one of them; what ends one that only lost its contact to another, by
    that other one."""
    try:
        yield
    except CommandError as error:
        add_to_counter(FAILURES)
        if error.reported is None:  # else it was shared, or comes from a command within this one
            error.reported = add_to_counter(f"{FAILURES}: {error}") > 1
        raise
    except RuntimeError as error:
        if not add_to_counter(FAILURES, 0):
            raise
        lost = UserError("another process of this run failed")
        lost.reported = True
        raise lost from error


def add_to_counter(name: str, by: int = 1) -> int:
    """A number that all processes raise; the first one that does finds 1. It waits for nobody."""
    try:
        return dist.distributed_c10d._get_default_store().add(name, by)
    except RuntimeError:  # gone with the process that held it
        return 0


def is_first_process() -> bool:
    """Whether this process is the one that speaks, of those that were started together."""
    return int(os.environ.get("RANK", "0")) == 0


def end_process() -> None:
    """Leave at once after a run of several processes went well: torch may abort while it cleans up (FSDP on gloo)."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):  # nobody there to read it
                stream.flush()
        os._exit(0)
