"""The command line: thin subcommands over `vitrail.runs`. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import io
import os
import signal
import sys
from typing import Annotated, Literal

from cyclopts import App, Parameter
from rich.console import Console
from rich.markup import escape

from vitrail import __version__
from vitrail.errors import UserError

app = App(
    name="vitrail",
    version=f"vitrail {__version__}",
    help="Vision Transformers: from a folder of images to a trained, measured classifier.",
    help_epilogue="""First steps:

    vitrail demo                                   see it work on bundled images

    vitrail train photos/                          photos/<class>/*.jpg -> runs/photos

    vitrail predict runs/photos new.jpg            use what was trained
""",
    default_parameter=Parameter(negative=()),
)

Setting = Annotated[tuple[str, ...], Parameter(name="--set", help="A setting of the recipe, as section.key=value.")]
Device = Annotated[str, Parameter(help="cpu, cuda, or auto.")]


@app.command
def demo(*, out: str = "runs/demo", again: bool = False) -> None:
    """Train, measure and report on the bundled images, in about three minutes on two cores.

    A run that was stopped goes on; a finished one is shown again.

    Parameters
    ----------
    out
        The folder to work in.
    again
        Start over, even when a run is already there.
    """
    from vitrail.runs.demo import demo

    demo(out, again=again)


@app.command
def train(
    data: str | None = None,
    /,
    *,
    model: str | None = None,
    recipe: str | None = None,
    from_: Annotated[str | None, Parameter(name="--from")] = None,
    out: str | None = None,
    overrides: Setting = (),
    resume: bool = False,
    overwrite: bool = False,
) -> None:
    """Train a classifier on a folder of images.

    Whatever is not given is chosen from the data and the machine, and the reason is printed. The run folder gets
    config.toml, metrics.jsonl, checkpoints/, model.safetensors and report.html. Ctrl-C saves and stops.

    Examples:

    vitrail train photos/

    vitrail train photos/ --from runs/pets --set train.steps=500

    vitrail train photos/ --model S/16 --recipe scratch --out runs/mine

    vitrail train --resume --out runs/mine

    Parameters
    ----------
    data
        A folder or .zip with one folder of images per class, or with train/, val/, test/ folders of such.
    model
        A size and a patch, such as Ti/16, S/16, B/32.
    recipe
        A recipe by name (see `vitrail recipes`) or a .toml file.
    from_
        Weights to start from: a file, a run folder, or hf-hub:owner/name.
    out
        The run folder; runs/<name of the data> if not given.
    overrides
        A setting of the recipe, as section.key=value; may be repeated.
    resume
        Go on exactly where the run in --out stopped.
    overwrite
        Replace the run in --out.
    """
    from vitrail.runs.train import train

    train(
        data,
        model=model,
        recipe=recipe,
        from_=from_,
        out=out,
        overrides=overrides,
        resume=resume,
        overwrite=overwrite,
    )


@app.command
def evaluate(
    weights: str,
    data: str,
    /,
    *,
    split: Literal["train", "val", "test", "all"] | None = None,
    report: str | None = None,
    device: Device = "auto",
    json: bool = False,
) -> None:
    """Measure weights on images: accuracy with its interval, per class, confusion, calibration, and a report.

    A folder that the weights were trained on is measured on its held-out part only.

    Examples:

    vitrail evaluate runs/photos more_photos/

    vitrail evaluate runs/photos photos/ --json

    Parameters
    ----------
    weights
        A weights file, a run folder, or hf-hub:owner/name.
    data
        A folder or .zip with one folder of images per class.
    split
        Which images, where the data has splits.
    report
        Where to write the HTML report; beside the weights if not given.
    device
        cpu, cuda, or auto.
    json
        Print the numbers as JSON.
    """
    from vitrail.runs.evaluate import evaluate
    from vitrail.runs.show import make_console

    scores = evaluate(weights, data, split=split, report=report, device=device, console=make_console(stderr=json))
    if json:
        import json as format_json

        print(format_json.dumps(scores.to_dict()))


@app.command
def predict(
    weights: str,
    /,
    *images: str,
    top: int = 1,
    threshold: float = 0.0,
    json: bool = False,
    csv: bool = False,
    device: Device = "auto",
) -> None:
    """Label images: files, or every image in a folder.

    Examples:

    vitrail predict runs/photos new.jpg

    vitrail predict runs/photos inbox/ --csv > labels.csv

    vitrail predict runs/photos inbox/ --top 3 --threshold 0.5

    Parameters
    ----------
    weights
        A weights file, a run folder, or hf-hub:owner/name.
    images
        Image files and folders.
    top
        How many classes to show for each image.
    threshold
        Below this probability the answer is "none of these".
    json
        One JSON object a line.
    csv
        Comma-separated values.
    device
        cpu, cuda, or auto.
    """
    if not images:
        raise UserError("say which images to label: vitrail predict WEIGHTS IMAGE...")
    from vitrail.runs.predict import predict

    form = "json" if json else "csv" if csv else "table"
    failed = predict(weights, images, top=top, threshold=threshold, form=form, device=device)
    if failed:
        raise UserError(f"{failed} of the images could not be read")


@app.command
def models() -> None:
    """List the networks there are, with their cost at 224 px."""
    from vitrail.runs.catalogue import show_models
    from vitrail.runs.show import make_console

    show_models(make_console())


@app.command
def recipes(name: str | None = None, /) -> None:
    """List the training recipes, or show one.

    Parameters
    ----------
    name
        The recipe to show.
    """
    from vitrail.runs.catalogue import show_recipes
    from vitrail.runs.show import make_console

    show_recipes(make_console(), name)


def main() -> None:
    """Run a command; what the user can fix is one sentence on standard error, never a traceback."""
    for stream in (sys.stdout, sys.stderr):  # file names need not be text; they must not stop the rows after them
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        app()
    except UserError as error:
        _fail(str(error), 1)
    except KeyboardInterrupt:
        _say("stopped")
        sys.exit(128 + signal.SIGINT)
    except BrokenPipeError:  # the reader of our output went away, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except Exception as error:
        stopped_by = getattr(error, "signal_number", None)  # train.interrupt.Interrupted, whose import needs torch
        if stopped_by is None:
            raise
        _say(escape(str(error)))
        sys.exit(128 + stopped_by)


def _fail(sentence: str, code: int) -> None:
    _say(f"[bold red]error:[/] {escape(sentence)}")
    sys.exit(code)


def _say(text: str) -> None:
    Console(stderr=True, highlight=False, soft_wrap=True).print(text)
