"""`vitrail demo`: train one network from the bundled weights and from random weights, and compare both.

Both runs have the same images and the same number of steps.
"""

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
from vitrail.config import DataConfig, read_run_config
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
    folder: str  # in the folder of the demo
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
    """Fine-tune the bundled weights, train the same network from random weights, and write a page that compares them.

    A finished run is used as it is, and a stopped run resumes. With `again`, both start over.
    """
    console = console or make_console(ignore_write_errors=True)
    folder = user_path(out)
    console.print(
        "This trains one network twice: from pre-trained weights and from random weights.\n"
        "Data: 3,000 images of CIFAR-10 (Krizhevsky, 2009), 2,000 for training and 1,000 for testing."
    )
    page, test = folder / "index.html", _first_of_each_class(open_dataset(bundled_images()).splits["test"])
    refuse_foreign_files([(page, "")], "choose another --out")
    _write_samples(folder / "samples", test)
    try:
        for number, run in enumerate((PRETRAINED, SCRATCH), 1):
            console.rule(f"[bold]{number} of 2: {run.name}[/]", align="left")
            _train(folder / run.folder, run, again, overrides, console)
        console.rule("[bold]comparison on the 1,000 test images[/]", align="left")
        runs = [folder / run.folder for run in (SCRATCH, PRETRAINED)]
        scratch, pretrained = compare_runs(runs, bundled_images(), console=Console(quiet=True))[0]
        verdict = [_summary(folder, pretrained, scratch), _difference(pretrained)]
        _show(console, pretrained, scratch, verdict)
        commands = next_commands(folder)
        write_demo_page(page, _facts(folder, pretrained, scratch, verdict, test, commands))
    except Interrupted as stopped:
        stopped.advice = "; run the same command again to resume"
        raise
    console.print(f"\npage:    [bold]{escape(str(page))}[/] (open it in a browser)")
    console.print(f"report:  [bold]{escape(str(folder / PRETRAINED.folder / 'report.html'))}[/]")
    console.print(f"model:   [bold]{escape(str(folder / PRETRAINED.folder / 'model.safetensors'))}[/]")
    console.print("next:")
    for command, note in zip(commands, ("", "", "    your own photos, as photos/<class>/*.jpg"), strict=True):
        console.print(f"    {escape(command)}[dim]{note}[/]")


def _train(folder: Path, run: _Run, again: bool, overrides: Sequence[str], console: Console) -> None:
    config = folder / "config.toml"
    if config.is_file() and read_run_config(config).get("recipe") != run.recipe:
        raise UserError(f"{folder} holds another run: choose another --out for the demo")
    images = bundled_images()
    train(
        images, recipe=run.recipe, out=folder, overrides=overrides, resume=not again, overwrite=again, console=console
    )


def _summary(folder: Path, pretrained: ComparedRun, scratch: ComparedRun) -> str:
    (steps, minutes), (_, scratch_minutes) = (_steps_and_minutes(folder / run.folder) for run in (PRETRAINED, SCRATCH))
    return (
        f"Same network, same images, same {steps} steps ({minutes:.1f} and {scratch_minutes:.1f} minutes): "
        f"{100 * _top1(pretrained):.1f} % accuracy {PRETRAINED.name}, {100 * _top1(scratch):.1f} % {SCRATCH.name}."
    )


def _difference(pretrained: ComparedRun) -> str:
    paired = pretrained.against_first
    assert paired is not None and paired.p is not None
    low, high = (100 * bound for bound in paired.interval)
    return (
        f"The difference is {100 * paired.difference:.1f} points (95 % interval {low:.1f} to {high:.1f}): "
        f"{paired.only_second:,} test images are correct only {PRETRAINED.name}, {paired.only_first:,} only "
        f"{SCRATCH.name} (McNemar's test: p = {paired.p:.1g}{'' if paired.different else ', not significant'})."
    )


def _steps_and_minutes(folder: Path) -> tuple[int, float]:
    """Return the training steps and minutes from the log of a run."""
    batch = read_run_config(folder / "config.toml")["train"]["batch_size"]
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if isinstance(row.get("images_per_second"), float)]
    if not rows:
        raise UserError(f"{folder / 'metrics.jsonl'} has no training steps: start over with --again")
    steps = np.array([row["step"] for row in rows])
    speed = np.array([row["images_per_second"] for row in rows])
    return int(steps[-1]), float((np.diff(steps, prepend=0) * batch / speed).sum() / 60)


def _scores(run: ComparedRun) -> ClassificationScores:
    assert isinstance(run.scores, ClassificationScores)  # not multilabel
    return run.scores


def _top1(run: ComparedRun) -> float:
    return _scores(run).top1


def _show(console: Console, pretrained: ComparedRun, scratch: ComparedRun, verdict: Sequence[str]) -> None:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("", "accuracy", "95 % interval"):
        table.add_column(heading, justify="right" if heading else "left")
    for run, compared in ((PRETRAINED, pretrained), (SCRATCH, scratch)):
        low, high = _scores(compared).top1_interval
        table.add_row(run.name, f"[bold]{_top1(compared):.1%}[/]", f"{low:.1%} to {high:.1%}")
    console.print(table)
    for sentence in verdict:
        console.print(sentence)


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
    """Return commands to try next, in a form that works in this shell."""
    program = sys.argv[0]
    module = [sys.executable, "-m", "vitrail"] if Path(program).name == "__main__.py" else [program]
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
    backbone = bundled()
    starting_weights = {
        PRETRAINED: f"the bundled weights, trained on {backbone.pretrained_on}",
        SCRATCH: "random weights",
    }
    both = [(PRETRAINED, pretrained), (SCRATCH, scratch)]
    return DemoFacts(
        subtitle=f"{backbone.network} from pre-trained and from random weights, trained on 2,000 images of CIFAR-10",
        measured_on="Measured on the 1,000 test images of the demo.",
        verdict=verdict,
        runs=[
            DemoRun(run.name, starting_weights[run], _scores(compared), f"{run.folder}/report.html")
            for run, compared in both
        ],
        images=list(zip(*(_explained_images(folder / run.folder, test) for run, _ in both), strict=True)),
        commands=commands,
    )


def _explained_images(weights: Path, test: Samples) -> list[ReportImage]:
    """Return each image with its prediction and a map of the evidence for it."""
    classifier = load(weights)
    spec, data = classifier.preprocess, DataConfig()
    with Interrupts() as interrupts, interrupts.interruptible():
        outputs = compute_logits(classifier.net, test, spec, data, device_of(classifier.net), interrupts)
        probabilities = softmax(outputs.values.numpy())
        examples = [
            example(row, int(values.argmax()), int(outputs.labels[row]), values, test.classes)
            for row, values in enumerate(probabilities)
        ]
        return ReportImages(classifier.net, outputs, test, spec, data).explained(examples)
