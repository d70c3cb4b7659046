"""The options for common settings have the same effect as `--set`."""

import re
import tomllib

import pytest

from vitrail.config import OPTIONS, with_options
from vitrail.errors import UserError

VALUES = {  # option value, and the resulting value in config.toml
    "epochs": (2, None),
    "steps": (3, 3),
    "batch_size": (6, 6),
    "lr": (0.002, 0.002),
    "image_size": ("16x24", [16, 24]),
    "device": ("cpu", "cpu"),
    "seed": (7, 7),
    "workers": (1, 1),
    "precision": ("fp32", "fp32"),
}


def option(name):
    return f"--{name.replace('_', '-')}"


def test_options_set_the_settings(photos, tiny, tmp_path, typed):
    assert VALUES.keys() == OPTIONS.keys()
    arguments = [part for name, (value, _) in VALUES.items() if name != "epochs" for part in (option(name), value)]
    out = tmp_path / "run"
    code, output, _ = typed(
        "train", photos, "--from", tiny, "--recipe", "finetune", "--out", out, "--quiet", *arguments
    )
    assert code == 0 and output == ""
    settings = tomllib.loads((out / "config.toml").read_text())
    for name, (_, written) in VALUES.items():
        if name != "epochs":
            section, key = OPTIONS[name].split(".")
            assert settings[section][key] == written, name


def test_epochs_are_converted_to_steps(photos, tiny, tmp_path, typed):
    out = tmp_path / "run"
    arguments = ("--epochs", 2, "--batch-size", 9, "--image-size", 16)
    assert typed("train", photos, "--from", tiny, "--recipe", "finetune", "--out", out, *arguments)[0] == 0
    assert tomllib.loads((out / "config.toml").read_text())["train"]["steps"] == 2 * 36 / 9


def test_option_and_setting_exclude_each_other(photos, tiny, typed):
    for name, path in OPTIONS.items():
        with pytest.raises(UserError, match=re.escape(path)):
            with_options([f"{path}=1"], {name: 2})
    code, _, error = typed("train", photos, "--from", tiny, "--steps", 5, "--epochs", 1)
    assert code == 2 and "train.steps" in error and "train.epochs" in error
    code, _, error = typed("train", photos, "--from", tiny, "--lr", "fast")
    assert code != 0 and "--lr" in error


def test_options_become_toml_values():
    options = {"image_size": (16, 24), "precision": "fp32", "lr": 1e-5, "seed": 0, "epochs": None}
    assert with_options(["data.group_similar=false"], options) == [
        "data.group_similar=false",
        "model.image_size=[16, 24]",
        'precision.compute="fp32"',
        "optimizer.lr=1e-05",
        "train.seed=0",
    ]
