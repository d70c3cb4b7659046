"""Counter-based random numbers: a function of (seed, stream, epoch, sample), with no generator state.

A resumed run, or one with another number of workers, draws the same numbers. The generator is Philox4x32-10 (Salmon et
al. 2011) on whole arrays; numpy's Philox would need one generator object per key.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import ArrayLike

Words = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
LOW = np.uint64(0xFFFFFFFF)
SHIFT = np.uint64(32)


class Stream(IntEnum):
    """Purpose of the numbers; each purpose has its own stream."""

    ORDER = 0
    CROP = 1
    FLIP = 2
    MIXUP = 3
    NETWORK = 4
    FLIP_VERTICAL = 5
    RANDAUGMENT = 6
    THREE_AUGMENT = 7
    JITTER = 8
    ERASE = 9
    ERASE_NOISE = 10
    CUTMIX = 11
    MASKED = 12
    SOURCE = 13


def philox(counter: Words, key: tuple[int, int]) -> Words:
    """Ten rounds of Philox4x32 on arrays of 32-bit counters (held in uint64)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (
            (p1 >> SHIFT) ^ c1 ^ np.uint64(k0),
            p1 & LOW,
            (p0 >> SHIFT) ^ c3 ^ np.uint64(k1),
            p0 & LOW,
        )
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def bits(seed: int, stream: Stream, epoch: ArrayLike, sample: ArrayLike, count: int) -> np.ndarray:
    """`count` random 32-bit words for each (epoch, sample), as uint64 of shape (..., count)."""
    blocks = -(-count // 4)
    epoch64, sample64 = np.broadcast_arrays(np.asarray(epoch, np.uint64), np.asarray(sample, np.uint64))
    block = np.broadcast_to(np.arange(blocks, dtype=np.uint64), (*epoch64.shape, blocks))
    low = np.broadcast_to((sample64 & LOW)[..., None], block.shape)
    high = np.broadcast_to((sample64 >> SHIFT)[..., None], block.shape)
    epochs = np.broadcast_to(epoch64[..., None], block.shape)
    words = np.stack(philox((block, low, epochs, high), (seed & 0xFFFFFFFF, int(stream))), axis=-1)
    return words.reshape(*epoch64.shape, blocks * 4)[..., :count]


def uniform(seed: int, stream: Stream, epoch: ArrayLike, sample: ArrayLike, count: int) -> np.ndarray:
    """`count` numbers in the open interval (0, 1) for each (epoch, sample)."""
    return (bits(seed, stream, epoch, sample, count).astype(np.float64) + 0.5) / 2.0**32


def epoch_permutation(seed: int, epoch: int, size: int) -> np.ndarray:
    """Permutation of the samples in an epoch: they are sorted by a random 64-bit number each."""
    words = bits(seed, Stream.ORDER, epoch, np.arange(size), 2)
    return np.argsort((words[:, 0] << SHIFT) | words[:, 1], kind="stable")


def step_seed(seed: int, step: int, rank: int = 0) -> int:
    """Seed of the network's random numbers (dropout) in one step."""
    high, low = bits(seed, Stream.NETWORK, rank, step, 2)
    return int((high << SHIFT) | low) >> 1


def draw_seed(seed: int, epoch: int, number: int, rank: int = 0) -> int:
    """Seed of the random numbers that a user's data source draws for one batch."""
    high, low = bits(seed, Stream.SOURCE, epoch, (rank << 32) | number, 2)
    return int((high << SHIFT) | low) >> 1
