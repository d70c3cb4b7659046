"""From the options of `vitrail train` to a `Plan`: data, network, preprocessing and every setting resolved.

In: the settings that the user gave, as nested dictionaries, and the recipe. Out: a `Plan`. Settings that the user gave
win over the recipe's; what neither sets is chosen automatically (`choose.py`, `starting_weights.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from vitrail.atomic import atomic_write
from vitrail.config import (
    NetworkConfig,
    Preprocess,
    RunConfig,
    TrainConfig,
    check_no_unused,
    check_resolved,
    leaves,
    merge,
    read_recipe,
    read_recipe_file,
    validate,
)
from vitrail.data.dataset import Dataset, open_dataset
from vitrail.data.splits import SplitRule
from vitrail.data.transforms import resolve_preprocess
from vitrail.errors import UserError, user_path
from vitrail.inference.device import choose_device
from vitrail.models.flops import count_macs
from vitrail.models.variants import parse_name
from vitrail.training.precision import choose_precision, has_triton
from vitrail.weights.names import absolute_spec
from vitrail.weights.read import Weights, read_weights
from vitrail.workflows.choose import (
    Choice,
    ChoiceInputs,
    Decision,
    choose_batch,
    choose_length,
    choose_loss,
    choose_model,
    choose_recipe,
    choose_warmup,
)
from vitrail.workflows.network import network_from_weights, new_network
from vitrail.workflows.starting_weights import choose_start, random_start_decision, starts_automatically
from vitrail.workflows.validate import check_probe_settings, check_requirements

if TYPE_CHECKING:
    import torch

SMALL_STEP = 1.5e13  # FLOP: about 50 ms on a fast GPU, and launching the kernels of a step takes the CPU as long


@dataclass(frozen=True)
class Plan:
    """Everything that a run needs, resolved. A checkpoint stores it, and `resume.py` reads it back."""

    config: RunConfig
    model: NetworkConfig
    preprocess: Preprocess
    dataset: Dataset
    device: torch.device
    weights: Weights | None  # starting weights; none when a run resumes, since its checkpoint has the tensors
    decisions: list[Decision] = field(default_factory=list)

    @property
    def steps(self) -> int:
        return self.config.train.steps or 0  # 0 for a linear probe

    @property
    def choice_inputs(self) -> ChoiceInputs:
        return _choice_inputs(self.dataset, self.device, self.weights)


def make_plan(
    settings: dict[str, Any],
    recipe: str | None,
    scanned: Callable[[int, int], None] | None = None,
    world: int = 1,
    message: Callable[[str], None] = lambda _: None,
) -> Plan:
    """Resolve every setting of a run.

    Parameters
    ----------
    settings
        What the user set, as nested settings. It wins over the recipe.
    recipe
        A recipe by name, or a .toml file; chosen automatically if not given.
    scanned
        Called with the progress of the scan of the images.
    world
        The number of processes.
    message
        Prints a line before something slow, such as a download.
    """
    # Settings are checked once before the recipe is chosen: opening the data needs some of them, and an error should
    # come before a long scan.
    early = validate(RunConfig, merge(read_recipe(recipe) if recipe else {}, settings), "settings")
    if early.kind == "custom":
        raise UserError("kind=custom is for training your own module with vitrail.fit(model, task, batches)")
    if not early.data.path:
        raise UserError("no training images: pass their folder, vitrail train DATA")
    if early.model.name:
        parse_name(early.model.name)
    device = choose_device(early.train.device)
    weights = read_weights(early.model.weights) if early.model.weights else None
    automatic_start = starts_automatically(early, recipe)
    check_requirements(early, weights, automatic_start)
    dataset = read_data(early, scanned)
    facts = _choice_inputs(dataset, device, weights)

    resolver, start = _Resolver(settings), early.model.weights
    if automatic_start:
        weights, start, decision = choose_start(facts, message)
        resolver.decisions.append(decision)
        facts = _choice_inputs(dataset, device, weights)
    elif weights is None:
        resolver.decisions.append(random_start_decision(early, recipe))
    resolver.take_recipe(recipe, facts)
    resolver.set("model.weights", start)
    if weights is None and not resolver.config.model.name:
        resolver.choose(choose_model(facts, resolver.config.model.image_size))
    model, preprocess = resolve_network(resolver.config, dataset, weights)
    resolver.set("model.image_size", model.image_size)
    resolver.config = resolver.config.model_copy(update={"preprocess": preprocess.model_dump()})
    resolver.set("train.device", str(device))
    resolver.set("data.path", dataset.root)  # absolute, so that a run can be resumed from another working directory
    if resolver.config.data.quarantine:
        resolver.set("data.quarantine", str(user_path(resolver.config.data.quarantine).absolute()))
    resolver.set("model.weights", absolute_spec(resolver.config.model.weights))
    resolver.set("objective.teacher", absolute_spec(resolver.config.objective.teacher))
    check_requirements(resolver.config, weights)  # again, because the recipe may have been chosen automatically
    if dataset.multilabel and resolver.config.kind != "masked":
        resolver.resolve_multilabel_loss()
    if resolver.config.kind != "probe":
        resolver.resolve_training(facts, model, device)
        check_resolved(resolver.config, device.type, world)
    check_no_unused(leaves(settings), resolver.config)
    config = validate(RunConfig, resolver.config.model_dump(), "settings")  # the settings together, with all choices
    return Plan(config, model, preprocess, dataset, device, weights, resolver.decisions)


class _Resolver:
    """The settings of a run while they are resolved, and the decisions so far."""

    def __init__(self, settings: dict[str, Any]):
        self.user_settings = settings  # `choose` never changes these
        self.config = RunConfig()
        self.decisions: list[Decision] = []

    def take_recipe(self, name: str | None, facts: ChoiceInputs) -> None:
        if name is None:
            decision = choose_recipe(facts)
            self.decisions.append(decision)
            name = decision.value
        from_user = self.user_settings
        self.user_settings = with_recipe_file(name, self.user_settings)
        values = merge(merge({"recipe": name}, read_recipe(name)), self.user_settings)
        if "epochs" in from_user.get("train", {}):
            values["train"].pop("steps", None)  # --epochs wins over the steps of the recipe
        self.config = validate(RunConfig, values, "settings")
        if self.config.kind == "probe":
            check_probe_settings(from_user)

    def set(self, path: str, value: Any) -> None:
        section, key = path.split(".")
        updated = getattr(self.config, section).model_copy(update={key: value})
        self.config = self.config.model_copy(update={section: updated})

    def choose(self, choices: Sequence[Choice]) -> None:
        """Apply the automatic choices, except for what the user set."""
        for path, value, decision in choices:
            section, key = path.split(".")
            if key not in self.user_settings.get(section, {}):
                self.set(path, value)
                self.decisions.append(decision)

    def resolve_multilabel_loss(self) -> None:
        if self.config.kind == "probe":
            raise UserError(
                "the probe recipe needs images with one label each, and these are multilabel: choose another --recipe"
            )
        self.choose(choose_loss(self.config.objective))
        if self.config.objective.loss != "sigmoid":
            raise UserError("multilabel images need objective.loss=sigmoid: softmax is for one label per image")

    def resolve_training(self, facts: ChoiceInputs, model: NetworkConfig, device: torch.device) -> None:
        """Batch size, length, precision, compilation and warm-up."""
        self.choose(choose_batch(facts, self.config.train))
        if self.config.train.steps is None and self.config.train.epochs is None:
            self.choose(choose_length(facts, self.config.train, model))
        self.resolve_precision(device)
        self.resolve_compile(device, 6.0 * count_macs(model) * self.config.train.batch_size)
        self.resolve_steps(facts.images)
        self.choose(choose_warmup(self.config.schedule, self.config.train.steps or 0))

    def resolve_precision(self, device: torch.device) -> None:
        setting = self.config.precision.compute
        precision, why = choose_precision(setting, device)
        self.set("precision.compute", precision)
        if setting == "auto":
            self.decisions.append(Decision("precision", precision, why))

    def resolve_compile(self, device: torch.device, flops: float) -> None:
        """`flops`: FLOP of a training step."""
        if self.config.train.compile != "auto":
            return
        how = "off" if device.type != "cuda" or not has_triton() else "graphs" if flops < SMALL_STEP else "network"
        self.set("train.compile", how)
        if how != "off":
            why = "CUDA graphs, because the steps are short" if how == "graphs" else "there is a GPU"
            self.decisions.append(Decision("compile", how, why))

    def resolve_steps(self, images: int) -> None:
        """Convert epochs to steps, so that config.toml has the exact length of the run."""
        self.set("train.steps", total_steps(self.config.train, images))
        self.set("train.epochs", None)


def total_steps(train: TrainConfig, images: int) -> int:
    """The number of steps: `train.steps`, or `train.epochs` over `images` images."""
    return train.steps or max(1, round((train.epochs or 0) * images / train.batch_size))


def read_data(config: RunConfig, scanned: Callable[[int, int], None] | None) -> Dataset:
    """Open the dataset. Raise UserError if there are no images to measure on."""
    data = config.data
    dataset = open_dataset(
        data.path,
        SplitRule.of(data.model_dump()),
        max_pixels=data.max_pixels,
        labelled=config.kind != "masked",
        quarantine=data.quarantine,
        follow_links=data.follow_links,
        progress=scanned,
    )
    if data.val_fraction == 0 and config.kind == "masked":
        raise UserError("masked-patch pre-training is measured on validation images: set data.val_fraction above 0")
    if not data.use_test and "test" in dataset.splits:
        dataset = replace(dataset, splits={name: samples for name, samples in dataset.splits.items() if name != "test"})
    if data.val_fraction == 0 and not dataset.splits.keys() & {"val", "test"}:
        raise UserError("data.val_fraction=0 and data.use_test=false leave nothing to measure on: set one of them")
    if data.val_fraction > 0 and "val" not in dataset.splits:
        raise UserError(
            f"{data.path} has no images for a validation split: each class needs at least two images from different "
            "groups"
        )
    return dataset


def resolve_network(config: RunConfig, dataset: Dataset, weights: Weights | None) -> tuple[NetworkConfig, Preprocess]:
    """The config of the network for this data, and its preprocessing; both follow the starting weights, if any."""
    choice = config.model
    count = len(dataset.classes) if config.kind != "masked" else 0  # no classification head
    overrides = dict(config.preprocess)
    if weights is None:
        base, model = None, new_network(choice, count)
    else:
        base, model = weights.card.preprocess, network_from_weights(weights.card.model, choice, count)
    size = overrides.pop("size", None)
    if size is not None and tuple(size) != model.image_size:
        raise UserError("preprocess.size is the image size of the network: set model.image_size, not preprocess.size")
    preprocess = resolve_preprocess(model.image_size, base, overrides, model.channels)
    if preprocess.channels != model.channels:
        raise UserError(
            f"preprocess.mean has {preprocess.channels} values, but the network has {model.channels} channels"
        )
    return model, preprocess


def write_config(path: Path, values: dict[str, Any]) -> None:
    """Write config.toml with every setting of the run; `--recipe config.toml` repeats the run."""
    with atomic_write(path) as temporary:
        temporary.write_text(tomli_w.dumps(values), encoding="utf-8")


def _choice_inputs(dataset: Dataset, device: torch.device, weights: Weights | None) -> ChoiceInputs:
    images, classes = len(dataset.splits["train"]), len(dataset.classes)
    start = weights.card.model if weights else None
    return ChoiceInputs(images, classes, dataset.median_size, device.type, start, dataset.multilabel)


def with_recipe_file(recipe: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Merge the user's settings over those of a recipe file. What a file sets counts as set by the user, so it is not
    chosen automatically. For a recipe by name, return the settings as they are."""
    if not recipe.endswith(".toml"):
        return settings
    from_file = read_recipe_file(recipe)
    from_file.pop("base", None)
    if "epochs" in settings.get("train", {}):
        from_file.get("train", {}).pop("steps", None)
    return merge(from_file, settings)
