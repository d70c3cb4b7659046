"""A split of a dataset through a network: the reading and batching that every command shares."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vitrail.config import DataConfig, Preprocess
from vitrail.data.loader.cache import PixelCache, StoredPixelCache
from vitrail.data.loader.loader import Loader, Place, evaluation_loader
from vitrail.data.loader.memory import available_memory
from vitrail.data.loader.reader import Reader
from vitrail.data.samples import Samples
from vitrail.data.scan import cores
from vitrail.distributed import ALONE, Ranks
from vitrail.errors import UserError, reason_of
from vitrail.inference.forward import Outputs, run_network
from vitrail.interrupt import Interrupts

IN_MEMORY = 32 << 30  # decoded bytes up to which images are kept without being asked
SHARE = 0.4  # of the memory that is left, at most


def reader_of(samples: Samples, spec: Preprocess, data: DataConfig, beside: int = 1) -> Reader:
    """For a split that is read many times, as in training, by so many processes on this machine."""
    size = decoded_bytes(samples, spec)
    # Whether images are decoded smaller changes their pixels a little. So it hangs on the settings and the data alone,
    # and not on the memory that is left: a run goes on to the bit on another machine.
    scaled = data.scaled_decoding and (data.cache == "none" or (data.cache == "auto" and size > IN_MEMORY))
    return Reader(samples, spec, data.max_pixels, _cache(samples, spec, data, size, beside), scaled)


def decoded_bytes(samples: Samples, spec: Preprocess) -> int:
    return int(samples.areas.sum()) * spec.channels


def fits_in_memory(size: int) -> bool:
    return size <= min(IN_MEMORY, SHARE * available_memory())


def _cache(samples: Samples, spec: Preprocess, data: DataConfig, size: int, beside: int) -> PixelCache | None:
    if data.cache == "none" or (data.cache == "auto" and not fits_in_memory(size * beside)):  # each keeps its own
        return None
    try:
        return StoredPixelCache(samples, spec) if data.cache == "disk" else PixelCache(samples.areas, spec.channels)
    except (OSError, MemoryError, ValueError) as error:  # ValueError: longer than an address can say
        if data.cache == "auto":  # nobody asked for it, as where a limit on addresses is below the free memory
            return None
        reason = reason_of(error) or "there is too little memory"
        raise UserError(
            f"the decoded images, {size / 1e9:,.1f} GB, cannot be kept: {reason}; "
            "leave out data.cache, or set VITRAIL_CACHE to a folder with room for them"
        ) from None


def outputs_of(
    forward: Callable[[Tensor], Tensor],
    samples: Samples,
    spec: Preprocess,
    data: DataConfig,
    device: torch.device,
    interrupts: Interrupts,
    ranks: Ranks = ALONE,
) -> Outputs:
    """Of every image that can be read, in order. Of several processes each takes a part of the images, and all get all:
    what stands in a batch, and so every bit, does not hang on their number."""
    reader = Reader(samples, spec, data.max_pixels)  # every image once: there is nothing to keep them for
    loader = evaluation_loader(reader, 64, data.workers, device, Place(ranks.rank, ranks.world, ranks.beside))
    parts = ranks.gather(run_network(forward, loader, spec, device, between=lambda _: interrupts.check(ranks)))
    values, labels, sample = (
        torch.cat([getattr(part, name) for part in parts]) for name in ("values", "labels", "sample")
    )
    failures = sorted(failure for part in parts for failure in part.failures)
    if not len(sample):
        name, reason = failures[0] if failures else ("the data", "there are no images")
        raise UserError(f"no image could be read, first {name}: {reason}")
    order = sample.argsort()
    return Outputs(values[order], labels[order], sample[order], failures).check_finite(samples)


def waiting_advice(loader: Loader, samples: Samples, spec: Preprocess, data: DataConfig) -> str:
    """What would help here when training waits for images, in one sentence."""
    size = decoded_bytes(samples, spec)
    if loader.workers < cores():
        return f"more processes that load images would help: --set data.workers={cores()}"
    if loader.reader.cache is None and size <= SHARE * available_memory():
        return f"images kept decoded, {size / 1e9:,.1f} GB, fit in memory and would help: --set data.cache=memory"
    height, width = spec.size
    return f"smaller images would help: vitrail pack {data.path} OUT --resize {round(max(height, width) * 8 / 7)}"
