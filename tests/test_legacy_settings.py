"""Former names and values of settings: they work wherever settings are read, and warn once."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest

from tests.lock import data
from vitrail import errors
from vitrail.config import RunConfig, key_paths, parse_overrides, read_recipe, read_run_config, recipe_names, validate
from vitrail.config.legacy_settings import RENAMED
from vitrail.errors import Note, UserError
from vitrail.weights.bundle import Card, read_card

OLD_NAMES = [(section, old, new) for section, names in RENAMED.items() for old, new in names.items()]


@pytest.fixture(autouse=True)
def nothing_warned(monkeypatch):
    monkeypatch.setattr(errors, "_warned", set())


def caught(read, *arguments):
    """The result of `read` and the warnings that it gave."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        return read(*arguments), found


@pytest.mark.parametrize(("section", "old", "new"), OLD_NAMES)
def test_old_name_becomes_the_new_one_and_warns_once(section, old, new):
    paths = key_paths(RunConfig)
    assert f"{section}.{new}" in paths and f"{section}.{old}" not in paths
    settings, found = caught(parse_overrides, [f"{section}.{old}=7", f"{section}.{old}=8"])
    assert settings == {section: {new: 8}}
    assert [issubclass(one.category, Note) for one in found] == [True]
    assert f"{section}.{old} " in str(found[0].message) and f"{section}.{new};" in str(found[0].message)
    assert caught(parse_overrides, [f"{section}.{old}=9"])[1] == []
    assert caught(parse_overrides, [f"{section}.{new}=9"])[1] == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("model.start=found", ("model", "start", "auto")),
        ("model.start=named", ("model", "start", "required")),
        ("data.val=watch", ("data", "val_as_test", False)),
        ("data.val=test", ("data", "val_as_test", True)),
    ],
)
def test_old_value_becomes_the_new_one(old, new):
    section, key, value = new
    settings, found = caught(parse_overrides, [old])
    assert settings == {section: {key: value}} and len(found) == 1 and f"{section}.{key}=" in str(found[0].message)
    assert getattr(getattr(validate(RunConfig, settings, "settings"), section), key) == value


def test_recipe_of_a_user_warns_once_and_those_of_vitrail_never():
    for name in recipe_names():
        assert caught(read_recipe, name)[1] == []
    path = str(data.OLD / "recipe.toml")
    settings, found = caught(read_recipe, path)
    assert settings["optimizer"]["clip_grad_norm"] == 1.0 and settings["data"]["val_fraction"] == 0.1
    assert len(found) == 1 and "optimizer.clip -> optimizer.clip_grad_norm" in str(found[0].message)
    assert caught(read_recipe, path)[1] == []


def test_config_of_an_old_run_gives_no_warning():
    settings, found = caught(read_run_config, data.OLD / "stopped" / "config.toml")
    config = validate(RunConfig, settings, "config.toml")
    assert config.model.start == "auto" and config.data.val_as_test is False and not found


def test_both_names_are_an_error_that_says_where(tmp_path):
    with pytest.raises(UserError, match=r"--set: data\.holdout and data\.holdout_fraction"):
        parse_overrides(["data={holdout=0.3, holdout_fraction=0.2}"])
    (tmp_path / "both.toml").write_text("[optimizer]\nclip_grad_norm = 1.0\nclip = 1.0\n")
    with pytest.raises(UserError, match=r"both\.toml.*optimizer\.clip and optimizer\.clip_grad_norm"):
        read_recipe(str(tmp_path / "both.toml"))
    with pytest.raises(UserError, match=r"'w\.safetensors'.*data\.holdout and data\.holdout_fraction"):
        card = read_card(data.OLD / "start.safetensors").model_dump()
        validate(Card, card | {"data": {"holdout": 0.1, "holdout_fraction": 0.2}}, "'w.safetensors'")


def test_new_name_overrides_the_old_one_of_a_recipe_and_the_other_way_round(tmp_path):
    (tmp_path / "old.toml").write_text("[data]\nholdout = 0.3\n")
    (tmp_path / "new.toml").write_text("[data]\nholdout_fraction = 0.3\n")
    for recipe, override in (("old", "data.holdout_fraction=0.1"), ("new", "data.holdout=0.1")):
        from_recipe, _ = caught(read_recipe, str(tmp_path / f"{recipe}.toml"))
        settings, _ = caught(parse_overrides, [override])
        assert from_recipe == {"data": {"holdout_fraction": 0.3}} and settings == {"data": {"holdout_fraction": 0.1}}


def test_only_the_first_process_warns(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert caught(parse_overrides, ["optimizer.clip=1"])[1] == []
    monkeypatch.setenv("RANK", "0")
    assert len(caught(parse_overrides, ["optimizer.clip=1"])[1]) == 1


def test_warning_has_the_line_of_the_caller():
    _, found = caught(parse_overrides, ["optimizer.clip=1"])
    assert found[0].filename == __file__


@pytest.mark.slow
def test_command_warns_on_standard_error_alone():
    command = [sys.executable, "-m", "vitrail", "plan", "Ti/16", "--json", "--set", "model.initial=mimetic"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.stderr.count("model.initial") == 1 and "model.init;" in ended.stderr
    assert "model.init" not in ended.stdout
