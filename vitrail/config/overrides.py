"""Settings from the command line: `--set section.key=value`, and options for those that people reach for every day."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vitrail.config.legacy_settings import current_settings
from vitrail.config.values import merge
from vitrail.errors import UserError, warn_once

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
        nested = merge(nested, current_settings(value, warn_once))
    return nested


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
