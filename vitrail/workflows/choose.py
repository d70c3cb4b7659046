"""What a run does when the user did not say: each choice follows from the data and the machine, with its reason."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from vitrail.config import NetworkConfig, ObjectiveConfig, ScheduleConfig, Size, TrainConfig
from vitrail.data.scan import cores
from vitrail.models.flops import macs
from vitrail.weights.backbones import BASE, SMALL, TINY, Backbone

CPU_CORE_FLOPS = 60e9  # what one core sustains in training, to the nearest order
GPU_FLOPS = 150e12
CPU_SECONDS, GPU_SECONDS = 600.0, 1200.0  # how long a run may take when nobody said
FEWEST_STEPS = 100
PATCHES = (4, 8, 14, 16, 32, 1)  # those of the published networks; 1 divides every image
FEW_FOR_BASE = 2_000  # images: the base network is three times as slow as the small one
START = "start"  # what the decision on starting weights is called
SMALL_DATA = 20_000  # images up to which a linear probe takes seconds


@dataclass(frozen=True)
class Decision:
    what: str
    value: str
    why: str


@dataclass(frozen=True)
class ChoiceInputs:
    """What the choices depend on."""

    images: int  # in the training split
    classes: int
    median_size: Size
    device: str  # cpu, cuda or mps
    start: NetworkConfig | None  # the network of the starting weights
    multilabel: bool = False  # an image can have any number of the classes

    @property
    def flops(self) -> float:
        """What the machine sustains, and so how much a run may spend."""
        return GPU_FLOPS if self.device == "cuda" else CPU_CORE_FLOPS * cores()

    @property
    def seconds(self) -> float:
        return GPU_SECONDS if self.device == "cuda" else CPU_SECONDS

    def epochs_within_budget(self, model: NetworkConfig) -> float:
        return self.seconds * self.flops / (6 * macs(model)) / self.images


def choose_backbone(facts: ChoiceInputs) -> tuple[Backbone, str]:
    """What to start from, and why."""
    if facts.device != "cuda":
        return TINY, "the smallest, for want of a GPU"
    if facts.images < FEW_FOR_BASE:
        return SMALL, f"for {facts.images:,} images"
    return BASE, f"for {facts.images:,} images and a GPU"


def choose_recipe(facts: ChoiceInputs) -> Decision:
    if facts.start is None:
        return Decision("recipe", "scratch", "for random weights (--from WEIGHTS fine-tunes trained ones)")
    if facts.epochs_within_budget(facts.start) < 2 and not facts.multilabel:
        hours = 6 * macs(facts.start) * 10 * facts.images / facts.flops / 3600
        why = f"ten epochs of fine-tuning would take about {hours:.1f} h here; a linear probe needs one pass"
        return Decision("recipe", "probe", why)
    return Decision("recipe", "finetune", "there are weights to start from")


def choose_model(facts: ChoiceInputs, asked: Size | None) -> list[tuple[str, Any, Decision]]:
    """Network and image size for training from random weights, as (key, value, decision); the size may be given."""
    found = []
    short = min(facts.median_size)
    size = asked or (_image_size(short, facts.device),) * 2
    if asked is None:
        limit = "" if short < 96 or facts.device == "cuda" else ", and more would be slow without a GPU"
        why = f"the short side of the images is about {short} px{limit}"
        found.append(("model.image_size", size, Decision("image size", f"{size[0]} px", why)))
    letter = "S" if facts.device == "cuda" and facts.images >= 10_000 else "Ti"
    across = 8 if facts.device == "cuda" else 4  # in equal time on two cores, 16 patches learned more than 64
    patch = min((p for p in PATCHES if not (size[0] % p or size[1] % p)), key=lambda p: abs(min(size) / p - across))
    amount = "enough images and a GPU for the small size" if letter == "S" else "the smallest size, for little data"
    patches = (size[0] // patch) * (size[1] // patch)
    why = f"{patches} patches an image; {amount}"
    return [*found, ("model.name", f"{letter}/{patch}", Decision("model", f"{letter}/{patch}", why))]


def _image_size(short: int, device: str) -> int:
    if short < 48:
        return 32
    return 64 if short < 96 or device != "cuda" else 128


def choose_loss(objective: ObjectiveConfig) -> list[tuple[str, Any, Decision]]:
    """For images with any number of labels: a decision for or against each of them."""
    if objective.loss == "sigmoid":
        return []
    why = "an image can have several labels, so each is decided for itself"
    return [("objective.loss", "sigmoid", Decision("loss", "sigmoid", why))]


def choose_batch(facts: ChoiceInputs, train: TrainConfig) -> list[tuple[str, Any, Decision]]:
    """The recipe's batch size, or a smaller one for few images; where a recipe says how many steps it takes, too, it
    means what it says."""
    if facts.images >= 4 * train.batch_size or train.steps is not None:
        return []
    batch = max(4, 2 ** int(math.log2(max(facts.images / 4, 4))))
    why = f"at least four batches in an epoch of {facts.images} images, where the recipe has {train.batch_size:,}; "
    why += "the learning rate stays"
    return [("train.batch_size", batch, Decision("batch size", str(batch), why))]


def choose_warmup(schedule: ScheduleConfig, steps: int) -> list[tuple[str, Any, Decision]]:
    """A tenth of the steps where the recipe, made for more images, would warm up for longer than the run lasts."""
    if schedule.warmup < 1 or schedule.warmup < steps:
        return []
    why = f"the recipe's {schedule.warmup:,} steps of warm-up are no less than the {steps:,} of this run"
    return [("schedule.warmup", 0.1, Decision("warm-up", "a tenth", why))]


def choose_length(facts: ChoiceInputs, train: TrainConfig, model: NetworkConfig) -> list[tuple[str, Any, Decision]]:
    """Steps: fewer epochs for more data, never more than the time budget."""
    usual, cap = (100.0, 2000) if facts.start is None else (20.0, 1000)
    wanted = min(usual, max(5.0, usual * math.sqrt(cap / facts.images)))
    epochs = min(wanted, facts.epochs_within_budget(model))
    steps = max(FEWEST_STEPS, round(epochs * facts.images / train.batch_size))
    real = steps * train.batch_size / facts.images
    why = f"{real:.0f} epochs of {facts.images:,} images in batches of {train.batch_size}"
    if epochs < wanted:
        why += f"; more would take over {facts.seconds / 60:.0f} minutes here"
    return [("train.steps", steps, Decision("steps", f"{steps:,}", why))]
