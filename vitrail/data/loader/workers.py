"""Worker processes that fill batches in shared, reused memory.

The memory is anonymous and not in /dev/shm, which many containers limit to 64 MB. Where processes cannot be forked
(Windows, macOS), threads do the same work: decoding and resizing release the GIL.
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

PREFETCH = 3  # batches prepared ahead
MAX_LENT = 2  # batches held by the training loop and by a copy to a GPU
CAN_FORK = (
    sys.platform != "darwin"  # forking is unsafe there
    and "fork" in multiprocessing.get_all_start_methods()
    and hasattr(signal, "pthread_sigmask")
)

SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]

Failures = list[tuple[int, str]]  # (row in the batch, reason)
Fill = Callable[[np.ndarray, np.ndarray, np.ndarray], Failures]  # pixels to write (n, C, H, W), epochs, samples (n,)
_Part = tuple[int, int, int]  # slot, first row, row after the last


class Slots:
    """Shared buffers for a few batches: pixels, epochs and samples."""

    def __init__(self, batch: int, shape: tuple[int, int, int]) -> None:
        count = PREFETCH + MAX_LENT
        self.pixels = shared_bytes(count * batch * int(np.prod(shape))).reshape(count, batch, *shape)
        self.epochs = shared_bytes(count * batch * 8).view(np.int64).reshape(count, batch)
        self.samples = shared_bytes(count * batch * 8).view(np.int64).reshape(count, batch)
        self.free = deque(range(count))
        self.lent = 0

    def lend(self, slot: int, rows: int) -> Tensor:
        """Return the pixels of a slot, uint8 (rows, C, H, W). The slot is free again once nothing refers to them.

        Returns a copy if MAX_LENT slots are lent already.
        """
        view = self.pixels[slot, :rows]
        if self.lent >= MAX_LENT:
            copy = torch.from_numpy(view.copy())
            self.free.append(slot)
            return copy
        self.lent += 1
        weakref.finalize(view, self._release, slot).atexit = False
        return torch.from_numpy(view)

    def _release(self, slot: int) -> None:
        self.lent -= 1
        self.free.append(slot)


class WorkerPool:
    """Worker processes that fill slots; each batch is split among all workers."""

    def __init__(self, fill: Fill, workers: int, slots: Slots) -> None:
        self.slots, self.started = slots, 0
        self.open: dict[int, int] = {}  # slot -> number of unfinished parts
        self.failures: dict[int, Failures] = {}
        self.connections: list[Connection] = []
        self.processes: list[BaseProcess] = []
        # Runs before multiprocessing's exit handler, which would wait for workers that ignore SIGTERM.
        self.end = Finalize(self, _end, (self.connections, self.processes), exitpriority=100)
        for _ in range(workers):
            self._add(fill)

    def start(self, slot: int, epochs: np.ndarray, samples: np.ndarray) -> None:
        """Start filling a slot."""
        rows = len(samples)
        self.slots.epochs[slot, :rows], self.slots.samples[slot, :rows] = epochs, samples
        parts = min(len(self.connections), -(-rows // 8))
        edges = [rows * part // parts for part in range(parts + 1)]
        self.open[slot], self.failures[slot] = parts, []
        for part in range(parts):
            self.started += 1
            with contextlib.suppress(OSError):  # finish() reports a dead worker
                self.connections[self.started % len(self.connections)].send((slot, edges[part], edges[part + 1]))

    def finish(self, slot: int) -> Failures:
        """Wait for a slot. Returns the images that could not be read."""
        while self.open[slot]:
            self._receive()
        del self.open[slot]
        return sorted(self.failures.pop(slot))

    def close(self) -> None:
        self.end()

    def _add(self, fill: Fill) -> None:
        connection, worker_connection = multiprocessing.Pipe()
        self.connections.append(connection)  # type: ignore[arg-type, unused-ignore]  # another class on Windows
        if not CAN_FORK or sys.platform == "win32":  # the second for type checkers
            threading.Thread(target=_serve, args=(worker_connection, fill, self.slots), daemon=True).start()
            return
        process = multiprocessing.get_context("fork").Process(
            target=_process, args=(worker_connection, fill, self.slots, os.getpid()), daemon=True
        )
        # Block signals until the child ignores them and is in self.processes.
        previous = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            with warnings.catch_warnings():  # forking with threads warns; the child uses none of their locks
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
            self.processes.append(process)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous)
        worker_connection.close()

    def _receive(self) -> None:
        # With a timeout: Python runs signal handlers between calls, and another thread may have taken the signal.
        for ready in wait([*self.connections, *(process.sentinel for process in self.processes)], timeout=0.2):
            if ready not in self.connections:
                continue  # its connection is ready with EOF too
            try:
                slot, failures, error = ready.recv()
            except (EOFError, OSError):
                raise _worker_died(self.processes[self.connections.index(ready)]) from None
            if error:
                raise RuntimeError(f"a loader process failed:\n{error}")
            self.open[slot] -= 1
            self.failures[slot] += failures


def _process(connection: Connection, fill: Fill, slots: Slots, parent: int) -> None:
    # Signals to the process group are for the main process, which ends its workers after saving.
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if sys.platform != "win32":  # for type checkers: Windows uses threads
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    gc.freeze()  # garbage collection would copy the memory of inherited objects
    torch.set_num_threads(1)
    _serve(connection, fill, slots, lambda: os.getppid() == parent)
    os._exit(0)


def _serve(connection: Connection, fill: Fill, slots: Slots, alive: Callable[[], bool] = lambda: True) -> None:
    with contextlib.suppress(EOFError, OSError):  # the main process has ended
        while alive():
            if connection.poll(2.0):
                connection.send(_fill_part(fill, slots, connection.recv()))


def _fill_part(fill: Fill, slots: Slots, part: _Part) -> tuple[int, Failures, str]:
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


def _worker_died(process: BaseProcess) -> UserError:
    process.join(5)
    code = process.exitcode or 0
    end = f"was killed (signal {-code})" if code < 0 else f"ended (exit code {code})"
    return UserError(
        f"a data loader process {end}, most often because memory ran out; use fewer processes "
        "(--set data.workers=1, or 0 for none) or turn off the image cache (--set data.cache=none)"
    )
