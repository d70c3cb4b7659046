"""Validation of plain values against a schema, and merging and flattening of nested values."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from vitrail.config.network import ModelConfig, NetworkConfig, ResNetConfig
from vitrail.errors import UserError, did_you_mean

S = TypeVar("S", bound=BaseModel)
TABLES = ("preprocess", "objective.class_weights")  # settings whose value is a table


def validate(schema: type[S], values: Mapping[str, Any], where: str) -> S:
    """Build a schema from plain values. Raises a UserError that names the key of the first problem."""
    if not isinstance(values, Mapping):
        raise UserError(f"{where}: expected a table of settings, not {values!r:.60}")
    try:
        return schema.model_validate(dict(values))
    except ValidationError as error:
        problems = error.errors()
        key = _key(problems[0]["loc"])
        if problems[0]["type"] == "extra_forbidden":
            known = key_paths(schema)
            raise UserError(f"{where}: unknown key '{key}'{did_you_mean(key, known)}") from None
        # A key with a union type has one problem per type. A problem inside the value tells which type was meant.
        key = next((deep for p in problems if (deep := _key(p["loc"])).startswith(f"{key}.")), key)
        messages = dict.fromkeys(p["msg"].removeprefix("Value error, ") for p in problems if _key(p["loc"]) == key)
        prefix = f"'{key}' " if key else ""
        raise UserError(f"{where}: {prefix}{', or '.join(messages)}") from None


def _key(location: tuple[int | str, ...]) -> str:
    """Return the dotted key of a problem, without the names of union members that pydantic inserts."""
    union_members = ("vit", "resnet", "int", "float", "bool", "str")
    return ".".join(str(part) for part in location if part not in union_members and "[" not in str(part))


def network_config(values: Mapping[str, Any], where: str) -> NetworkConfig:
    """Build the config of a network from plain values."""
    if values.get("kind") == "resnet":
        return validate(ResNetConfig, values, where)
    return validate(ModelConfig, values, where)


def key_paths(schema: type[BaseModel], prefix: str = "") -> list[str]:
    """Return the dotted keys of a schema: model.name, train.steps, ..."""
    paths: list[str] = []
    for name, field in schema.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            paths += key_paths(kind, f"{prefix}{name}.")
        else:
            paths.append(prefix + name)
    return paths


def flatten(nested: Mapping[str, Any], tables: Collection[str] = (), prefix: str = "") -> dict[str, Any]:
    """Flatten nested values to dotted keys, as {"train.steps": 500}. Keys in `tables` keep their table."""
    flattened: dict[str, Any] = {}
    for key, value in nested.items():
        path = prefix + key
        inner = isinstance(value, Mapping) and path not in tables
        flattened |= flatten(value, tables, f"{path}.") if inner else {path: value}
    return flattened


def leaves(nested: dict[str, Any]) -> list[str]:
    """Return the dotted keys of all settings. A setting with a table as its value, such as preprocess, is one key."""
    return list(flatten(nested, TABLES))


def merge(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` updated with `overrides`, section by section."""
    result = dict(base)
    for key, value in overrides.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merge(result[key], value) if both else value
    return result
