"""The linear probe: one pass over the images for features, then logistic regression. Baseline, and a recipe."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from vitrail.data.splits import group_ids
from vitrail.inference.runner import Outputs, network_outputs
from vitrail.interrupt import Interrupts
from vitrail.metrics.probe import Probe, fit_probe
from vitrail.models.build import Network
from vitrail.models.flops import count_macs
from vitrail.workflows.choose import SMALL_DATA
from vitrail.workflows.resolve import Plan

THUMBNAIL = (16, 16)
BASELINE_SECONDS = 60.0  # features that would take longer are not worth a baseline


@dataclass(frozen=True)
class Baseline:
    """A linear classifier's accuracy on the images the run will be measured on, and on those watched meanwhile."""

    features: str  # what the probe saw
    accuracy: float
    watched: float | None
    seconds: float


def probe_network(plan: Plan, net: Network, interrupts: Interrupts) -> Probe:
    """Fit the probe on the network's features of the training images."""
    net.eval()
    samples, data = plan.dataset.splits["train"], plan.config.data
    return _fit(plan, network_outputs(net.forward_features, samples, plan.preprocess, data, plan.device, interrupts))


def penalty_reason(fitted: Probe) -> str:
    """The reason for the penalty of a probe, with what was tried."""
    if not fitted.tried:
        return "the only one, or the strongest where no images can be held out to choose by"
    tried = ", ".join(f"{penalty:g}: {accuracy:.1%}" for penalty, accuracy in fitted.tried)
    left_out = f"; without {fitted.unmeasured:,} classes whose images all belong together" if fitted.unmeasured else ""
    return f"best on a fifth of the training images, what belongs together on one side{left_out} ({tried})"


def fit_baseline(plan: Plan, net: Network | None, interrupts: Interrupts) -> tuple[Baseline, Probe] | None:
    """The number a run has to beat, with the probe that reached it; none when the data is too large for it to take
    seconds.

    With starting weights the probe sees their features; without any (`net` is none), the pixels of a thumbnail.
    """
    splits = plan.dataset.splits
    images = sum(len(samples) for samples in splits.values())
    if len(splits["train"]) > SMALL_DATA or plan.dataset.multilabel:
        return None
    if net is not None and 2 * count_macs(plan.model) * images / plan.facts.flops > BASELINE_SECONDS:
        return None
    started = time.monotonic()
    name, spec, device = "the starting weights' features", plan.preprocess, plan.device
    forward: Callable[[Tensor], Tensor] = partial(torch.flatten, start_dim=1)
    if net is None:
        name, spec = "16x16 thumbnails", plan.preprocess.model_copy(update={"size": THUMBNAIL, "resize": "squash"})
        device = torch.device("cpu")
    else:
        forward = net.eval().forward_features
    found = {
        split: network_outputs(forward, samples, spec, plan.config.data, device, interrupts)
        for split, samples in splits.items()
    }
    fitted = _fit(plan, found["train"])
    accuracy = {
        split: (fitted.predict(outputs.values) == outputs.labels).float().mean().item()
        for split, outputs in found.items()
    }
    watched = accuracy.get("val")
    reached = accuracy["test" if "test" in accuracy else "val"]
    return Baseline(name, reached, watched, time.monotonic() - started), fitted


def _fit(plan: Plan, train: Outputs) -> Probe:
    settings = plan.config.probe
    groups = group_ids(plan.dataset.splits["train"], train.sample.numpy())
    return fit_probe(
        train.values,
        train.labels,
        len(plan.dataset.classes),
        penalties=settings.penalties,
        iterations=settings.iterations,
        seed=plan.config.train.seed,
        groups=groups,
    )
