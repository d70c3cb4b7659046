"""Reading of recipes: TOML files of settings, each merged over its base recipe."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

from vitrail.config.legacy_settings import current_settings
from vitrail.config.values import merge
from vitrail.errors import UserError, did_you_mean, note_once, os_errors_as, user_path


def recipe_names() -> list[str]:
    return sorted(p.name.removesuffix(".toml") for p in recipe_folder().iterdir() if p.name.endswith(".toml"))


def recipe_folder() -> Any:
    return resources.files("vitrail") / "recipes"


def read_recipe(name: str, derived: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the settings of a recipe, by name or .toml file, merged over its base.

    `derived` are the recipes that led here by their `base`.
    """
    return _with_base(name, read_recipe_file(name), derived)


def read_run_config(path: str | Path) -> dict[str, Any]:
    """Return the settings in the config.toml of a run. Former names give no warning: the user did not write them."""
    return _with_base(str(path), _read(str(path), lambda old, new: None))


def _with_base(name: str, values: dict[str, Any], derived: tuple[str, ...] = ()) -> dict[str, Any]:
    if isinstance(values.get("train"), dict) and {"steps", "epochs"} <= values["train"].keys():
        raise UserError(f"recipe '{name}': train.steps and train.epochs exclude each other: keep one of them")
    base = values.pop("base", None)
    if base is None:
        return values
    if base not in recipe_names() or base in (name, *derived):
        hint = did_you_mean(str(base), recipe_names()) or "; `vitrail recipes` lists them"
        raise UserError(f"recipe '{name}': base must be the name of another recipe, not '{base}'{hint}")
    base_values = read_recipe(base, (name, *derived))
    train = values.get("train")
    if isinstance(train, dict) and "epochs" in train:  # takes precedence over the steps of the base
        base_values.get("train", {}).pop("steps", None)
    return merge(base_values, values)


def read_recipe_file(name: str) -> dict[str, Any]:
    """Return the settings in a recipe's own file, without its base."""
    renamed: list[str] = []
    values = _read(name, lambda old, new: renamed.append(f"{old} -> {new}"))
    if renamed:
        note_once(f"recipe '{name}' uses former setting names, which still work. Rename them: {', '.join(renamed)}")
    return values


def _read(name: str, warn: Callable[[str, str], None]) -> dict[str, Any]:
    if name in recipe_names():
        text = (recipe_folder() / f"{name}.toml").read_text(encoding="utf-8")
    elif name.endswith(".toml"):
        path = user_path(name)
        if not path.is_file():
            raise UserError(f"recipe file '{name}' does not exist")
        with os_errors_as(f"recipe file '{name}' cannot be read"):
            text = path.read_text(encoding="utf-8", errors="replace")
    else:
        known = recipe_names()
        raise UserError(f"no recipe '{name}'{did_you_mean(name, known) or '.'} `vitrail recipes` lists them.")
    try:
        values = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # RecursionError: deeply nested tables
        raise UserError(f"recipe '{name}' is not valid TOML: {error}") from None
    try:
        return dict(current_settings(values, warn))
    except ValueError as error:
        raise UserError(f"recipe '{name}': {error}") from None
