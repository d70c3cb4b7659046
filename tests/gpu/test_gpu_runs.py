"""A whole run on the GPU: stopped, resumed, and equal to the bit to one that was not."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from vitrail.images.dataset import bundled_images
from vitrail.runs.evaluate import evaluate
from vitrail.runs.train import train
from vitrail.training.interrupt import Interrupted
from vitrail.training.progress import TrainingProgress

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

# 197 tokens in bfloat16: the fused attention whose backward pass is not deterministic unless told to be.
SETTINGS = (
    "model.name=Ti/16",
    "model.image_size=[224, 224]",
    "model.dropout=0.1",
    "augment.mixup=0.2",
    "train.batch_size=32",
    "train.steps=24",
    "train.ema=0.9",
    "train.device=cuda",
    "precision.compute=bf16",
)


def run(folder: Path, **options: object) -> dict[str, torch.Tensor]:
    with open(os.devnull, "w") as nowhere:
        result = train(out=folder, console=Console(file=nowhere), **options)  # type: ignore[arg-type]
    return load_file(result.weights)


def test_a_stopped_run_goes_on_to_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(tmp_path / "whole", data=bundled_images(), overrides=SETTINGS)
    step = TrainingProgress.step

    def stop_at_nine(self: TrainingProgress, number: int) -> None:
        step(self, number)
        if number == 9:
            signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingProgress, "step", stop_at_nine)
        with pytest.raises(Interrupted):
            run(tmp_path / "stopped", data=bundled_images(), overrides=SETTINGS)
    resumed = run(tmp_path / "stopped", resume=True)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_the_gpu_and_the_cpu_score_the_same_weights_alike(tmp_path: Path) -> None:
    run(tmp_path / "run", data=bundled_images(), overrides=(*SETTINGS[:1], "model.image_size=[64, 64]", *SETTINGS[4:]))
    with open(os.devnull, "w") as nowhere:
        scores = [
            evaluate(tmp_path / "run", bundled_images(), device=device, console=Console(file=nowhere))
            for device in ("cuda", "cpu")
        ]
    assert scores[0].nll == pytest.approx(scores[1].nll, abs=1e-4)
    assert abs(scores[0].top1 - scores[1].top1) <= 0.002
