"""The linear probe: frozen features of all images, then logistic regression.

It is the baseline of every classification run (`fit_baseline`), and a recipe of its own (`probe_network`).
"""

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
BASELINE_SECONDS = 60.0  # if computing the features would take longer, there is no baseline


@dataclass(frozen=True)
class Baseline:
    """The accuracy of a linear probe on the images that the run will be measured on."""

    features: str  # what the probe was fitted on, for messages
    accuracy: float
    watched: float | None  # accuracy on the validation split; the name is in checkpoints
    seconds: float


def probe_network(plan: Plan, net: Network, interrupts: Interrupts) -> Probe:
    """Fit a linear probe on the features of `net` for the training images."""
    net.eval()
    samples, data = plan.dataset.splits["train"], plan.config.data
    return _fit(plan, network_outputs(net.forward_features, samples, plan.preprocess, data, plan.device, interrupts))


def penalty_reason(fitted: Probe) -> str:
    """Why this penalty was chosen, with the accuracy of each candidate."""
    if not fitted.tried:
        return "the only candidate, or the strongest if no images can be held out to choose by"
    tried = ", ".join(f"{penalty:g}: {accuracy:.1%}" for penalty, accuracy in fitted.tried)
    excluded = f"; {fitted.unmeasured:,} classes with a single group are not measured" if fitted.unmeasured else ""
    return f"best accuracy on a fifth of the training images, split by group{excluded} ({tried})"


def fit_baseline(plan: Plan, net: Network | None, interrupts: Interrupts) -> tuple[Baseline, Probe] | None:
    """Fit the baseline of a run. Returns its accuracy and the probe, or None if fitting would take minutes.

    The features are those of `net`, which has the starting weights. For a run from random weights (`net` is None) they
    are the pixels of thumbnails.
    """
    splits = plan.dataset.splits
    images = sum(len(samples) for samples in splits.values())
    if len(splits["train"]) > SMALL_DATA or plan.dataset.multilabel:
        return None
    if net is not None and 2 * count_macs(plan.model) * images / plan.choice_inputs.flops > BASELINE_SECONDS:
        return None
    started = time.monotonic()
    name, spec, device = "the starting weights' features", plan.preprocess, plan.device
    forward: Callable[[Tensor], Tensor] = partial(torch.flatten, start_dim=1)
    if net is None:
        name, spec = "16x16 thumbnails", plan.preprocess.model_copy(update={"size": THUMBNAIL, "resize": "squash"})
        device = torch.device("cpu")
    else:
        forward = net.eval().forward_features
    outputs = {
        split: network_outputs(forward, samples, spec, plan.config.data, device, interrupts)
        for split, samples in splits.items()
    }
    fitted = _fit(plan, outputs["train"])
    accuracy = {
        split: (fitted.predict(out.values) == out.labels).float().mean().item() for split, out in outputs.items()
    }
    measured = accuracy["test" if "test" in accuracy else "val"]
    return Baseline(name, measured, accuracy.get("val"), time.monotonic() - started), fitted


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
