"""Settings that contradict each other are rejected before a run changes any file."""

import re
import shutil
import tomllib
from contextlib import nullcontext

import pytest

from tests.small import SMALL
from vitrail.config import RunConfig, check_no_unused, check_resolved, leaves, merge, parse_overrides, read_recipe
from vitrail.errors import UserError
from vitrail.workflows.train_run import train
from vitrail.workflows.validate import check_requirements


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["kind=probe"], "probe .*--from WEIGHTS"),
        (["objective.teacher_weight=0.3"], r"teacher_weight .*objective\.teacher=WEIGHTS"),
        (["objective.temperature=2"], r"objective\.temperature .*objective\.teacher=WEIGHTS"),
        (["objective.teacher=nowhere"], "no weights at objective.teacher 'nowhere'"),
        (["lora.rank=4", "optimizer.freeze=2"], r"lora\.rank and optimizer\.freeze"),
        (["lora.rank=4"], r"lora\.rank .*--from WEIGHTS"),
        (["optimizer.freeze=backbone"], r"optimizer\.freeze .*--from WEIGHTS"),
        (["train.gradient_checkpointing=true", "model.name=R50x1"], r"train\.gradient_checkpointing .*ResNet"),
        (["model.init=mimetic", "model.name=R50x1"], r"model\.init=mimetic .*ResNet"),
        (["kind=masked", "model.name=R50x1"], "masked-patch .*--model"),
        (["kind=masked", "model.name=Axial-S/16"], "masked-patch .*--model"),
        (["kind=masked", "objective.class_weights=balanced"], "settings of objective"),
    ],
)
def test_requirements_of_a_run(settings, message):
    with pytest.raises(UserError, match=message):
        check_requirements(RunConfig.model_validate(parse_overrides(settings)), None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["train.compile=graphs"], r"train\.compile=graphs needs an NVIDIA GPU"),
        (["precision.parameters=bf16", "precision.compute=fp32"], "needs precision.compute=bf16"),
        (["precision.residual=bf16", "precision.compute=fp32"], "needs precision.compute=bf16"),
        (["precision.reduce=bf16"], r"precision\.reduce=bf16 needs a GPU"),
        (["train.batch_size=9"], r"train\.batch_size=9 is not divisible by 2 processes"),
        (["augment.repeats=16", "train.batch_size=8"], r"augment\.repeats=16 is larger than train\.batch_size=8"),
        (["schedule.end_lr=1.0"], r"schedule\.end_lr=1 is larger than optimizer\.lr"),
        (["schedule.warmup=60", "schedule.cooldown=50"], r"schedule\.warmup and schedule\.cooldown .* 100 steps"),
    ],
)
def test_resolved_settings_that_contradict_each_other(settings, message):
    config = RunConfig.model_validate(parse_overrides(["train.steps=100", *settings]))
    with pytest.raises(UserError, match=message):
        check_resolved(config, "cpu", 2)


@pytest.mark.parametrize(
    ("recipe", "setting", "needs"),
    [
        ("masked", "objective.label_smoothing=0.1", "labels"),
        ("scratch", "masked.mask_ratio=0.3", "--recipe masked"),
        ("scratch", "model.head_init=probe", "weights to start from"),
        ("scratch", "lora.alpha=8", "lora.rank > 0"),
        ("scratch", "schedule.milestones=[0.5]", "schedule.shape=staircase"),
        ("scratch", "augment.crop_fraction=0.5", "augment.crop=part or resmall"),
        ("scratch", "optimizer.momentum=0.8", "optimizer.name=sgd or muon"),
        ("paper-finetune", "optimizer.betas=[0.9, 0.95]", "optimizer.name=adamw or muon"),
        ("cifar", "augment.randaugment_magnitude=5", ""),
        ("cifar", "augment.randaugment_layers=0", ""),
        ("scratch", "model.head_bias=-1", ""),
        ("scratch", "objective.class_weights.red=2", ""),
    ],
)
def test_a_setting_without_effect_is_rejected(recipe, setting, needs):
    overrides = parse_overrides([setting])
    config = RunConfig.model_validate(merge(read_recipe(recipe), overrides))
    message = re.escape(f"{setting.partition('=')[0]} has no effect without {needs}")
    with pytest.raises(UserError, match=message) if needs else nullcontext():
        check_no_unused(leaves(overrides), config)


@pytest.mark.slow
def test_overwrite_keeps_the_old_run_if_the_new_one_is_rejected(photos, tmp_path, quiet):
    out = tmp_path / "run"
    first = [*SMALL, "train.steps=2"]
    train(photos, out=out, overrides=first, console=quiet)
    before = (out / "model.safetensors").read_bytes()
    for wrong in ("objective.class_weights.purple=2.0", "optimizer.name=muon", "objective.teacher=nowhere"):
        extra = ["lora.rank=500"] if wrong == "optimizer.name=muon" else []
        with pytest.raises(UserError):
            train(photos, from_=out, out=out, overwrite=True, overrides=[*first, wrong, *extra], console=quiet)
        assert (out / "model.safetensors").read_bytes() == before
    with pytest.raises(UserError, match="choose one"):
        train(photos, out=out, overwrite=True, resume=True, overrides=first, console=quiet)
    with pytest.raises(UserError, match="inside the training images"):
        train(photos, out=photos / "red", overrides=first, console=quiet)
    new = [*first, "objective.class_weights.red=2"]
    with pytest.raises(UserError, match="holds the starting weights"):
        train(photos, from_=out, out=out, overwrite=True, overrides=new, console=quiet)
    start = shutil.copy(out / "model.safetensors", tmp_path / "start.safetensors")
    train(photos, from_=start, out=out, overwrite=True, overrides=new, console=quiet)
    assert tomllib.loads((out / "config.toml").read_text())["objective"]["class_weights"] == {"red": 2.0}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('name = "adamw"', 'name = "sgd"', "optimizer.name cannot change"),
        ("ema = 0.0", "ema = 0.5", "train.ema cannot change"),
        ('name = "Toy/8"', 'name = "S/8"', "model.name cannot change"),
    ],
)
def test_accept_changes_rejects_settings_that_the_checkpoint_depends_on(photos, tmp_path, quiet, old, new, message):
    out = tmp_path / "run"
    train(photos, out=out, overrides=[*SMALL, "train.steps=2"], console=quiet)
    (out / "model.safetensors").unlink()  # as if the run had been stopped
    text = (out / "config.toml").read_text()
    assert old in text
    (out / "config.toml").write_text(text.replace(old, new))
    with pytest.raises(UserError, match=message):
        train(out=out, resume=True, accept_changes=True, console=quiet)
