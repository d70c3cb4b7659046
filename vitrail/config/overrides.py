"""Settings from the command line: `--set section.key=value`, and the options for common settings."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vitrail.config.legacy_settings import current_settings
from vitrail.config.values import merge
from vitrail.errors import UserError, warn_once

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
    """Parse ["train.steps=500", "model.name=S/16"] into nested values. A value is TOML, or a string without quotes."""
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
        try:
            nested = merge(nested, current_settings(value, warn_once))
        except ValueError as error:
            raise UserError(f"--set: {error}") from None
    return nested


def with_options(overrides: Sequence[str], options: Mapping[str, Any]) -> list[str]:
    """Return `overrides` and the options that are not None, as `section.key=value`."""
    assignments = [f"{OPTIONS[name]}={_toml(value)}" for name, value in options.items() if value is not None]
    for setting in overrides:
        path = setting.partition("=")[0].strip()
        for name, option_path in OPTIONS.items():
            if option_path == path and options.get(name) is not None:
                raise UserError(f"--{name.replace('_', '-')} and --set {path} are the same setting: pass one of them")
    return [*overrides, *assignments]


def _toml(value: Any) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    return str(list(value)) if isinstance(value, tuple) else str(value)
