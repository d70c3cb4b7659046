import re

import pytest

from vitrail.config import TrainConfig
from vitrail.models.variants import config_from_name
from vitrail.workflows.choose import ChoiceInputs, choose_batch, choose_length, choose_model, choose_recipe


def facts(images=500, size=(300, 400), device="cpu", start=None):
    return ChoiceInputs(images, 5, size, device, start)


@pytest.fixture(autouse=True)
def two_cores(monkeypatch):
    monkeypatch.setattr("vitrail.workflows.choose.cores", lambda: 2)


def test_without_weights_the_recipe_is_scratch_and_the_reason_names_from():
    decision = choose_recipe(facts())
    assert decision.value == "scratch" and "--from" in decision.why


def test_with_weights_the_recipe_is_finetune_or_a_probe_if_fine_tuning_takes_hours():
    small, large = config_from_name("Ti/8", 10, 64), config_from_name("B/16", 10, 224)
    assert choose_recipe(facts(start=small)).value == "finetune"
    slow = choose_recipe(facts(images=5000, start=large))
    assert slow.value == "probe" and re.search(r"about [\d.]+ h ", slow.why)
    assert choose_recipe(facts(images=5000, start=large, device="cuda")).value == "finetune"


@pytest.mark.parametrize(
    ("size", "device", "pixels", "name"),
    [
        ((32, 32), "cpu", 32, "Ti/8"),
        ((300, 400), "cpu", 64, "Ti/16"),
        ((64, 64), "cuda", 64, "Ti/8"),
        ((300, 400), "cuda", 128, "Ti/16"),
    ],
)
def test_network_and_image_size_depend_on_the_images_and_the_machine(size, device, pixels, name):
    chosen = {key: value for key, value, _ in choose_model(facts(size=size, device=device), None)}
    assert chosen == {"model.image_size": (pixels, pixels), "model.name": name}
    config_from_name(name, 5, pixels)  # it exists


def test_more_data_gets_a_larger_network_only_on_a_gpu():
    assert {k: v for k, v, _ in choose_model(facts(20_000, device="cuda"), None)}["model.name"] == "S/16"
    assert {k: v for k, v, _ in choose_model(facts(20_000), None)}["model.name"] == "Ti/16"


@pytest.mark.parametrize(("size", "name"), [((224, 224), "Ti/32"), ((96, 128), "Ti/32"), ((36, 36), "Ti/4")])
def test_a_given_image_size_decides_the_patch_size(size, name):
    ((key, value, decision),) = choose_model(facts(), size)
    assert (key, value) == ("model.name", name)
    config = config_from_name(name, 5, size)
    assert decision.why.startswith(f"{config.grid[0] * config.grid[1]} patches")


def length(inputs, train=None, model=None):
    return {
        k: v for k, v, _ in choose_length(inputs, train or TrainConfig(), model or config_from_name("Ti/16", 5, 64))
    }


def test_epochs_shrink_with_data_and_stay_within_the_time_budget():
    epochs = [length(facts(n))["train.steps"] * 64 / n for n in (500, 2_000, 8_000, 32_000)]
    assert epochs == sorted(epochs, reverse=True)
    huge = length(facts(32_000), model=config_from_name("B/16", 5, 224))
    assert huge["train.steps"] == 100  # FEWEST_STEPS
    assert "over 10 minutes" in choose_length(facts(32_000), TrainConfig(), config_from_name("S/8", 5, 64))[-1][2].why


def test_tiny_data_gets_a_smaller_batch():
    ((key, batch, _),) = choose_batch(facts(20), TrainConfig())
    assert (key, batch) == ("train.batch_size", 4)
    assert choose_batch(facts(500), TrainConfig()) == []


def test_the_number_of_steps_depends_on_the_batch_size():
    steps = length(facts(500), TrainConfig(batch_size=16))["train.steps"]
    assert steps == pytest.approx(4 * length(facts(500), TrainConfig(batch_size=64))["train.steps"], rel=0.01)
