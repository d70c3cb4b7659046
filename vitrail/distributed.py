"""Distributed runs: this process's rank, and the collectives that the processes share.

Processes are started by torchrun or another launcher that sets RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE.
Without these variables there is one process.
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
COLLECTIVE_TIMEOUT = datetime.timedelta(hours=1)  # tensor collectives, during training
OBJECT_TIMEOUT = datetime.timedelta(days=2)  # Python objects: rank 0 may first scan a large dataset
FAILURES = "vitrail failed"  # store key: the number of failed processes


@dataclass(frozen=True)
class Ranks:
    """Rank and world size of this process, with the collectives of its run."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    group: Any = None  # gloo process group for Python objects

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def broadcast(self, make: Callable[[], T]) -> T:
        """Call `make` on rank 0 and return its result on every rank.

        If `make` fails, every rank raises the error. The other ranks mark it as already reported.
        """
        if self.world_size == 1:
            return make()
        payload: list[Any] = [None, None]  # result, error
        failure: BaseException | None = None
        if self.is_first:
            try:
                payload[0] = make()
            except Exception as error:
                failure = error
                known = isinstance(error, CommandError)
                payload[1] = error if known else RuntimeError(f"the first process failed: {error!r}")
        dist.broadcast_object_list(payload, src=0, group=self.group)
        if failure is not None:
            raise failure
        if payload[1] is not None:
            payload[1].reported = True
            raise payload[1]
        return payload[0]

    def all_reduce_max(self, *numbers: int) -> tuple[int, ...]:
        """Return the elementwise maximum over all ranks."""
        if self.world_size == 1:
            return numbers
        values = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group)
        return tuple(values.tolist())

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in rank order."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` over all ranks in place, on its device."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def broadcast_tensors(self, tensors: Sequence[Tensor]) -> None:
        """Copy the tensors of rank 0 to every rank, in place."""
        if self.world_size > 1:
            for tensor in tensors:
                dist.broadcast(tensor, src=0)


SINGLE_PROCESS = Ranks()


@contextlib.contextmanager
def process_group() -> Iterator[Ranks]:
    """Initialize torch.distributed from torchrun's environment variables, and destroy the group at the end."""
    try:
        rank, world_size, local_rank, local_world_size = (
            int(os.environ.get(name, default))
            for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1))
        )
    except ValueError as error:
        raise UserError(f"RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE must be numbers: {error}") from None
    if world_size == 1:
        yield SINGLE_PROCESS
        return
    if dist.is_initialized():  # by the caller, who also destroys it
        with _report_once():
            yield Ranks(rank, world_size, local_rank, local_world_size, _new_object_group())
        return
    cuda = torch.cuda.is_available()
    if cuda:
        if local_rank >= torch.cuda.device_count():
            raise UserError(
                f"{local_world_size} processes were started on a machine with {torch.cuda.device_count()} GPUs: "
                f"start one per GPU (torchrun --nproc-per-node {torch.cuda.device_count()})"
            )
        torch.cuda.set_device(local_rank)
    store, rank, world_size = next(rendezvous("env://"))
    store = _store_of_this_launch(store, rank, world_size)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT)
    with _report_once():
        yield Ranks(rank, world_size, local_rank, local_world_size, _new_object_group())
    dist.barrier()  # only after success: after a failure, the others may never reach it
    dist.destroy_process_group()


def _new_object_group() -> Any:
    return dist.new_group(backend="gloo", timeout=OBJECT_TIMEOUT)


def _store_of_this_launch(store: dist.Store, rank: int, world_size: int) -> dist.Store:
    """Return a view of the store with a key prefix that is unique to this launch.

    torchrun keeps one store over its restarts, in which processes would find addresses of dead ones (torch 2.13), and
    its count of restarts differs between machines. So rank 0 draws a prefix and hands it to every other rank.
    """
    token = secrets.token_hex(8)
    if rank:
        store.set(f"vitrail/here/{rank}", token)
        prefix = store.get(f"vitrail/name for {token}").decode()
        store.add(f"vitrail/taken/{prefix}", 1)
    else:
        prefix = token
        while store.add(f"vitrail/taken/{prefix}", 0) < world_size - 1:
            for key in (f"vitrail/here/{other}" for other in range(1, world_size)):
                if store.check([key]):
                    store.set(f"vitrail/name for {store.get(key).decode()}", prefix)
            time.sleep(0.02)
    return dist.PrefixStore(prefix, store)


@contextlib.contextmanager
def _report_once() -> Iterator[None]:
    """Let one process report an error that ends all of them.

    A process that fails because it lost the connection to a failed one reports nothing.
    """
    try:
        yield
    except CommandError as error:
        _add_to_counter(FAILURES)
        if error.reported is None:  # otherwise it was broadcast, or raised by a nested command
            error.reported = _add_to_counter(f"{FAILURES}: {error}") > 1
        raise
    except RuntimeError as error:
        if not _add_to_counter(FAILURES, 0):
            raise
        disconnected = UserError("another process of this run failed")
        disconnected.reported = True
        raise disconnected from error


def _add_to_counter(name: str, amount: int = 1) -> int:
    """Add to a counter that all processes share and return its new value, without waiting for the others."""
    try:
        return dist.distributed_c10d._get_default_store().add(name, amount)
    except RuntimeError:  # the process that hosts the store has ended
        return 0


def is_first_process() -> bool:
    """Whether this process has rank 0, the only one that prints. Needs no process group."""
    return int(os.environ.get("RANK", "0")) == 0


def end_process() -> None:
    """Exit a successful distributed run without torch's cleanup, which may abort (FSDP on gloo)."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):  # closed by its reader
                stream.flush()
        os._exit(0)
