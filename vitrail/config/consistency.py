"""Checks of settings against each other, before a run starts."""

from __future__ import annotations

from collections.abc import Collection

from vitrail.config.run import RunConfig
from vitrail.errors import UserError


def check_no_unused(paths: Collection[str], config: RunConfig) -> None:
    """Raise a UserError if one of the settings that a user passed has no effect in this config."""
    augment, schedule, optimizer, kind = config.augment, config.schedule, config.optimizer, config.kind
    randaugment, mixing = augment.randaugment_layers > 0, augment.mixup > 0 or augment.cutmix > 0
    boxes = augment.crop in ("inception", "random_resized", "zoom")
    requirements = {  # of a key, or of a section: whether it has an effect, and what it needs
        "masked.": (kind == "masked", "--recipe masked"),
        "objective.": (kind != "masked", "labels, which masked-patch pre-training does not use"),
        "probe.": (kind == "probe", "--recipe probe"),
        "model.head_init": (bool(config.model.weights), "weights to start from (--from WEIGHTS)"),
        "lora.alpha": (config.lora.rank > 0, "lora.rank > 0"),
        "lora.target_modules": (config.lora.rank > 0, "lora.rank > 0"),
        "augment.crop_fraction": (augment.crop in ("resmall", "part"), "augment.crop=part or resmall"),
        "augment.shift": (augment.crop == "shift", "augment.crop=shift"),
        "augment.scale": (boxes, "augment.crop=inception, random_resized or zoom"),
        "augment.ratio": (boxes, "augment.crop=inception, random_resized or zoom"),
        "augment.randaugment_magnitude": (randaugment, "augment.randaugment_layers > 0"),
        "augment.randaugment_std": (randaugment, "augment.randaugment_layers > 0"),
        "augment.randaugment_style": (randaugment, "augment.randaugment_layers > 0"),
        "augment.erasing_fill": (augment.erasing > 0, "augment.erasing > 0"),
        "augment.mix_per": (mixing, "augment.mixup or augment.cutmix > 0"),
        "optimizer.momentum": (optimizer.name != "adamw", "optimizer.name=sgd or muon"),
        "optimizer.betas": (optimizer.name != "sgd", "optimizer.name=adamw or muon"),
        "optimizer.eps": (optimizer.name != "sgd", "optimizer.name=adamw or muon"),
        "optimizer.weight_decay_params": (optimizer.weight_decay > 0, "optimizer.weight_decay > 0"),
        "optimizer.weight_decay_scale": (optimizer.weight_decay > 0, "optimizer.weight_decay > 0"),
        "schedule.milestones": (schedule.shape == "staircase", "schedule.shape=staircase"),
        "schedule.timescale": (schedule.shape == "rsqrt", "schedule.shape=rsqrt"),
        "schedule.end_lr": (schedule.shape in ("cosine", "linear"), "schedule.shape=cosine or linear"),
        "schedule.warmup_start_lr": (schedule.warmup > 0, "schedule.warmup > 0"),
        "train.ema_warmup": (config.train.ema > 0, "train.ema > 0"),
    }
    for path in paths:
        section = path.partition(".")[0] + "."
        for has_effect, needed in (requirements[key] for key in (section, path) if key in requirements):
            if not has_effect:
                raise UserError(f"{path} has no effect without {needed}")


def check_resolved(config: RunConfig, device: str, world: int) -> None:
    """Check the final settings of a run."""
    check_training(config, device, world)
    train = config.train
    if train.batch_size % world:
        raise UserError(
            f"train.batch_size={train.batch_size} is not divisible by {world} processes: "
            "change the batch size or the number of processes"
        )
    if config.augment.repeats > train.batch_size:
        raise UserError(f"augment.repeats={config.augment.repeats} is larger than train.batch_size={train.batch_size}")


def check_training(config: RunConfig, device: str, world: int) -> None:
    """Check the settings that apply to any network and any data."""
    train, precision, schedule = config.train, config.precision, config.schedule
    if train.compile == "graphs" and device != "cuda":
        raise UserError("train.compile=graphs needs an NVIDIA GPU: use off or network")
    for name in ("parameters", "residual"):
        if getattr(precision, name) == "bf16" and precision.compute != "bf16":
            raise UserError(f"precision.{name}=bf16 needs precision.compute=bf16, not {precision.compute}")
    if precision.reduce == "bf16" and device == "cpu" and world > 1:
        raise UserError("precision.reduce=bf16 needs a GPU: use fp32")
    if schedule.shape in ("cosine", "linear") and schedule.end_lr > config.optimizer.lr:
        raise UserError(f"schedule.end_lr={schedule.end_lr:g} is larger than optimizer.lr={config.optimizer.lr:g}")
    steps = train.steps or 0
    if schedule.warmup_steps(steps) + schedule.cooldown_steps(steps) > steps:
        raise UserError(
            f"schedule.warmup and schedule.cooldown are longer than the run of {steps:,} steps: shorten them, or raise "
            "train.steps"
        )
