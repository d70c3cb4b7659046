"""Former names and values of settings, which recipes, overrides and weights files may still contain."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

# section: {old name: new name}
RENAMED: dict[str, dict[str, str]] = {
    "model": {"initial": "init", "head": "head_init"},
    "data": {
        "holdout": "holdout_fraction",
        "monitor": "val_fraction",
        "val": "val_as_test",
        "test": "use_test",
        "alike": "group_similar",
    },
    "augment": {
        "part": "crop_fraction",
        "area": "scale",
        "aspect": "ratio",
        "jitter": "color_jitter",
        "randaugment_spread": "randaugment_std",
    },
    "objective": {"teacher_share": "teacher_weight", "teacher_answers": "teacher_targets"},
    "masked": {"share": "mask_ratio"},
    "optimizer": {"decay": "weight_decay_params", "decay_times": "weight_decay_scale", "clip": "clip_grad_norm"},
    "lora": {"matrices": "target_modules"},
    "schedule": {"warmup_from": "warmup_start_lr", "end": "end_lr", "drops": "milestones"},
    "train": {
        "micro_batch": "micro_batch_size",
        "recompute": "gradient_checkpointing",
        "ema_ramp": "ema_warmup",
        "bad_steps": "max_nonfinite_steps",
        "rollbacks": "max_rollbacks",
    },
}

# (section, new name): {old value: new value}
VALUES: dict[tuple[str, str], dict[str, Any]] = {
    ("model", "start"): {"found": "auto", "named": "required"},
    ("data", "val_as_test"): {"watch": False, "test": True},
}


def current_settings(values: Any, warn: Callable[[str, str], None] | None = None) -> Any:
    """Return nested settings with current names and values. Calls `warn(old, new)` for each replaced one."""
    if not isinstance(values, Mapping):
        return values
    return {key: current_section(key, section, warn) for key, section in values.items()}


def current_section(section: str, settings: Any, warn: Callable[[str, str], None] | None = None) -> Any:
    """Return one section with current names and values. Raises a ValueError if both names of a setting are present."""
    if not isinstance(settings, Mapping):
        return settings
    renamed = RENAMED.get(section, {})
    current: dict[str, Any] = {}
    for old, value in settings.items():
        new = str(renamed.get(old, old))
        if new in current or (new != old and new in settings):
            raise ValueError(f"{section}.{old} and {section}.{new} are the same setting: keep one of them")
        renamed_values = VALUES.get((section, new), {})
        current_value = renamed_values[value] if isinstance(value, str) and value in renamed_values else value
        current[new] = current_value
        if warn is not None and (new != old or current_value is not value):
            warn(*_describe(section, (old, value), (new, current_value)))
    return current


def _describe(section: str, old: tuple[str, Any], new: tuple[str, Any]) -> tuple[str, str]:
    """Return both names, with values if the value changed."""
    if old[1] is new[1]:
        return f"{section}.{old[0]}", f"{section}.{new[0]}"
    value = str(new[1]).lower() if isinstance(new[1], bool) else new[1]
    return f"{section}.{old[0]}={old[1]}", f"{section}.{new[0]}={value}"
