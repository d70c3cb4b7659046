"""Settings that do not go together, told in one sentence before they cost time."""

from __future__ import annotations

from collections.abc import Collection

from vitrail.config.run import RunConfig
from vitrail.errors import UserError


def check_no_unused(typed: Collection[str], config: RunConfig) -> None:
    """That something reads what was typed: anything else would be a promise that nobody keeps."""
    augment, schedule, optimizer, kind = config.augment, config.schedule, config.optimizer, config.kind
    randaugment, mixing = augment.randaugment_layers > 0, augment.mixup > 0 or augment.cutmix > 0
    boxes = augment.crop in ("inception", "random_resized", "zoom")
    needs = {  # of a key, or of a section: whether it is read, and what it takes
        "masked.": (kind == "masked", "--recipe masked"),
        "objective.": (kind != "masked", "images with labels, which masked-patch pre-training does not look at"),
        "probe.": (kind == "probe", "--recipe probe"),
        "model.head_init": (bool(config.model.weights), "weights to start from (--from WEIGHTS)"),
        "lora.alpha": (config.lora.rank > 0, "a lora.rank above 0"),
        "lora.target_modules": (config.lora.rank > 0, "a lora.rank above 0"),
        "augment.crop_fraction": (augment.crop in ("resmall", "part"), "augment.crop=part or resmall"),
        "augment.shift": (augment.crop == "shift", "augment.crop=shift"),
        "augment.scale": (boxes, "augment.crop=inception, random_resized or zoom"),
        "augment.ratio": (boxes, "augment.crop=inception, random_resized or zoom"),
        "augment.randaugment_magnitude": (randaugment, "augment.randaugment_layers above 0"),
        "augment.randaugment_std": (randaugment, "augment.randaugment_layers above 0"),
        "augment.randaugment_style": (randaugment, "augment.randaugment_layers above 0"),
        "augment.erasing_fill": (augment.erasing > 0, "augment.erasing above 0"),
        "augment.mix_per": (mixing, "augment.mixup or augment.cutmix above 0"),
        "optimizer.momentum": (optimizer.name != "adamw", "optimizer.name=sgd or muon"),
        "optimizer.betas": (optimizer.name != "sgd", "optimizer.name=adamw or muon"),
        "optimizer.eps": (optimizer.name != "sgd", "optimizer.name=adamw or muon"),
        "optimizer.weight_decay_params": (optimizer.weight_decay > 0, "an optimizer.weight_decay above 0"),
        "optimizer.weight_decay_scale": (optimizer.weight_decay > 0, "an optimizer.weight_decay above 0"),
        "schedule.milestones": (schedule.shape == "staircase", "schedule.shape=staircase"),
        "schedule.timescale": (schedule.shape == "rsqrt", "schedule.shape=rsqrt"),
        "schedule.end_lr": (schedule.shape in ("cosine", "linear"), "schedule.shape=cosine or linear"),
        "schedule.warmup_start_lr": (schedule.warmup > 0, "a schedule.warmup above 0"),
        "train.ema_warmup": (config.train.ema > 0, "a train.ema above 0"),
    }
    for path in typed:
        section = path.partition(".")[0] + "."
        for is_read, what in (needs[key] for key in (section, path) if key in needs):
            if not is_read:
                raise UserError(f"nothing would read {path}: it needs {what}")


def check_resolved(config: RunConfig, device: str, world: int) -> None:
    """What can be told once everything is chosen."""
    check_training(config, device, world)
    train = config.train
    if train.batch_size % world:
        raise UserError(
            f"a batch of {train.batch_size} does not divide among {world} processes: "
            "start as many as do divide it, or change train.batch_size"
        )
    if config.augment.repeats > train.batch_size:
        raise UserError(f"augment.repeats={config.augment.repeats} is more than the batch of {train.batch_size} images")


def check_training(config: RunConfig, device: str, world: int) -> None:
    """The same for any network and any data."""
    train, precision, schedule = config.train, config.precision, config.schedule
    if train.compile == "graphs" and device != "cuda":
        raise UserError("train.compile=graphs is for NVIDIA GPUs: use off or network")
    for name in ("parameters", "residual"):
        if getattr(precision, name) == "bf16" and precision.compute != "bf16":
            raise UserError(f"precision.{name}=bf16 needs precision.compute=bf16, which is {precision.compute} here")
    if precision.reduce == "bf16" and device == "cpu" and world > 1:
        raise UserError("precision.reduce=bf16 is for GPUs: leave it out")
    if schedule.shape in ("cosine", "linear") and schedule.end_lr > config.optimizer.lr:
        raise UserError(f"schedule.end_lr={schedule.end_lr:g} is above the learning rate {config.optimizer.lr:g}")
    steps = train.steps or 0
    if schedule.warmup_steps(steps) + schedule.cooldown_steps(steps) > steps:
        raise UserError(
            f"warm-up and cool-down are longer than the run of {steps:,} steps: lower schedule.warmup or "
            "schedule.cooldown, or train for longer"
        )
