"""What a run does when the user did not say: each choice follows from the data and the machine, with its reason."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

from vitrail.config import ModelConfig, RunConfig, Size
from vitrail.model.cost import macs

CPU_CORE_FLOPS = 60e9  # what one core sustains in training, to the nearest order
GPU_FLOPS = 150e12
CPU_SECONDS, GPU_SECONDS = 600.0, 1200.0  # how long a run may take when nobody said
FEWEST_STEPS = 100
SMALL_DATA = 20_000  # images up to which a linear probe takes seconds


@dataclass(frozen=True)
class Decision:
    what: str
    value: str
    why: str


@dataclass(frozen=True)
class Facts:
    """What the choices depend on."""

    images: int  # in the training split
    classes: int
    median_size: Size
    device: str  # cpu, cuda or mps
    start: ModelConfig | None  # the network of the starting weights

    @property
    def flops(self) -> float:
        """What the machine sustains, and so how much a run may spend."""
        return GPU_FLOPS if self.device == "cuda" else CPU_CORE_FLOPS * (os.cpu_count() or 1)

    @property
    def seconds(self) -> float:
        return GPU_SECONDS if self.device == "cuda" else CPU_SECONDS

    def epochs_within_budget(self, model: ModelConfig) -> float:
        return self.seconds * self.flops / (6 * macs(model)) / self.images


def choose_recipe(facts: Facts) -> Decision:
    if facts.start is None:
        return Decision("recipe", "scratch", "no starting weights were given (--from WEIGHTS fine-tunes them)")
    if facts.epochs_within_budget(facts.start) < 2:
        hours = 6 * macs(facts.start) * 10 * facts.images / facts.flops / 3600
        why = f"ten epochs of fine-tuning would take about {hours:.1f} h here; a linear probe needs one pass"
        return Decision("recipe", "probe", why)
    return Decision("recipe", "finetune", "starting weights were given")


def choose_model(facts: Facts) -> list[tuple[str, Any, Decision]]:
    """Network and image size for training from random weights, as (key, value, decision)."""
    short = min(facts.median_size)
    if short < 48:
        size = 32
    elif short < 96 or facts.device != "cuda":
        size = 64
    else:
        size = 128
    seen = f"half of the images have a short side under {short} px" if short < 96 else f"images are about {short} px"
    limit = "" if short < 96 or facts.device == "cuda" else ", and more would be slow without a GPU"
    letter = "S" if facts.device == "cuda" and facts.images >= 10_000 else "Ti"
    across = 8 if facts.device == "cuda" else 4  # in equal time on two cores, 16 patches learned more than 64
    name = f"{letter}/{size // across}"
    why = f"{across * across} patches an image; " + (
        "enough images and a GPU for the small size" if letter == "S" else "the smallest size, for little data"
    )
    return [
        ("model.image_size", (size, size), Decision("image size", f"{size} px", seen + limit)),
        ("model.name", name, Decision("model", name, why)),
    ]


def choose_length(facts: Facts, config: RunConfig, model: ModelConfig) -> list[tuple[str, Any, Decision]]:
    """Batch size and steps: fewer epochs for more data, never more than the time budget."""
    batch = config.train.batch_size
    found = []
    if facts.images < 4 * batch:
        batch = max(4, 2 ** int(math.log2(max(facts.images / 4, 4))))
        why = f"at least four batches in an epoch of {facts.images} images"
        found.append(("train.batch_size", batch, Decision("batch size", str(batch), why)))
    usual, cap = (100.0, 2000) if facts.start is None else (20.0, 1000)
    wanted = min(usual, max(5.0, usual * math.sqrt(cap / facts.images)))
    epochs = min(wanted, facts.epochs_within_budget(model))
    steps = max(FEWEST_STEPS, round(epochs * facts.images / batch))
    why = f"{steps * batch / facts.images:.0f} epochs of {facts.images:,} images in batches of {batch}"
    if epochs < wanted:
        why += f"; more would take over {facts.seconds / 60:.0f} minutes here"
    return [*found, ("train.steps", steps, Decision("steps", f"{steps:,}", why))]
