"""Every recipe builds and trains one step, with tiny networks of its family."""

import functools
import math
import re

import pytest
from rich.console import Console

import vitrail
from tests.commands.conftest import draw
from vitrail.config import RunConfig, read_recipe, recipe_folder, recipe_names, validate
from vitrail.models import variants
from vitrail.training.progress import read_metrics
from vitrail.weights import names

pytestmark = pytest.mark.slow  # half a second per recipe
TINY = (32, 1, 64, 2)  # width, depth, mlp_dim, heads
QUICK = ("train.device=cpu", "data.workers=0")
STEP = (
    "train.steps=1",
    "train.batch_size=8",
    "train.log_every=1",
    "precision.compute=fp32",
    "schedule.warmup=0",  # otherwise the first step has learning rate 0
)


def make_tiny(patch):
    """Replace every named network by one with a single block per stage and the same patches."""
    for letter in variants.SIZES:
        patch.setitem(variants.SIZES, letter, TINY)
    for layers in variants.RESNETS:
        patch.setitem(variants.RESNETS, layers, (1, 1, 1, 1))


def train(data, recipe, out, *settings, **options):
    quiet = Console(quiet=True)
    return vitrail.train(data, recipe=recipe, out=out, overrides=(*QUICK, *settings), console=quiet, **options)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    root = tmp_path_factory.mktemp("recipes") / "photos"
    for name, colour in {"red": (200, 60, 60), "green": (60, 200, 60), "blue": (60, 60, 200)}.items():
        draw(root / name, colour, 12)
    return root


@pytest.fixture(scope="module")
def start(photos, tmp_path_factory):
    """A function from the name of a network to starting weights at 16 px."""

    @functools.cache
    def trained(model):
        out = tmp_path_factory.mktemp("start") / "run"
        with pytest.MonkeyPatch.context() as patch:
            make_tiny(patch)
            return train(photos, "scratch", out, *STEP, "model.image_size=[16,16]", model=model).weights

    return trained


@pytest.mark.parametrize("name", recipe_names())
def test_recipe_trains_one_step(name, start, photos, tmp_path, monkeypatch):
    make_tiny(monkeypatch)
    config = validate(RunConfig, read_recipe(name), name)
    command = (recipe_folder() / f"{name}.toml").read_text().splitlines()[0]
    settings, options = [] if config.kind == "probe" else [*STEP], {}
    side = 32
    if config.model.name:
        patch = re.search(r"/(\d+)", config.model.name)
        side = 2 * int(patch[1]) if patch else 32
    elif "--from" in command:
        options["from_"] = start("R50x1" if name.startswith("bit") else "S/8")
    else:
        options["model"] = "S/8"
    if config.model.weights == names.BUNDLED:
        monkeypatch.setattr(names, "BUNDLED_FILE", start(config.model.name))
    if "objective.teacher" in command:
        settings.append(f"objective.teacher={start('S/8')}")
        side = 16
    result = train(photos, name, tmp_path / "run", *settings, f"model.image_size=[{side},{side}]", **options)
    if config.kind != "probe":
        losses = [row["loss"] for row in read_metrics(result.folder / "metrics.jsonl") if "loss" in row]
        assert len(losses) == 1 and math.isfinite(losses[0])
    if config.kind != "masked":  # the head starts at zero; one step changes it
        assert vitrail.load(result.weights).net.head.weight.abs().max() > 0
