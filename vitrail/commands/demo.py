"""`vitrail demo`: what pre-training is worth, on the bundled images. One network twice: from the bundled weights and
from random ones, with the same images and the same number of steps."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from vitrail.atomic import atomic_write
from vitrail.config import DataConfig, read_recipe
from vitrail.data.dataset import Samples, bundled_images, open_dataset
from vitrail.errors import UserError, os_errors_as, user_path
from vitrail.inference.classifier import load
from vitrail.inference.device import device_of
from vitrail.interrupt import Interrupted, Interrupts
from vitrail.metrics.accuracy import ClassificationScores, softmax
from vitrail.report.demo_page import DemoFacts, DemoRun, write_demo_page
from vitrail.report.page import ReportImage
from vitrail.tasks.classification import example
from vitrail.terminal import escape, make_console
from vitrail.training.progress import read_metrics
from vitrail.weights.backbones import bundled
from vitrail.workflows.compare import ComparedRun, compare_runs
from vitrail.workflows.measure import compute_logits
from vitrail.workflows.report_images import ReportImages
from vitrail.workflows.train_run import train
from vitrail.workflows.vitrail_files import refuse_foreign_files


@dataclass(frozen=True)
class _Run:
    folder: str  # in that of the demo, and the name in words
    recipe: str
    name: str


PRETRAINED = _Run("pretrained", "demo", "after pre-training")
SCRATCH = _Run("scratch", "demo-scratch", "from random weights")


def demo(
    out: str | Path = "runs/demo",
    *,
    again: bool = False,
    overrides: Sequence[str] = (),
    console: Console | None = None,
) -> None:
    """Fine-tune the bundled weights, train the same network from random ones, compare both, show what they look at, and
    say what to try next. What is finished is used again, and what was stopped goes on."""
    console = console or make_console(ignore_write_errors=True)
    folder = user_path(out)
    console.print(
        "One network twice: from weights that have seen other images, and from random ones.\n"
        "3,000 images of CIFAR-10 (Krizhevsky, 2009): 2,000 to learn from, 1,000 to be tested on."
    )
    page, test = folder / "index.html", _first_of_each_class(open_dataset(bundled_images()).splits["test"])
    refuse_foreign_files([(page, "")], "choose another --out")
    _write_samples(folder / "samples", test)
    try:
        for number, run in enumerate((PRETRAINED, SCRATCH), 1):
            console.rule(f"[bold]{number} of 2: {run.name}[/]", align="left")
            _train(folder / run.folder, run, again, overrides, console)
        console.rule("[bold]both on the same 1,000 test images[/]", align="left")
        runs = [folder / run.folder for run in (SCRATCH, PRETRAINED)]
        scratch, pretrained = compare_runs(runs, bundled_images(), console=Console(quiet=True))[0]
        verdict = [_thesis(folder, pretrained, scratch), _difference(pretrained)]
        _show(console, pretrained, scratch, verdict)
        commands = next_commands(folder)
        write_demo_page(page, _facts(folder, pretrained, scratch, verdict, test, commands))
    except Interrupted as stopped:
        stopped.advice = "; the same command goes on"
        raise
    console.print(f"\npage:    [bold]{escape(str(page))}[/] (open it in a browser)")
    console.print(f"report:  [bold]{escape(str(folder / PRETRAINED.folder / 'report.html'))}[/]")
    console.print(f"model:   [bold]{escape(str(folder / PRETRAINED.folder / 'model.safetensors'))}[/]")
    console.print("next:")
    for command, what in zip(commands, ("", "", "    your own photos, as photos/<class>/*.jpg"), strict=True):
        console.print(f"    {escape(command)}[dim]{what}[/]")


def _train(folder: Path, run: _Run, again: bool, overrides: Sequence[str], console: Console) -> None:
    config = folder / "config.toml"
    if config.is_file() and read_recipe(str(config)).get("recipe") != run.recipe:
        raise UserError(f"{folder} holds another run: choose another --out for the demo")
    images = bundled_images()
    train(
        images, recipe=run.recipe, out=folder, overrides=overrides, resume=not again, overwrite=again, console=console
    )


def _thesis(folder: Path, pretrained: ComparedRun, scratch: ComparedRun) -> str:
    one, other = (_training(folder / run.folder) for run in (PRETRAINED, SCRATCH))
    return (
        f"The same network, the same images, the same {one[0]} steps ({one[1]:.1f} and {other[1]:.1f} minutes): "
        f"{100 * _top1(pretrained):.1f} % after pre-training, {100 * _top1(scratch):.1f} % from random weights."
    )


def _difference(pretrained: ComparedRun) -> str:
    paired = pretrained.against_first
    assert paired is not None and paired.p is not None
    low, high = (100 * bound for bound in paired.interval)
    return (
        f"The difference is {100 * paired.difference:.1f} points (95 % interval {low:.1f} to {high:.1f}): "
        f"{paired.only_second:,} test images are named rightly only after pre-training, {paired.only_first:,} only "
        f"from random weights (p = {paired.p:.1g}, McNemar's test){'' if paired.different else '; that can be chance'}."
    )


def _training(folder: Path) -> tuple[int, float]:
    """Steps and minutes, by the log of a run."""
    batch = read_recipe(str(folder / "config.toml"))["train"]["batch_size"]
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if isinstance(row.get("images_per_second"), float)]
    if not rows:
        raise UserError(f"{folder / 'metrics.jsonl'} does not tell how the run went: start over with --again")
    steps = np.array([row["step"] for row in rows])
    speed = np.array([row["images_per_second"] for row in rows])
    return int(steps[-1]), float((np.diff(steps, prepend=0) * batch / speed).sum() / 60)


def _scores(one: ComparedRun) -> ClassificationScores:
    assert isinstance(one.scores, ClassificationScores)  # the images have one label each
    return one.scores


def _top1(one: ComparedRun) -> float:
    return _scores(one).top1


def _show(console: Console, pretrained: ComparedRun, scratch: ComparedRun, verdict: Sequence[str]) -> None:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("", "right", "95 % interval"):
        table.add_column(heading, justify="right" if heading else "left")
    for run, one in ((PRETRAINED, pretrained), (SCRATCH, scratch)):
        low, high = _scores(one).top1_interval
        table.add_row(run.name, f"[bold]{_top1(one):.1%}[/]", f"{low:.1%} to {high:.1%}")
    console.print(table)
    for line in verdict:
        console.print(line)


def _first_of_each_class(test: Samples) -> Samples:
    return test.subset(np.sort(np.unique(test.labels, return_index=True)[1]))


def _write_samples(folder: Path, test: Samples) -> None:
    with os_errors_as(f"cannot write to {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        for index in range(len(test)):
            name = f"{test.classes[test.labels[index]]}{Path(test.name(index)).suffix}"
            image, path = test.read(index), folder / name
            if not os.path.lexists(path):
                with atomic_write(path) as temporary:
                    temporary.write_bytes(image)
            elif path.is_symlink() or path.read_bytes() != image:
                raise UserError(f"{path} was not written by the demo: choose another --out")


def next_commands(folder: Path) -> list[str]:
    called = sys.argv[0]  # what can be typed here: the command, its place, or the module
    module = [sys.executable, "-m", "vitrail"] if Path(called).name == "__main__.py" else [called]
    vitrail = ["vitrail"] if shutil.which("vitrail") else module
    trained, samples = str(folder / PRETRAINED.folder), str(folder / "samples")
    return [
        shlex.join([*vitrail, "predict", trained, samples, "--top", "3"]),
        shlex.join([*vitrail, "explain", trained, samples]),
        shlex.join([*vitrail, "train", "photos/"]),
    ]


def _facts(
    folder: Path,
    pretrained: ComparedRun,
    scratch: ComparedRun,
    verdict: Sequence[str],
    test: Samples,
    commands: Sequence[str],
) -> DemoFacts:
    own = bundled()
    starts = {PRETRAINED: f"the bundled weights, which learned from {own.learned}", SCRATCH: "random weights"}
    both = [(PRETRAINED, pretrained), (SCRATCH, scratch)]
    return DemoFacts(
        subtitle=f"{own.network}, from pre-trained weights and from random ones, on 2,000 images of CIFAR-10",
        measured_on="Measured on the 1,000 test images of the demo.",
        verdict=verdict,
        runs=[DemoRun(run.name, starts[run], _scores(one), f"{run.folder}/report.html") for run, one in both],
        images=list(zip(*(_pictures(folder / run.folder, test) for run, _ in both), strict=True)),
        commands=commands,
    )


def _pictures(weights: Path, test: Samples) -> list[ReportImage]:
    """What the network says to each image, and what spoke for it."""
    classifier = load(weights)
    spec, data = classifier.preprocess, DataConfig()
    with Interrupts() as interrupts, interrupts.interruptible():
        out = compute_logits(classifier.net, test, spec, data, device_of(classifier.net), interrupts)
        chances = softmax(out.values.numpy())
        examples = [
            example(row, int(own.argmax()), int(out.labels[row]), own, test.classes) for row, own in enumerate(chances)
        ]
        return ReportImages(classifier.net, out, test, spec, data).explained(examples)
