"""The learning rate as a function of the step."""

from __future__ import annotations

import math

from vitrail.config import ScheduleConfig


def learning_rate(step: int, base: float, total: int, config: ScheduleConfig) -> float:
    """Linear warm-up from 0 times a decay that starts when warm-up ends, as in the paper's code."""
    warmup = warmup_steps(config, total)
    progress = min(max((step - warmup) / max(total - warmup, 1), 0.0), 1.0)
    if config.shape == "cosine":
        decayed = config.end + (base - config.end) * 0.5 * (1 + math.cos(math.pi * progress))
    elif config.shape == "linear":
        decayed = config.end + (base - config.end) * (1 - progress)
    else:
        decayed = base
    return decayed * min(1.0, step / warmup) if warmup else decayed


def warmup_steps(config: ScheduleConfig, total: int) -> int:
    """Below 1, `warmup` is a share of all steps."""
    return round(config.warmup * total) if config.warmup < 1 else int(config.warmup)
