from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image
from rich.console import Console
from safetensors.torch import load_file

from tests import ranks as processes
from vitrail import distributed
from vitrail.cli.main import main
from vitrail.config import ModelConfig, Preprocess
from vitrail.interrupt import Interrupted
from vitrail.models import variants
from vitrail.models.build import build_model
from vitrail.training.progress import TrainingProgress
from vitrail.weights import names
from vitrail.weights.bundle import Card, write_bundle

SMALL_TI = (32, 2, 64, 2)  # width, depth, mlp_dim, heads


def draw(folder: Path, colour: tuple[int, int, int], count: int, size: int = 20) -> None:
    """Noisy images of one colour: easy to classify, no two equal."""
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(count):
        noise = np.random.default_rng([*colour, index]).integers(-40, 40, (size, size + 4, 3))
        pixels = np.clip(np.array(colour) + noise, 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{index:03d}.png")


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data") / "photos"
    draw(root / "red", (200, 60, 60), 15)
    draw(root / "green", (60, 200, 60), 15)
    draw(root / "blue", (60, 60, 200), 15)
    return root


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Starting weights of a network whose steps take milliseconds; no number of processes divides its sizes."""
    path = tmp_path_factory.mktemp("tiny") / "model.safetensors"
    model = ModelConfig(width=50, depth=2, mlp_dim=71, heads=2, patch=(8, 8), image_size=(16, 16), num_classes=0)
    torch.manual_seed(0)
    card = Card(model=model, preprocess=Preprocess(size=(16, 16)), created_with="a test")
    write_bundle(path, build_model(model).state_dict(), card)
    return path


@pytest.fixture(scope="session")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights like the bundled ones, with a smaller Ti."""
    path = tmp_path_factory.mktemp("bundled") / "ti8-stand-in.safetensors"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(variants.SIZES, "Ti", SMALL_TI)
        model = variants.config_from_name("Ti/8", 4, 64, pool="gap", positions="sincos")
    torch.manual_seed(0)
    card = Card(
        model=model,
        preprocess=Preprocess(size=(64, 64)),
        classes=tuple("abcd"),
        recipe={"model": {"name": "Ti/8"}},
        data={"name": "other-pictures", "images": {"train": 1234}},
        metrics={"top1": 0.4321, "measured_on": "Measured on 100 images of the val split."},
        licence="for research",
        created_with="a test",
    )
    write_bundle(path, {name: tensor.half() for name, tensor in build_model(model).state_dict().items()}, card)
    return path


@pytest.fixture
def bundled(stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In this process, use the stand-in as the bundled weights, and the smaller Ti."""
    monkeypatch.setattr(names, "BUNDLED_FILE", stand_in)
    monkeypatch.setitem(variants.SIZES, "Ti", SMALL_TI)
    return stand_in


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run a command in this process, so that monkeypatching works; returns exit code, output and errors."""

    def run(*words: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = 0
        monkeypatch.setattr(distributed, "end_process", lambda: None)
        monkeypatch.setattr("sys.argv", ["vitrail", *map(str, words)])
        try:
            main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        text = capsys.readouterr()
        return code, text.out, text.err

    return run


@pytest.fixture
def quiet() -> Console:
    return Console(file=open(os.devnull, "w"), width=200)


_blank = pytest.MonkeyPatch()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Images are painted but left blank, here and in the processes of tests/ranks.py, unless a test is marked
    `drawn`: to write them takes most of the time of a short run. tests/report looks at pictures, and in tests/lock
    every command draws its own."""
    if item.get_closest_marker("drawn") is None:
        _blank.setattr(Figure, "savefig", processes.save_blank)
        _blank.setenv(processes.NO_PLOTS, "1")


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    _blank.undo()


def vitrail(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command line in its own process, a fork of one that has imported everything."""
    with tempfile.TemporaryDirectory() as folder:
        started = processes.start(1, Path(folder), _command, cwd, arguments)
        (code,) = started.codes(timeout=120)
        return subprocess.CompletedProcess(list(map(str, arguments)), code, started.output(), started.errors())


def _command(cwd: Path | None, arguments: Sequence[object]) -> None:
    if cwd is not None:
        os.chdir(cwd)
    processes.vitrail(*arguments)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a run, without the record of its training images."""
    tensors = load_file(folder / "model.safetensors")
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("vitrail.")}


def assert_same_bits(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


@contextmanager
def stopped_at(step: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Send SIGTERM to a run in this process after a step, and expect it to stop."""
    shown = TrainingProgress.step

    def stop(self: TrainingProgress, number: int) -> None:
        shown(self, number)
        if number == step:
            signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingProgress, "step", stop)
        with pytest.raises(Interrupted):
            yield
