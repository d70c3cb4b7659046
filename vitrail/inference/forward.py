"""Batches -> outputs of a network, in order, with the labels beside them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitrail.config import Preprocess
from vitrail.data.loader.loader import ImageBatch
from vitrail.data.samples import Samples
from vitrail.data.transforms import normalise
from vitrail.errors import UserError


@dataclass(frozen=True)
class Outputs:
    """One row per image that could be read."""

    values: Tensor  # (N, K) logits or (N, D) features, float32 on the CPU
    labels: Tensor  # (N,)
    sample: Tensor  # (N,): index in the split
    failures: list[tuple[str, str]]  # (name, reason) of the images that could not be read

    def check_finite(self, samples: Samples) -> Outputs:
        """Itself, or an error that names an image: a score of NaN is a score of nothing."""
        odd = self.sample[~self.values.isfinite().all(dim=-1)]
        if len(odd):
            raise UserError(
                f"the network's output is not finite for {len(odd):,} of {len(self.sample):,} images, first "
                f"'{samples.name(int(odd[0]))}': its weights, or its preprocessing, are unusable"
            )
        return self


@torch.no_grad()
def run_network(
    forward: Callable[[Tensor], Tensor],
    batches: Iterable[ImageBatch],
    spec: Preprocess,
    device: torch.device,
    *,
    autocast: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
    between: Callable[[int], None] | None = None,
) -> Outputs:
    """Apply `forward` (a network, or its forward_features) to every batch; of several processes, this one's. `between`
    hears how many are done."""
    values, labels, samples, failures = [], [], [], []
    done = 0
    for batch in batches:
        with autocast():
            out = forward(normalise(batch.pixels.to(device, non_blocking=True), spec))
        readable = batch.weights > 0
        values.append(out.float().cpu()[readable])
        labels.append(batch.labels[readable])
        samples.append(batch.sample[readable])
        failures += batch.failures
        done += len(batch)
        if between is not None:
            between(done)
    return Outputs(torch.cat(values), torch.cat(labels), torch.cat(samples), failures)


def device_of(net: nn.Module) -> torch.device:
    return next(net.parameters()).device
