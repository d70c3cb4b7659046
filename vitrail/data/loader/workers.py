"""Batches made by other processes, in memory that all of them share and use again and again.

The memory is anonymous: it is no file in /dev/shm, which is 64 MB in many containers. Where processes cannot be forked
(Windows, macOS) threads do the same work; decoding and resizing do not hold Python's lock.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import threading
import traceback
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize

import numpy as np
import torch
from torch import Tensor

from vitrail.data.loader.cache import shared_bytes
from vitrail.errors import UserError

PREFETCH = 3  # batches that are made while one is used
MAX_LENT = 2  # and those that the loop and a copy to a GPU hold
CAN_FORK = (
    sys.platform != "darwin"  # which can fork, but not safely
    and "fork" in multiprocessing.get_all_start_methods()
    and hasattr(signal, "pthread_sigmask")
)

SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]

Failures = list[tuple[int, str]]  # (row in the batch, why the image gives no pixels)
Fill = Callable[[np.ndarray, np.ndarray, np.ndarray], Failures]  # pixels to write (n, C, H, W), epochs, samples (n,)
_Part = tuple[int, int, int]  # slot, first row, row after the last


class Slots:
    """Room for a few batches: pixels, and which samples they are of."""

    def __init__(self, batch: int, shape: tuple[int, int, int]) -> None:
        count = PREFETCH + MAX_LENT
        self.pixels = shared_bytes(count * batch * int(np.prod(shape))).reshape(count, batch, *shape)
        self.epochs = shared_bytes(count * batch * 8).view(np.int64).reshape(count, batch)
        self.samples = shared_bytes(count * batch * 8).view(np.int64).reshape(count, batch)
        self.free = deque(range(count))
        self.lent = 0

    def lend(self, slot: int, rows: int) -> Tensor:
        """The pixels of a slot, uint8 (rows, C, H, W), which is free again when nobody holds them any more. To one who
        keeps more batches than there is room for, copies are given."""
        view = self.pixels[slot, :rows]
        if self.lent >= MAX_LENT:
            copy = torch.from_numpy(view.copy())
            self.free.append(slot)
            return copy
        self.lent += 1
        weakref.finalize(view, self._back, slot).atexit = False
        return torch.from_numpy(view)

    def _back(self, slot: int) -> None:
        self.lent -= 1
        self.free.append(slot)


class WorkerPool:
    """Processes that fill slots, each batch divided among all of them."""

    def __init__(self, fill: Fill, workers: int, slots: Slots) -> None:
        self.slots, self.started = slots, 0
        self.open: dict[int, int] = {}  # slot -> parts that are not finished
        self.failures: dict[int, Failures] = {}
        self.connections: list[Connection] = []
        self.processes: list[BaseProcess] = []
        # Before multiprocessing's own end, which would wait for processes that do not listen to SIGTERM.
        self.end = Finalize(self, _end, (self.connections, self.processes), exitpriority=100)
        for _ in range(workers):
            self._add(fill)

    def start(self, slot: int, epochs: np.ndarray, samples: np.ndarray) -> None:
        rows = len(samples)
        self.slots.epochs[slot, :rows], self.slots.samples[slot, :rows] = epochs, samples
        parts = min(len(self.connections), -(-rows // 8))
        edges = [rows * part // parts for part in range(parts + 1)]
        self.open[slot], self.failures[slot] = parts, []
        for part in range(parts):
            self.started += 1
            with contextlib.suppress(OSError):  # a dead worker is told of when its part is waited for
                self.connections[self.started % len(self.connections)].send((slot, edges[part], edges[part + 1]))

    def finish(self, slot: int) -> Failures:
        """Wait for the batch in a slot."""
        while self.open[slot]:
            self._receive()
        del self.open[slot]
        return sorted(self.failures.pop(slot))

    def close(self) -> None:
        self.end()

    def _add(self, fill: Fill) -> None:
        ours, theirs = multiprocessing.Pipe()
        self.connections.append(ours)  # type: ignore[arg-type, unused-ignore]  # another class on Windows
        if not CAN_FORK or sys.platform == "win32":  # the second for type checkers
            threading.Thread(target=_serve, args=(theirs, fill, self.slots), daemon=True).start()
            return
        process = multiprocessing.get_context("fork").Process(
            target=_process, args=(theirs, fill, self.slots, os.getpid()), daemon=True
        )
        # Until the child ignores them, and we know of it.
        held = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            with warnings.catch_warnings():  # Python warns of threads beside a fork; the child uses none of their locks
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
            self.processes.append(process)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, held)
        theirs.close()

    def _receive(self) -> None:
        for ready in wait([*self.connections, *(process.sentinel for process in self.processes)]):
            if ready not in self.connections:
                continue  # its connection is at its end as well
            try:
                slot, failures, trouble = ready.recv()
            except (EOFError, OSError):
                raise _died(self.processes[self.connections.index(ready)]) from None
            if trouble:
                raise RuntimeError(f"a loader process failed:\n{trouble}")
            self.open[slot] -= 1
            self.failures[slot] += failures


def _process(connection: Connection, fill: Fill, slots: Slots, parent: int) -> None:
    # A signal to the whole group is for the main process, which ends its workers when it has saved its work.
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if sys.platform != "win32":  # for type checkers: Windows never comes here
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    gc.freeze()  # looking at inherited objects would copy the memory they lie in
    torch.set_num_threads(1)
    _serve(connection, fill, slots, lambda: os.getppid() == parent)
    os._exit(0)


def _serve(connection: Connection, fill: Fill, slots: Slots, alive: Callable[[], bool] = lambda: True) -> None:
    with contextlib.suppress(EOFError, OSError):  # the other side has gone
        while alive():
            if connection.poll(2.0):
                connection.send(_made(fill, slots, connection.recv()))


def _made(fill: Fill, slots: Slots, part: _Part) -> tuple[int, Failures, str]:
    slot, first, last = part
    rows = slice(first, last)
    try:
        failures = fill(slots.pixels[slot, rows], slots.epochs[slot, rows].copy(), slots.samples[slot, rows].copy())
        return slot, [(first + row, reason) for row, reason in failures], ""
    except Exception:
        return slot, [], traceback.format_exc()


def _end(connections: list[Connection], processes: list[BaseProcess]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.join()
    for connection in connections:
        connection.close()


def _died(process: BaseProcess) -> UserError:
    process.join(5)
    code = process.exitcode or 0
    how = f"was killed (signal {-code})" if code < 0 else f"ended (exit code {code})"
    return UserError(
        f"a process that loads images {how}, most often because memory ran out; use fewer of them "
        "(--set data.workers=1, or 0 for none) or keep no decoded images (--set data.cache=none)"
    )
