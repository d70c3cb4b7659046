"""From plain values to a schema, with errors of one sentence; and plain values merged, or by dotted keys."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from vitrail.config.network import ModelConfig, NetworkConfig, ResNetConfig
from vitrail.errors import UserError, did_you_mean

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


def flatten(nested: Mapping[str, Any], tables: Collection[str] = (), prefix: str = "") -> dict[str, Any]:
    """Nested values by dotted keys, {"train.steps": 500}; the value of one of `tables` stays a table."""
    found: dict[str, Any] = {}
    for key, value in nested.items():
        path = prefix + key
        inner = isinstance(value, Mapping) and path not in tables
        found |= flatten(value, tables, f"{path}.") if inner else {path: value}
    return found


def leaves(nested: dict[str, Any]) -> list[str]:
    """Dotted keys of all settings; one whose value is a table, such as preprocess, is one setting."""
    return list(flatten(nested, TABLES))


def merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` laid on `under`, section by section."""
    result = dict(under)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merge(result[key], value) if both else value
    return result
