"""From plain values to a schema: one-sentence errors, recipes over their bases, settings from the command line."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from vitrail.config.network import ModelConfig, NetworkConfig, ResNetConfig
from vitrail.errors import UserError, did_you_mean, given_path, os_errors_as

S = TypeVar("S", bound=BaseModel)
TABLES = ("preprocess", "objective.class_weights")  # settings whose value is a table


def validate(schema: type[S], values: Mapping[str, Any], where: str) -> S:
    """Build a schema from plain values; the first problem becomes one sentence that names the key."""
    if not isinstance(values, Mapping):
        raise UserError(f"{where}: a table of settings is needed here, not {values!r:.60}")
    try:
        return schema.model_validate(dict(values))
    except ValidationError as error:
        problems = error.errors()
        key = _key(problems[0]["loc"])
        if problems[0]["type"] == "extra_forbidden":
            known = key_paths(schema)
            raise UserError(f"{where}: unknown key '{key}'{did_you_mean(key, known)}") from None
        # A key that takes values of several kinds has a problem with each of them. Where one lies within the value, the
        # kind that was meant is known.
        key = next((deep for p in problems if (deep := _key(p["loc"])).startswith(f"{key}.")), key)
        said = dict.fromkeys(p["msg"].removeprefix("Value error, ") for p in problems if _key(p["loc"]) == key)
        about = f"'{key}' " if key else ""
        raise UserError(f"{where}: {about}{', or '.join(said)}") from None


def _key(place: tuple[int | str, ...]) -> str:
    """The dotted key of a problem, without pydantic's words for the kinds of value it tried."""
    tried = ("vit", "resnet", "int", "float", "bool", "str")
    return ".".join(str(part) for part in place if part not in tried and "[" not in str(part))


def network_config(values: Mapping[str, Any], where: str) -> NetworkConfig:
    """The config of any network from plain values."""
    if values.get("kind") == "resnet":
        return validate(ResNetConfig, values, where)
    return validate(ModelConfig, values, where)


def key_paths(schema: type[BaseModel], prefix: str = "") -> list[str]:
    """Every dotted key a schema takes: model.name, train.steps, ..."""
    paths: list[str] = []
    for name, field in schema.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            paths += key_paths(kind, f"{prefix}{name}.")
        else:
            paths.append(prefix + name)
    return paths


def leaves(nested: dict[str, Any], prefix: str = "") -> list[str]:
    """Dotted keys of all settings; one whose value is a table, such as preprocess, is one setting."""
    found: list[str] = []
    for key, value in nested.items():
        path = prefix + key
        found += leaves(value, f"{path}.") if isinstance(value, dict) and path not in TABLES else [path]
    return found


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
        path = given_path(name)
        if not path.is_file():
            raise UserError(f"recipe file '{name}' does not exist")
        with os_errors_as(f"recipe file '{name}' cannot be read"):
            text = path.read_text(encoding="utf-8", errors="replace")
    else:
        known = recipe_names()
        raise UserError(f"no recipe '{name}'{did_you_mean(name, known) or '.'} `vitrail recipes` lists them.")
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, tables within tables without end
        raise UserError(f"recipe '{name}' is not valid TOML: {error}") from None


def merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` laid on `under`, section by section."""
    result = dict(under)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merge(result[key], value) if both else value
    return result


def parse_overrides(assignments: Iterable[str]) -> dict[str, Any]:
    """`["train.steps=500", "model.name=S/16"]` as nested values; a value is TOML, or a plain word."""
    nested: dict[str, Any] = {}
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        if not equals or not path.strip():
            raise UserError(f"--set takes section.key=value, not '{assignment}'")
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except (ValueError, RecursionError):
            value = text.strip()
        for part in reversed(path.strip().split(".")):
            value = {part: value}
        nested = merge(nested, value)
    return nested


# Settings that people reach for every day have options of their own, under the names they type.
OPTIONS = {
    "epochs": "train.epochs",
    "steps": "train.steps",
    "batch_size": "train.batch_size",
    "lr": "optimizer.lr",
    "image_size": "model.image_size",
    "device": "train.device",
    "seed": "train.seed",
    "workers": "data.workers",
    "precision": "precision.compute",
}


def with_options(overrides: Sequence[str], options: Mapping[str, Any]) -> list[str]:
    """`overrides` and the options that were given, as `section.key=value`."""
    given = [f"{OPTIONS[name]}={_toml(value)}" for name, value in options.items() if value is not None]
    for setting in overrides:
        path = setting.partition("=")[0].strip()
        for name, own in OPTIONS.items():
            if own == path and options.get(name) is not None:
                raise UserError(f"--{name.replace('_', '-')} and --set {path} are the same setting: leave one out")
    return [*overrides, *given]


def _toml(value: Any) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    return str(list(value)) if isinstance(value, tuple) else str(value)
