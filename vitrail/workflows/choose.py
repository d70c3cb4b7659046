"""Automatic choices: recipe, network, loss, batch size, warm-up and number of steps, for what the user did not set.

In: `ChoiceInputs`, a few numbers about the data, the machine and the starting weights. Out: settings, each with a
`Decision` that states the reason, to print and to list in the report. `resolve.py` calls these functions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from vitrail.config import NetworkConfig, ObjectiveConfig, ScheduleConfig, Size, TrainConfig
from vitrail.data.scan import cores
from vitrail.models.flops import count_macs
from vitrail.weights.backbones import BASE, SMALL, TINY, Backbone

CPU_CORE_FLOPS = 60e9  # FLOP/s that one core sustains in training, to the nearest order of magnitude
GPU_FLOPS = 150e12  # the same for a GPU, in bfloat16
CPU_SECONDS, GPU_SECONDS = 600.0, 1200.0  # the longest run that is chosen automatically
FEWEST_STEPS = 100
PATCHES = (4, 8, 14, 16, 32, 1)  # patch sizes of the published networks; 1 divides every image size
BASE_IMAGES = 2_000  # training images from which a GPU starts from Base, which is three times as slow as Small
START = "start"  # `Decision.what` of the starting weights
SMALL_DATA = 20_000  # training images up to which a linear probe takes seconds


@dataclass(frozen=True)
class Decision:
    """An automatic choice and its reason."""

    what: str  # such as "batch size"
    value: str
    why: str


Choice = tuple[str, Any, Decision]  # setting, such as "train.batch_size"; its value; the decision to print


@dataclass(frozen=True)
class ChoiceInputs:
    """The facts that the automatic choices depend on."""

    images: int  # in the training split
    classes: int
    median_size: Size
    device: str  # cpu, cuda or mps
    start: NetworkConfig | None  # the network of the starting weights
    multilabel: bool = False  # an image can have any number of labels

    @property
    def flops(self) -> float:
        """FLOP/s that the machine sustains in training."""
        return GPU_FLOPS if self.device == "cuda" else CPU_CORE_FLOPS * cores()

    @property
    def seconds(self) -> float:
        """The time budget of a run whose length is chosen automatically."""
        return GPU_SECONDS if self.device == "cuda" else CPU_SECONDS

    def epochs_within_budget(self, model: NetworkConfig) -> float:
        return self.seconds * self.flops / (6 * count_macs(model)) / self.images


def choose_backbone(facts: ChoiceInputs) -> tuple[Backbone, str]:
    """The pretrained network to start from, and the reason."""
    if facts.device != "cuda":
        return TINY, "the smallest network, because there is no GPU"
    if facts.images < BASE_IMAGES:
        return SMALL, f"the small network, for {facts.images:,} training images"
    return BASE, f"the base network, for {facts.images:,} training images and a GPU"


def choose_recipe(facts: ChoiceInputs) -> Decision:
    if facts.start is None:
        return Decision("recipe", "scratch", "starts from random weights; --from WEIGHTS fine-tunes pretrained ones")
    if facts.epochs_within_budget(facts.start) < 2 and not facts.multilabel:
        hours = 6 * count_macs(facts.start) * 10 * facts.images / facts.flops / 3600
        why = f"ten epochs of fine-tuning would take about {hours:.1f} h on this machine; a linear probe needs one pass"
        return Decision("recipe", "probe", why)
    return Decision("recipe", "finetune", "the run starts from pretrained weights")


def choose_model(facts: ChoiceInputs, image_size: Size | None) -> list[Choice]:
    """The network for training from random weights, and its image size unless that is set."""
    choices = []
    short = min(facts.median_size)
    size = image_size or (_image_size(short, facts.device),) * 2
    if image_size is None:
        limit = "" if short < 96 or facts.device == "cuda" else ", and larger images would be slow without a GPU"
        why = f"the short side of the images is about {short} px{limit}"
        choices.append(("model.image_size", size, Decision("image size", f"{size[0]} px", why)))
    letter = "S" if facts.device == "cuda" and facts.images >= 10_000 else "Ti"
    across = 8 if facts.device == "cuda" else 4  # on two cores, 16 patches beat 64 in equal time
    patch = min((p for p in PATCHES if not (size[0] % p or size[1] % p)), key=lambda p: abs(min(size) / p - across))
    amount = "size S, for many images and a GPU" if letter == "S" else "the smallest size, for little data"
    patches = (size[0] // patch) * (size[1] // patch)
    why = f"{patches} patches per image; {amount}"
    return [*choices, ("model.name", f"{letter}/{patch}", Decision("model", f"{letter}/{patch}", why))]


def _image_size(short: int, device: str) -> int:
    if short < 48:
        return 32
    return 64 if short < 96 or device != "cuda" else 128


def choose_loss(objective: ObjectiveConfig) -> list[Choice]:
    """The loss for multilabel images: a sigmoid for each class."""
    if objective.loss == "sigmoid":
        return []
    why = "the images are multilabel: each class is predicted independently"
    return [("objective.loss", "sigmoid", Decision("loss", "sigmoid", why))]


def choose_batch(facts: ChoiceInputs, train: TrainConfig) -> list[Choice]:
    """A smaller batch size than the recipe's, for few images. A recipe that sets train.steps keeps its batch size."""
    if facts.images >= 4 * train.batch_size or train.steps is not None:
        return []
    batch = max(4, 2 ** int(math.log2(max(facts.images / 4, 4))))
    why = f"gives at least four batches per epoch of {facts.images} images; the recipe has {train.batch_size:,}, "
    why += "and the learning rate is unchanged"
    return [("train.batch_size", batch, Decision("batch size", str(batch), why))]


def choose_warmup(schedule: ScheduleConfig, steps: int) -> list[Choice]:
    """A tenth of the steps, if the warm-up of the recipe, made for more images, is longer than the run."""
    if schedule.warmup < 1 or schedule.warmup < steps:
        return []
    why = f"the recipe's {schedule.warmup:,} warm-up steps would fill this run of {steps:,} steps"
    return [("schedule.warmup", 0.1, Decision("warm-up", "10% of the steps", why))]


def choose_length(facts: ChoiceInputs, train: TrainConfig, model: NetworkConfig) -> list[Choice]:
    """The number of steps: fewer epochs for more data, within the time budget."""
    usual, cap = (100.0, 2000) if facts.start is None else (20.0, 1000)
    wanted = min(usual, max(5.0, usual * math.sqrt(cap / facts.images)))
    epochs = min(wanted, facts.epochs_within_budget(model))
    steps = max(FEWEST_STEPS, round(epochs * facts.images / train.batch_size))
    real = steps * train.batch_size / facts.images
    why = f"{real:.0f} epochs of {facts.images:,} images in batches of {train.batch_size}"
    if epochs < wanted:
        why += f"; more would take over {facts.seconds / 60:.0f} minutes on this machine"
    return [("train.steps", steps, Decision("steps", f"{steps:,}", why))]
