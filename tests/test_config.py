import pytest

from vitrail.config import ModelConfig, RunConfig, merge, parse_overrides, read_recipe, validate
from vitrail.errors import UserError
from vitrail.models.variants import config_from_name


def test_recipe_is_merged_over_its_base(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('base = "scratch"\n[train]\nsteps = 7\n')
    values = read_recipe(str(file))
    assert values["train"] == {"batch_size": 64, "steps": 7}
    assert values["optimizer"] == read_recipe("scratch")["optimizer"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"train": {"stpes": 5}}, "recipe: unknown key 'train.stpes'; did you mean 'train.steps'?"),
        ({"optimiser": {}}, "unknown key 'optimiser'; did you mean 'optimizer"),
        ({"train": {"steps": 0}}, "'train.steps' Input should be greater than 0"),
        ({"optimizer": {"name": "adam"}}, "'optimizer.name' Input should be 'adamw', 'sgd' or 'muon'"),
        ({"optimizer": {"betas": [2, 3]}}, "'optimizer.betas.0' Input should be less than 1"),
        ({"augment": {"ratio": [0, 0]}}, "ratio must be a range [low, high] with 0 < low <= high, not [0, 0]"),
        ({"augment": {"scale": [0.9, 0.1]}}, "scale must be a range [low, high] with 0 < low <= high, not [0.9, 0.1]"),
        ({"model": {"image_size": [0, 16]}}, "'model.image_size.0' Input should be greater than 0"),
        (
            {"objective": {"class_weights": "even"}},
            "'objective.class_weights' Input should be 'none' or 'balanced', or",
        ),
        ({"objective": {"class_weights": {"red": -1}}}, "'objective.class_weights.red' Input should be greater than"),
        ({"train": {"epochs": float("inf")}}, "'train.epochs' Input should be a finite number"),
    ],
)
def test_invalid_key_or_value_is_named(values, message):
    with pytest.raises(UserError) as caught:
        validate(RunConfig, values, "recipe")
    assert message in str(caught.value)


def test_unknown_recipe_or_missing_file():
    with pytest.raises(UserError, match="no recipe 'scrach'; did you mean 'scratch'"):
        read_recipe("scrach")
    with pytest.raises(UserError, match="does not exist"):
        read_recipe("nowhere.toml")


def test_epochs_take_precedence_over_steps_of_the_base(tmp_path):
    file = tmp_path / "long.toml"
    file.write_text('base = "demo-scratch"\n[train]\nepochs = 60\n')
    assert read_recipe("demo-scratch")["train"]["steps"] == 84
    train = read_recipe(str(file))["train"]
    assert train["epochs"] == 60 and "steps" not in train
    file.write_text('base = "demo-scratch"\ntrain = 3\n')
    assert read_recipe(str(file))["train"] == 3  # rejected later, when values are validated


def test_invalid_base_and_invalid_toml(tmp_path):
    wrong = "base must be the name of another recipe"
    for text, message in [('base = "me"', wrong), ("base = 3", wrong), ("x", "TOML")]:
        (tmp_path / "me.toml").write_text(text)
        with pytest.raises(UserError, match=message):
            read_recipe(str(tmp_path / "me.toml"))
    (tmp_path / "me.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="TOML"):
        read_recipe(str(tmp_path / "me.toml"))


def test_parse_overrides():
    assert parse_overrides(
        ["train.steps=500", "model.name=S/16", "augment.scale=[0.1, 1.0]", "augment.flip=false"]
    ) == {
        "train": {"steps": 500},
        "model": {"name": "S/16"},
        "augment": {"scale": [0.1, 1.0], "flip": False},
    }
    with pytest.raises(UserError, match=r"section\.key=value"):
        parse_overrides(["train.steps"])


def test_merge():
    assert merge({"a": {"x": 1, "y": 2}, "b": 1}, {"a": {"y": 3}}) == {"a": {"x": 1, "y": 3}, "b": 1}


@pytest.mark.parametrize(
    ("name", "hint"),
    [("b/16", "'B/16'"), ("S16", "'S/16'"), ("B/", "'B/8'"), ("vit_base", "such as S/16"), ("B/0", "size")],
)
def test_invalid_model_name(name, hint):
    with pytest.raises(UserError) as caught:
        config_from_name(name, 10)
    assert hint in str(caught.value)


def test_inconsistent_network_is_rejected():
    with pytest.raises(UserError, match=r"224x224 .*patch 15x15"):
        config_from_name("S/15", 10)
    with pytest.raises(ValueError, match=r"5 heads"):
        ModelConfig(width=16, depth=1, mlp_dim=8, heads=5, patch=(4, 4), image_size=(8, 8), num_classes=2)
    with pytest.raises(UserError, match="needs class_token"):
        config_from_name("S/16", 10, class_token=False)


def test_image_size_as_one_number():
    assert validate(RunConfig, parse_overrides(["model.image_size=96"]), "settings").model.image_size == (96, 96)
    with pytest.raises(UserError, match=r"'model\.image_size.*' Input should be"):
        validate(RunConfig, parse_overrides(["model.image_size=-96"]), "settings")
