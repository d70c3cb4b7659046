"""From what the user asked to a complete plan: data, network, preprocessing and every setting resolved."""

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
    key_paths,
    leaves,
    merge,
    parse_overrides,
    read_recipe,
    read_recipe_file,
    validate,
)
from vitrail.data.dataset import Dataset, open_dataset
from vitrail.data.splits import SplitRule
from vitrail.data.transforms import resolve_preprocess
from vitrail.errors import UserError, did_you_mean, user_path
from vitrail.inference.device import choose_device
from vitrail.models.flops import macs
from vitrail.models.variants import parse
from vitrail.training.precision import choose_precision, has_triton
from vitrail.weights.names import whole_spec
from vitrail.weights.read import Weights, read_weights
from vitrail.workflows.choose import (
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
from vitrail.workflows.validate import check_requirements

if TYPE_CHECKING:
    import torch


SMALL_STEP = 1.5e13  # FLOP: about 50 ms of a fast GPU; its host takes as long to launch the kernels of a step


@dataclass(frozen=True)
class Plan:
    """Everything a run needs; all of it can be written down and read back."""

    config: RunConfig
    model: NetworkConfig
    preprocess: Preprocess
    dataset: Dataset
    device: torch.device
    weights: Weights | None  # none after a resume: the checkpoint holds what they gave
    decisions: list[Decision] = field(default_factory=list)

    @property
    def steps(self) -> int:
        return self.config.train.steps or 0  # a probe takes none

    @property
    def facts(self) -> ChoiceInputs:
        return _facts(self.dataset, self.device, self.weights)


def make_plan(
    given: dict[str, Any],
    recipe: str | None,
    scanned: Callable[[int, int], None] | None = None,
    world: int = 1,
    message: Callable[[str], None] = lambda _: None,
) -> Plan:
    """Every setting of a run on `world` processes. What is `given` stands; the rest comes from the recipe or is chosen
    from the data and the machine. `message` hears of what takes a while."""
    # The data needs settings before a recipe can be chosen from it; and what is wrong is told before a long scan.
    early = validate(RunConfig, merge(read_recipe(recipe) if recipe else {}, given), "settings")
    if early.kind == "custom":
        raise UserError("settings of a network of your own are for vitrail.fit(model, task, batches)")
    if not early.data.path:
        raise UserError("say which images to train on: vitrail train DATA")
    if early.model.name:
        parse(early.model.name)
    device = choose_device(early.train.device)
    weights = read_weights(early.model.weights) if early.model.weights else None
    left_open = starts_automatically(early, recipe)
    check_requirements(early, weights, left_open)
    dataset = read_data(early, scanned)
    facts = _facts(dataset, device, weights)

    settings, start = _Settings(given), early.model.weights
    if left_open:
        weights, start, decision = choose_start(facts, message)
        settings.decisions.append(decision)
        facts = _facts(dataset, device, weights)
    elif weights is None:
        settings.decisions.append(random_start_decision(early, recipe))
    settings.take_recipe(recipe, facts)
    settings.set("model.weights", start)
    if weights is None and not settings.config.model.name:
        settings.choose(choose_model(facts, settings.config.model.image_size))
    model, preprocess = resolve_network(settings.config, dataset, weights)
    settings.set("model.image_size", model.image_size)
    settings.config = settings.config.model_copy(update={"preprocess": preprocess.model_dump()})
    settings.set("train.device", str(device))
    settings.set("data.path", dataset.root)  # whole paths: a run can be resumed and repeated from another folder
    if settings.config.data.quarantine:
        settings.set("data.quarantine", str(user_path(settings.config.data.quarantine).absolute()))
    settings.set("model.weights", whole_spec(settings.config.model.weights))
    settings.set("objective.teacher", whole_spec(settings.config.objective.teacher))
    check_requirements(settings.config, weights)  # the recipe may have been chosen since
    if dataset.multilabel and settings.config.kind != "masked":
        if settings.config.kind == "probe":
            raise UserError("the probe recipe is for images with one label each: use another recipe (--recipe)")
        settings.choose(choose_loss(settings.config.objective))
        if settings.config.objective.loss != "sigmoid":
            raise UserError("images with several labels need objective.loss=sigmoid: softmax is for one label each")
    if settings.config.kind != "probe":
        settings.choose(choose_batch(facts, settings.config.train))
        if settings.config.train.steps is None and settings.config.train.epochs is None:
            settings.choose(choose_length(facts, settings.config.train, model))
        settings.fix_precision(device)
        settings.fix_compile(device, 6.0 * macs(model) * settings.config.train.batch_size)
        settings.fix_steps(facts.images)
        settings.choose(choose_warmup(settings.config.schedule, settings.config.train.steps or 0))
        check_resolved(settings.config, device.type, world)
    check_no_unused(leaves(given), settings.config)
    config = validate(RunConfig, settings.config.model_dump(), "settings")  # with all that was chosen
    return Plan(config, model, preprocess, dataset, device, weights, settings.decisions)


class _Settings:
    """The settings of a run while they are resolved, and the decisions taken on the way."""

    def __init__(self, given: dict[str, Any]):
        self.given = given
        self.config = RunConfig()
        self.decisions: list[Decision] = []

    def take_recipe(self, name: str | None, facts: ChoiceInputs) -> None:
        if name is None:
            decision = choose_recipe(facts)
            self.decisions.append(decision)
            name = decision.value
        typed = self.given
        self.given = with_recipe_file(name, self.given)
        values = merge(merge({"recipe": name}, read_recipe(name)), self.given)
        if "epochs" in typed.get("train", {}):  # what was typed wins over what the recipe says
            values["train"].pop("steps", None)
        self.config = validate(RunConfig, values, "settings")
        if self.config.kind == "probe":
            _refuse_unused(typed)

    def set(self, path: str, value: Any) -> None:
        section, key = path.split(".")
        own = getattr(self.config, section).model_copy(update={key: value})
        self.config = self.config.model_copy(update={section: own})

    def choose(self, choices: Sequence[tuple[str, Any, Decision]]) -> None:
        """Take choices for what the user did not set."""
        for path, value, decision in choices:
            section, key = path.split(".")
            if key not in self.given.get(section, {}):
                self.set(path, value)
                self.decisions.append(decision)

    def fix_precision(self, device: torch.device) -> None:
        asked = self.config.precision.compute
        precision, why = choose_precision(asked, device)
        self.set("precision.compute", precision)
        if asked == "auto":
            self.decisions.append(Decision("precision", precision, why))

    def fix_compile(self, device: torch.device, flops: float) -> None:
        """`flops` are those of a step."""
        if self.config.train.compile != "auto":
            return
        how = "off" if device.type != "cuda" or not has_triton() else "graphs" if flops < SMALL_STEP else "network"
        self.set("train.compile", how)
        if how != "off":
            why = "steps are too short to launch their kernels one by one" if how == "graphs" else "there is a GPU"
            self.decisions.append(Decision("compile", how, why))

    def fix_steps(self, images: int) -> None:
        """Epochs become steps, so that the written settings say exactly what ran."""
        self.set("train.steps", total_steps(self.config.train, images))
        self.set("train.epochs", None)


def total_steps(train: TrainConfig, images: int) -> int:
    return train.steps or max(1, round((train.epochs or 0) * images / train.batch_size))


def read_data(config: RunConfig, scanned: Callable[[int, int], None] | None) -> Dataset:
    """Open the data and make sure there are images to train on and images held out to measure on."""
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
        raise UserError(
            "masked-patch pre-training is measured on watched images alone: use a data.val_fraction above 0"
        )
    if not data.use_test and "test" in dataset.splits:
        dataset = replace(dataset, splits={name: part for name, part in dataset.splits.items() if name != "test"})
    if data.val_fraction == 0 and not dataset.splits.keys() & {"val", "test"}:
        raise UserError("data.val_fraction=0 and data.use_test=false leave nothing to measure on: set one of them")
    if data.val_fraction > 0 and "val" not in dataset.splits:
        needed = "every class needs two images or more that do not belong together"
        raise UserError(f"{data.path} has no images to hold out for measuring: {needed}")
    return dataset


def resolve_network(config: RunConfig, dataset: Dataset, weights: Weights | None) -> tuple[NetworkConfig, Preprocess]:
    """The network for this data, and how its pixels are made: from the starting weights where there are some."""
    choice = config.model
    count = len(dataset.classes) if config.kind != "masked" else 0  # nothing is classified
    overrides = dict(config.preprocess)
    if weights is None:
        base, model = None, new_network(choice, count)
    else:
        base, model = weights.card.preprocess, network_from_weights(weights.card.model, choice, count)
    asked = overrides.pop("size", None)
    if asked is not None and tuple(asked) != model.image_size:
        raise UserError("the network and its preprocessing have one size: set model.image_size, not preprocess.size")
    preprocess = resolve_preprocess(model.image_size, base, overrides, model.channels)
    if preprocess.channels != model.channels:
        raise UserError(f"preprocess.mean has {preprocess.channels} values, and the network {model.channels} channels")
    return model, preprocess


def write_config(path: Path, values: dict[str, Any]) -> None:
    """config.toml: every setting of the run; `--recipe config.toml` repeats it."""
    with atomic_write(path) as temporary:
        temporary.write_text(tomli_w.dumps(values), encoding="utf-8")


def _facts(dataset: Dataset, device: torch.device, weights: Weights | None) -> ChoiceInputs:
    start = weights.card.model if weights else None
    images, classes = len(dataset.splits["train"]), len(dataset.classes)
    return ChoiceInputs(images, classes, dataset.median_size, device.type, start, dataset.multilabel)


def parse_settings(overrides: Sequence[str]) -> dict[str, Any]:
    """Settings as "section.key=value", if there are such keys."""
    given = parse_overrides(overrides)
    known = key_paths(RunConfig)
    for path in leaves(given):
        if path not in known:
            raise UserError(f"--set: unknown key '{path}'{did_you_mean(path, known)}")
    if {"steps", "epochs"} <= given.get("train", {}).keys():
        raise UserError("train.steps and train.epochs both say how long to train: set one of them")
    return given


def with_recipe_file(recipe: str, given: dict[str, Any]) -> dict[str, Any]:
    """What was typed upon what stands in a recipe file of the user's own, which was said as much."""
    if not recipe.endswith(".toml"):
        return given
    own = read_recipe_file(recipe)
    own.pop("base", None)
    if "epochs" in given.get("train", {}):
        own.get("train", {}).pop("steps", None)
    return merge(own, given)


def _refuse_unused(given: dict[str, Any]) -> None:
    """A probe trains no network: settings of training would be promises that nothing keeps."""
    used = ("data.", "model.", "preprocess", "probe.", "train.seed", "train.device")
    for path in leaves(given):
        if not path.startswith(used):
            raise UserError(f"the probe recipe does not use {path}: leave it out")
