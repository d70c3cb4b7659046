"""Buffers are reused, and never while a tensor uses them."""

from __future__ import annotations

import torch

from vitrail.config import Preprocess
from vitrail.data.buffer_pool import MAX_FREE, BufferPool
from vitrail.data.transforms import normalise


def test_memory_is_reused_after_the_last_tensor_is_gone() -> None:
    pool = BufferPool()
    first = pool.empty((4, 5))
    view = first[1:, ::2]
    address = first.data_ptr()
    assert address % 64 == 0
    del first
    assert pool.empty((4, 5)).data_ptr() != address  # a view still uses it
    del view
    again = [pool.empty((2, 5)) for _ in range(2)]
    assert address in [tensor.data_ptr() for tensor in again]
    del again
    assert len(pool.free) <= MAX_FREE


def test_held_tensors_never_share_memory() -> None:
    pool = BufferPool()
    held = [pool.empty((8,)).fill_(number) for number in range(10)]
    assert [tensor.unique().tolist() for tensor in held] == [[number] for number in range(10)]


def test_normalised_batches_do_not_change_later() -> None:
    spec = Preprocess(size=(300, 300))
    batches = [torch.full((4, 3, 300, 300), value, dtype=torch.uint8) for value in (0, 51, 255)]
    kept = [normalise(batch, spec) for batch in batches]
    for found, value in zip(kept, (-1.0, -0.6, 1.0), strict=True):
        torch.testing.assert_close(found, torch.full_like(found, value))


def test_autograd_keeps_the_buffers_it_needs() -> None:
    spec = Preprocess(size=(300, 300))
    weight = torch.ones(3, 300, 300, requires_grad=True)
    batches = [torch.full((4, 3, 300, 300), value, dtype=torch.uint8) for value in (0, 255)]
    losses = [(normalise(batch, spec) * weight).sum() for batch in batches]
    normalise(batches[0], spec)
    losses[1].backward()
    assert weight.grad is not None
    assert weight.grad.unique().tolist() == [4.0]
