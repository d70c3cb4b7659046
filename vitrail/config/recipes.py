"""Recipes: settings under a name, laid over those of the recipe they are based on."""

from __future__ import annotations

import tomllib
from importlib import resources
from typing import Any

from vitrail.config.legacy_settings import current_settings
from vitrail.config.values import merge
from vitrail.errors import UserError, did_you_mean, note_once, os_errors_as, user_path


def recipe_names() -> list[str]:
    return sorted(p.name.removesuffix(".toml") for p in recipe_folder().iterdir() if p.name.endswith(".toml"))


def recipe_folder() -> Any:
    return resources.files("vitrail") / "recipes"


def read_recipe(name: str, over: tuple[str, ...] = ()) -> dict[str, Any]:
    """The values of a named recipe or a TOML file, laid over the recipe its `base` names; `over`: those above it."""
    values = read_recipe_file(name)
    if isinstance(values.get("train"), dict) and {"steps", "epochs"} <= values["train"].keys():
        raise UserError(f"recipe '{name}': train.steps and train.epochs both say how long to train: leave one out")
    base = values.pop("base", None)
    if base is None:
        return values
    if base not in recipe_names() or base in (name, *over):
        hint = did_you_mean(str(base), recipe_names()) or "; `vitrail recipes` lists them"
        raise UserError(f"recipe '{name}': base must be the name of another recipe, not '{base}'{hint}")
    under = read_recipe(base, (name, *over))
    train = values.get("train")
    if isinstance(train, dict) and "epochs" in train:  # what the recipe says itself wins over the steps of its base
        under.get("train", {}).pop("steps", None)
    return merge(under, values)


def read_recipe_file(name: str) -> dict[str, Any]:
    """What the file of a recipe itself says, without its base."""
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
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, tables within tables without end
        raise UserError(f"recipe '{name}' is not valid TOML: {error}") from None
    renamed: list[str] = []
    values = current_settings(values, lambda old, new: renamed.append(f"{old} is {new}"))
    if renamed:
        note_once(
            f"recipe '{name}' uses setting names of an earlier version, which still work. Now {', '.join(renamed)}."
        )
    return values
