"""The linear probe: one pass over the images for features, then logistic regression. Baseline, and a recipe."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitrail.config import DataConfig, Preprocess, ProbeConfig
from vitrail.evaluate.probe import Probe, fit_probe
from vitrail.images.sources import Dataset
from vitrail.infer.forward import device_of
from vitrail.model.cost import macs
from vitrail.runs.choose import SMALL_DATA, Facts
from vitrail.runs.outputs import outputs_of
from vitrail.train.interrupt import Interrupts

THUMBNAIL = Preprocess(size=(16, 16))
BASELINE_SECONDS = 60.0  # features that would take longer are not worth a baseline


@dataclass(frozen=True)
class Baseline:
    """A linear classifier's accuracy on the images the run will be measured on."""

    features: str  # what the probe saw
    accuracy: float
    seconds: float


def probe_network(
    net: nn.Module, dataset: Dataset, spec: Preprocess, data: DataConfig, probe: ProbeConfig, interrupts: Interrupts
) -> Probe:
    """Fit the probe on the network's features of the training images."""
    device = device_of(net)
    net.eval()
    train = outputs_of(net.forward_features, dataset.splits["train"], dataset, spec, data, device, interrupts)  # type: ignore[arg-type]
    return fit_probe(
        train.values, train.labels, len(dataset.classes), penalties=probe.penalties, iterations=probe.iterations
    )


def baseline(
    net: nn.Module | None,
    facts: Facts,
    dataset: Dataset,
    spec: Preprocess,
    data: DataConfig,
    probe: ProbeConfig,
    interrupts: Interrupts,
) -> Baseline | None:
    """The number a run has to beat; none when the data is too large for it to take seconds.

    With starting weights the probe sees their features; without any, the pixels of a 16x16 thumbnail.
    """
    held_out = dataset.splits["test" if "test" in dataset.splits else "val"]
    if facts.images > SMALL_DATA:
        return None
    if net is not None and 2 * macs(net.config) * (facts.images + len(held_out)) / facts.flops > BASELINE_SECONDS:  # type: ignore[arg-type]
        return None
    started = time.monotonic()
    device = torch.device("cpu") if net is None else device_of(net)
    if net is not None:
        net.eval()
    forward: Callable[[Tensor], Tensor] = (lambda x: x.flatten(1)) if net is None else net.forward_features  # type: ignore[assignment]
    seen = THUMBNAIL.model_copy(update={"mean": spec.mean, "std": spec.std}) if net is None else spec
    train = outputs_of(forward, dataset.splits["train"], dataset, seen, data, device, interrupts)
    test = outputs_of(forward, held_out, dataset, seen, data, device, interrupts)
    fitted = fit_probe(
        train.values, train.labels, len(dataset.classes), penalties=probe.penalties, iterations=probe.iterations
    )
    logits = test.values.to(fitted.weight.dtype) @ fitted.weight.T + fitted.bias
    accuracy = (logits.argmax(-1) == test.labels).float().mean().item()
    name = "16x16 thumbnails" if net is None else "the starting weights' features"
    return Baseline(name, accuracy, time.monotonic() - started)
