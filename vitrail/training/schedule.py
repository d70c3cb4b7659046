"""Learning-rate schedules."""

from __future__ import annotations

import math

from vitrail.config import ScheduleConfig


def learning_rate(step: int, base: float, total: int, config: ScheduleConfig) -> float:
    """The learning rate at a step: linear warm-up, then decay as in the paper's code, times a linear cool-down.

    Parameters
    ----------
    step
        From 0 to total - 1.
    base
        The peak learning rate.
    total
        The number of steps of the run.
    """
    warmup, cooldown = config.warmup_steps(total), config.cooldown_steps(total)
    rate = _decayed_rate(max(step, warmup), warmup, base, total, config)
    if step < warmup:
        rate = config.warmup_start_lr + (rate - config.warmup_start_lr) * (step / warmup)
    return rate * min(1.0, max(total - step, 0) / cooldown) if cooldown else rate


def _decayed_rate(step: int, warmup: int, base: float, total: int, config: ScheduleConfig) -> float:
    """The learning rate at a step after warm-up."""
    progress = min((step - warmup) / max(total - warmup, 1), 1.0)
    if config.shape == "cosine":
        return config.end_lr + (base - config.end_lr) * 0.5 * (1 + math.cos(math.pi * progress))
    if config.shape == "linear":
        return config.end_lr + (base - config.end_lr) * (1 - progress)
    if config.shape == "rsqrt":
        return base / math.sqrt(1 + (step - warmup) / config.timescale)
    if config.shape == "staircase":
        # As in BiT, the drop comes after the step of a milestone. Rounded, since 0.57 * 100 is a little less than 57.
        return base / 10 ** sum(round(milestone * total, 6) < step for milestone in config.milestones)
    return base
