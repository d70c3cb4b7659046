from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

# A network small enough for tests: four patches of a 16 px image.
SMALL = ("model.name=Ti/8", "model.image_size=[16, 16]", "train.batch_size=8", "precision.compute=fp32")


def draw(folder: Path, colour: tuple[int, int, int], count: int, size: int = 20) -> None:
    """Noisy pictures of one colour: easy to tell apart, no two alike."""
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


@pytest.fixture
def quiet() -> Console:
    return Console(file=open(os.devnull, "w"), width=200)


def vitrail(*arguments: object, timeout: float = 120, **options: object) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own, as a user runs it."""
    command = [sys.executable, "-m", "vitrail", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, **options)  # type: ignore[call-overload]
