"""Arrays and batches to where they are used, without waiting for a GPU: while it works, it copies by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

B = TypeVar("B")
SMALL = 1 << 16  # bytes that CUDA takes along with the command to copy them, from any memory and without waiting


def on_device(values: np.ndarray, device: torch.device) -> Tensor:
    """To a GPU from memory that it reads by itself: of other memory, large pieces would wait for all it has to do. But
    such memory takes long to get, and small pieces go without it."""
    tensor = torch.from_numpy(values)
    if device.type == "cuda" and values.nbytes > SMALL:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=device.type == "cuda")


def to_device(
    batches: Iterable[B], device: torch.device, pixels: Callable[[B], Tensor], moved: Callable[[B, Tensor], B]
) -> Iterator[B]:
    """The batches with their pixels on `device`, one copied ahead on a GPU. `pixels` finds them in a batch, and `moved`
    makes a batch with others."""
    if device.type != "cuda":
        yield from batches
        return
    stream = torch.cuda.Stream(device)
    ahead: B | None = None
    try:
        for batch in batches:
            with torch.cuda.stream(stream):
                copy = pixels(batch).to(device, non_blocking=True)
            if ahead is not None:
                yield ahead
            # The copy had the time of a step: to wait costs nothing, and its source may be used again after it.
            stream.synchronize()
            copy.record_stream(torch.cuda.current_stream(device))
            ahead = moved(batch, copy)
        if ahead is not None:
            yield ahead
    finally:
        stream.synchronize()


@contextmanager
def pinned(memory: np.ndarray, device: torch.device) -> Iterator[None]:
    """Keep `memory` where a GPU can read it by itself, so that copies from it need not be waited for."""
    if device.type != "cuda":
        yield
        return
    runtime = torch.cuda.cudart()
    # Not allowed everywhere (a container may limit locked memory); copies are then slower, and as right.
    locked = int(runtime.cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)) == 0
    try:
        yield
    finally:
        if locked:
            runtime.cudaHostUnregister(memory.ctypes.data)
