"""`vitrail demo`: the main job on the bundled images, from pixels to a report."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from vitrail.config import read_recipe
from vitrail.errors import UserError
from vitrail.images.dataset import bundled_images, open_dataset
from vitrail.runs.predict import predict
from vitrail.runs.show import make_console
from vitrail.runs.train import train
from vitrail.weights.bundle import read_card

SHOWN = 5  # sample images to predict


def demo(
    out: str | Path = "runs/demo",
    *,
    again: bool = False,
    overrides: Sequence[str] = (),
    console: Console | None = None,
) -> None:
    """Train on the bundled images, measure, predict a few of them, write the report, and say what to try next."""
    console = console or make_console()
    folder = Path(out)
    weights = folder / "model.safetensors"
    config = folder / "config.toml"
    if config.is_file() and read_recipe(str(config)).get("recipe") != "demo":
        raise UserError(f"{folder} holds another run: choose another --out for the demo")
    started = any((folder / "checkpoints").glob("step_*"))
    if weights.is_file() and not again:
        top1 = read_card(weights).metrics["top1"]
        console.print(f"{folder} holds a finished demo with top-1 {top1:.1%}; --again starts over")
    elif started and not again:
        train(out=folder, resume=True, console=console)
    else:
        console.print("3,000 images of CIFAR-10 (Krizhevsky, 2009): 2,000 to learn from, 1,000 to be tested on")
        train(bundled_images(), recipe="demo", out=folder, overrides=overrides, overwrite=True, console=console)
    console.print("\nfive of the test images:")
    predict(weights, _samples(folder / "samples"), top=3, console=console)
    vitrail = "vitrail" if shutil.which("vitrail") else sys.argv[0]  # as it can be typed here
    console.print(
        f"\nopen [bold]{folder / 'report.html'}[/] in a browser, then try\n"
        f"    {shlex.join([vitrail, 'predict', str(folder), str(folder / 'samples'), '--json'])}\n"
        f"    {shlex.join([vitrail, 'evaluate', str(folder), str(bundled_images())])}\n"
        f"    {shlex.quote(vitrail)} train photos/    with your own photos/<class>/*.jpg",
    )


def _samples(folder: Path) -> list[Path]:
    """A few test images of different classes as files."""
    folder.mkdir(parents=True, exist_ok=True)
    test = open_dataset(bundled_images()).splits["test"]
    step = len(test) // SHOWN
    files = []
    for index in range(0, step * SHOWN, step):
        name = Path(test.name(index))
        file = folder / f"{test.classes[test.labels[index]]}{name.suffix}"
        file.write_bytes(test.read(index))
        files.append(file)
    return files
