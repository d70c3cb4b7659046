"""Two processes that share one GPU, with gloo, since NCCL needs one GPU per process.

FSDP is not tested: gloo crashes when it gathers shards that are on a GPU (pytorch/pytorch#152645).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests import ranks as processes
from vitrail.data.dataset import bundled_images
from vitrail.training.checkpoint import CheckpointManager
from vitrail.training.progress import read_metrics

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

COMMON = (
    "model.name=Ti/8",
    "model.image_size=[32, 32]",
    "augment.mixup=0.2",
    "train.batch_size=64",
    "train.ema=0.9",
    "train.device=cuda",
    "train.log_every=1",
    "optimizer.clip_grad_norm=1",
)


def run(world: int, folder: Path, *settings: str) -> dict[str, torch.Tensor]:
    overrides = [part for setting in (*COMMON, *settings) for part in ("--set", setting)]
    command = ["train", bundled_images(), "--recipe", "scratch", "--out", folder / "run", *overrides]
    done(world, folder, *command)
    return load_file(folder / "run" / "model.safetensors")


def done(world: int, folder: Path, *command: object) -> None:
    started = processes.start(world, folder, processes.vitrail, *command)
    assert started.codes(240) == [0] * world, started.errors()


def test_two_processes_train_like_one(tmp_path: Path) -> None:
    exact = ("precision.compute=fp32", "train.compile=off", "train.steps=50")
    alone = run(1, tmp_path / "one", *exact)
    two = run(2, tmp_path / "two", *exact)
    losses = [[row["loss"] for row in read_metrics(tmp_path / name / "run" / "metrics.jsonl") if "loss" in row]
              for name in ("one", "two")]  # fmt: skip
    assert len(losses[0]) == 50
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)
    for name, tensor in alone.items():
        torch.testing.assert_close(two[name], tensor, rtol=0, atol=2e-3, msg=name)


def test_compiled_bfloat16_processes_resume_bit_for_bit(tmp_path: Path) -> None:
    usual = ("model.dropout=0.1", "train.checkpoint_every=8", "train.steps=24")
    whole = run(2, tmp_path / "whole", *usual)
    out = tmp_path / "parts" / "run"
    overrides = [part for setting in (*COMMON, *usual) for part in ("--set", setting)]
    command = ["train", bundled_images(), "--recipe", "scratch", "--out", out, *overrides]
    started = processes.start(2, tmp_path / "parts", processes.vitrail, *command)
    while started.alive and not CheckpointManager(out / "checkpoints", 2).steps():
        started.processes[0].join(0.05)
    assert started.alive, started.errors()
    started.kill()
    done(2, tmp_path / "parts", "train", "--resume", "--out", out)
    resumed = load_file(out / "model.safetensors")
    assert [name for name in whole if not torch.equal(whole[name], resumed[name])] == []
