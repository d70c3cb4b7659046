"""Every script in examples/ runs as its docstring says, with small settings, and leaves the results it promises."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.commands.conftest import draw

EXAMPLES = Path(__file__).parents[1] / "examples"
NAMES = ("custom_loss", "distributed", "explain", "fewshot", "own_photos")


@pytest.fixture
def photos(tmp_path):
    draw(tmp_path / "photos" / "red", (200, 60, 60), 20)
    draw(tmp_path / "photos" / "blue", (60, 60, 200), 20)
    return tmp_path / "photos"


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Run an example in this process, in a folder of its own."""

    def run(name, *words):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")

    return run


def tensors(folder):
    return {
        name: tensor for name, tensor in load_file(folder / "model.safetensors").items() if tensor.is_floating_point()
    }


def test_examples_are_few_short_and_say_how_to_run_them():
    files = sorted(EXAMPLES.glob("*.py"))
    assert tuple(path.stem for path in files) == NAMES
    for path in files:
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) < 60
        about = text.split('"""')[1]
        assert f"examples/{path.name}" in about and re.search(r"\d+ (seconds|minutes)|a minute", about)


@pytest.mark.slow
def test_own_photos(run, photos, tmp_path):
    run("own_photos", photos, "--out", "run", "--epochs", 1, "--device", "cpu")
    for name in ("model.safetensors", "report.html", "evaluation.html", "config.toml"):
        assert (tmp_path / "run" / name).is_file(), name


@pytest.mark.slow
def test_custom_loss(run, tmp_path):
    run("custom_loss", "--out", "run", "--images", 128, "--epochs", 6)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if row.get("loss") is not None]
    assert len(losses) > 1 and min(losses[1:]) < losses[0]
    assert 0 <= next(row["val_top1"] for row in reversed(rows) if "val_top1" in row) <= 1


@pytest.mark.slow
def test_focal_loss_is_cross_entropy_times_the_squared_error_of_the_probability():
    focal = runpy.run_path(str(EXAMPLES / "custom_loss.py"))["focal_loss"]
    logits, labels = torch.randn(8, 5, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 5
    right = logits.softmax(-1)[torch.arange(8), labels]
    assert float(focal(lambda pixels: pixels, [logits, labels])) == pytest.approx(
        float((-((1 - right) ** 2) * right.log()).mean()), rel=1e-5
    )


@pytest.mark.slow
def test_fewshot(run, capsys):
    run("fewshot", "--shots", 5, "--test", 5)
    percent = float(re.search(r"([\d.]+)%", capsys.readouterr().out)[1])
    assert percent > 30  # of ten classes; chance is 10


@pytest.mark.slow
def test_explain(run, photos, tmp_path):
    run("explain", photos, "--out", "explained", "--measured", 0)
    numbers = json.loads((tmp_path / "explained" / "explain.json").read_text())
    assert len(numbers["attention_distance"]["pixels"]) == 12
    assert (tmp_path / "explained" / "explain.html").is_file()


@pytest.mark.slow
def test_distributed_processes_train_what_one_does(run, photos, tmp_path):
    words = [photos, "--steps", 2, "--batch-size", 16, "--device", "cpu"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, EXAMPLES / "distributed.py", *words, "--out", "two"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES.parent)}
    ended = subprocess.run(
        list(map(str, command)), cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr
    run("distributed", *words, "--out", "one")
    one, two = tensors(tmp_path / "one"), tensors(tmp_path / "two")
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-3, atol=1e-4)
